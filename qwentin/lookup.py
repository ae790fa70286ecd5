"""PromptLookup: what followed the last few tokens when they stood in the text before. Edits, quotations and lists repeat.

    ids    a b c d e f ... x b c d e | ?        the end "b c d e" stood before, so "f ..." is proposed

One index of all triples of ids, each with a link to the triple's occurrence before: a chain of earlier places, walked for
the longest match. Prompt and output alike; a token costs about a microsecond to add. How far the match reaches back says how
much it is worth (treeplan.py keeps the odds).

Who calls: drafter.py. Proven by tests/test_lookup.py.
"""
KEY = 3             # ids that must agree at least
LONGEST = 32        # ids that are compared
PLACES = 8          # earlier places that are looked at


class PromptLookup:
    """The index of one sequence's ids, extended as they grow."""

    def __init__(self):
        self.latest: dict[tuple[int, ...], int] = {}    # triple: where it ended last
        self.before: list[int] = []                     # [i]: where the triple that ends at i ended before, or -1

    def extend(self, ids: list[int]) -> None:
        """Index the ids that are new since the last call."""
        for i in range(len(self.before), len(ids)):
            key = tuple(ids[max(0, i - KEY + 1):i + 1])
            self.before.append(self.latest.get(key, -1))
            self.latest[key] = i

    def match(self, ids: list[int]) -> tuple[int, int]:
        """(ids that agree, where what followed them begins) of the longest earlier match of the end of ids, the latest of
        equals; (0, 0) if there is none."""
        self.extend(ids)
        length, found = 0, -1
        at = self.before[-1]
        for _ in range(PLACES):
            if at < KEY - 1:
                break
            same = agree(ids, at)
            if same > length:
                length, found = same, at
            at = self.before[at]
        return length, found + 1


def agree(ids: list[int], at: int) -> int:
    """How many ids that end at `at` equal those at the end of ids."""
    same, last = 0, len(ids) - 1
    while same < LONGEST and at - same >= 0 and ids[at - same] == ids[last - same]:
        same += 1
    return same
