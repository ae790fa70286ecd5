"""PromptLookup against a plain search, and what it costs."""
import random

from qwentin.lookup import KEY, LONGEST, PLACES, PromptLookup, agree


def search(ids):
    """The longest earlier match of the end of ids, the latest of equals, by trying every place."""
    found = [(agree(ids, at), at) for at in range(len(ids) - 1)]
    length, at = max(found, default=(0, -1))
    return (length, at + 1) if length >= KEY else (0, 0)


def test_what_followed_before():
    lookup = PromptLookup()
    assert lookup.match([1, 2, 3, 4, 9, 8, 1, 2, 3]) == (3, 3)
    assert lookup.match([1, 2, 3, 4, 9, 8, 1, 2, 3, 4]) == (4, 4)
    assert lookup.match([1, 2, 3, 4, 9, 8, 1, 2, 3, 4, 5]) == (0, 0)
    assert PromptLookup().match([7]) == (0, 0)


def test_the_longer_match_beats_the_later_one():
    ids = [5, 1, 2, 3, 60, 6, 1, 2, 3, 70, 5, 1, 2, 3]
    assert PromptLookup().match(ids) == (4, 4)


def test_as_a_plain_search_finds_it():
    rng = random.Random(2)
    for _ in range(60):
        lookup, ids = PromptLookup(), []
        for _ in range(60):
            ids.append(rng.randrange(4))
            length, start = lookup.match(ids)
            wanted = search(ids)
            near = [at for at in range(len(ids) - 1) if agree(ids, at) >= KEY][-PLACES:]
            assert (length, start) == max(((agree(ids, at), at + 1) for at in near), default=(0, 0))
            assert length <= wanted[0] and (length == wanted[0] or len(near) == PLACES)


def test_a_long_repetition_is_compared_so_far():
    ids = [1, 2, 3, 4] * 50
    assert PromptLookup().match(ids) == (LONGEST, 196)


def test_a_copy_is_followed_to_its_end():
    text = list(range(100))
    lookup, ids = PromptLookup(), text + [500] + text[:4]
    for at in range(4, 99):
        length, start = lookup.match(ids)
        assert start == at and length == min(at, LONGEST)
        ids.append(text[at])
