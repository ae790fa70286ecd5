"""DraftTree and the walk: shapes, best-first choice, and the law of what is accepted, by exact chi-square tests."""
import math
import random

import numpy as np
import pytest

from qwentin.request import SamplingParams
from qwentin.sampler import Sampler
from qwentin.step import ancestors, depths
from qwentin.tree import DraftTree, walk

V = 6


def sample_tree():
    tree = DraftTree(5)
    a = tree.add(0, 7, 0.6)
    b = tree.add(0, 8, 0.3)
    tree.add(a, 9, 0.5)
    tree.add(b, 9, 0.9)
    return tree


def test_rows_and_arrays():
    tree = sample_tree()
    tokens, parents = tree.arrays()
    assert tokens.tolist() == [5, 7, 8, 9, 9] and parents.tolist() == [-1, 0, 0, 1, 2]
    assert depths(parents).tolist() == tree.depths == [0, 1, 1, 2, 2]
    assert ancestors(parents)[4].tolist() == [True, False, True, False, True]
    assert tree.path(4) == [0, 2, 4] and tree.follow([8, 9, 1]) == 4 and tree.follow([1]) == 0
    assert tree.expected == pytest.approx(1 + 0.6 + 0.3 + 0.3 + 0.27)


def test_one_token_below_one_parent_is_one_row():
    tree = sample_tree()
    assert tree.add(0, 7, 0.2, "late") == 1 and tree.chances[1] == 0.6 and len(tree) == 5
    assert tree.add(0, 7, 0.8, "sure") == 1 and tree.origins[1] == "sure"
    assert tree.reach[1] == 0.8 and tree.reach[3] == pytest.approx(0.4), "what hangs below gains too"


def test_best_is_closed_and_best_first():
    rng = random.Random(3)
    for _ in range(200):
        tree = DraftTree(0)
        for token in range(1, rng.randint(2, 40)):
            tree.add(rng.randrange(len(tree)), token, rng.choice([0.0, 0.3, 0.5, 1.0]))
        guesses = rng.randint(0, 20)
        cut = tree.best(guesses, least=0.05)
        assert len(cut) <= guesses + 1 and all(p < i for i, p in enumerate(cut.parents))
        kept = {tuple(cut.tokens[r] for r in cut.path(i)) for i in range(len(cut))}
        whole = {tuple(tree.tokens[r] for r in tree.path(i)): tree.reach[i] for i in range(len(tree))}
        assert kept <= whole.keys() and all(whole[k] >= 0.05 for k in kept)
        lost = [reach for k, reach in whole.items() if k not in kept and reach >= 0.05]
        if len(cut) < guesses + 1:
            assert not lost
        elif lost:
            assert max(lost) <= min(whole[k] for k in kept)


def test_the_best_tree_reaches_its_depth():
    """A confident chain with siblings: 8 guesses go to the chain first, not to eight children of the root."""
    tree, row = DraftTree(0), 0
    for depth in range(12):
        for rank, chance in ((2, 0.04), (1, 0.06), (0, 0.9)):
            child = tree.add(row, 10 * depth + rank, chance)
        row = child
    cut = tree.best(8)
    assert max(cut.depths) == 8 and cut.parents == [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert max(tree.best(8, depth=3).depths) == 3


def test_walk_ends_where_nothing_matches_or_the_choice_ends():
    tree = sample_tree()
    assert walk(tree, lambda row: 1) == [0]
    assert walk(tree, lambda row: {0: 8, 2: 9, 4: 3}[row]) == [0, 2, 4]
    assert walk(tree, lambda row: {0: 8, 2: None}[row]) == [0, 2]


# ---------------------------------------------------------------------- the law of what is accepted
def target(tokens):
    """Logits f32 [V] of a made-up model after `tokens`."""
    return 1.5 * np.random.default_rng([len(tokens), *tokens]).standard_normal(V).astype(np.float32)


def random_tree(rng, root):
    tree = DraftTree(root)
    for _ in range(rng.randint(0, 7)):
        tree.add(rng.randrange(len(tree)), rng.randrange(V), rng.random())
    return tree


def generate(params, count, rng=None):
    """`count` tokens after token 0, in rounds over random trees if there is an rng."""
    sampler, text = Sampler(params, np.zeros(1, np.int32), V), [0]
    while len(text) <= count:
        tree = random_tree(rng, text[-1]) if rng else DraftTree(text[-1])
        before = list(text)

        def choose(row):
            assert before + [tree.tokens[r] for r in tree.path(row)[1:]] == text, "logits are those of the text so far"
            text.append(sampler.choose(target(text)))
            return text[-1] if len(text) <= count else None
        walk(tree, choose)
    return tuple(text[1:])


def hopeful(tree, choose):
    """A wrong rule: where the chosen token is not among the children, it takes a child in one case of two."""
    coins = np.random.default_rng(len(tree))

    def pick(row):
        token = choose(row)
        children = tree.children[row]
        return next(iter(children)) if token is not None and children and token not in children and coins.random() < 0.5 \
            else token
    return walk(tree, pick)


def generate_hopefully(params, count, rng):
    """generate() by the wrong rule; the text takes what that rule takes."""
    sampler, text = Sampler(params, np.zeros(1, np.int32), V), [0]
    while len(text) <= count:
        tree = random_tree(rng, text[-1])
        first = len(text)
        chosen = []

        def choose(row):
            path = [tree.tokens[r] for r in tree.path(row)[1:]]
            chosen.append(sampler.choose(target(text[:first] + path)))
            return chosen[-1] if first + len(path) < count else None
        path = hopeful(tree, choose)
        text += [tree.tokens[r] for r in path[1:]] + chosen[-1:]
    return tuple(text[1:count + 1])


def exact(params, count):
    """Probability of every text of `count` tokens, from the sampler's own chain."""
    found = {(): 1.0}
    for _ in range(count):
        longer = {}
        for text, p in found.items():
            sampler = Sampler(params, np.zeros(1, np.int32), V)
            for token in text if sampler.penalised else ():
                sampler.counts[token] += 1
                sampler.seen[token] = True
            for token, q in zip(*sampler.distribution(target([0, *text]))):
                longer[(*text, int(token))] = p * float(q)
        found = longer
    return found


def p_value(texts, probabilities):
    """Pearson's test; texts expected fewer than 5 times share a bin."""
    counts = dict.fromkeys(probabilities, 0)
    for text in texts:
        if text not in counts:
            return 0.0
        counts[text] += 1
    expected = np.array(list(probabilities.values())) * len(texts)
    seen = np.array(list(counts.values()), float)
    rare = expected < 5
    if rare.any():
        expected, seen = np.append(expected[~rare], expected[rare].sum()), np.append(seen[~rare], seen[rare].sum())
    return chi_square_tail(((seen - expected) ** 2 / expected).sum(), len(expected) - 1)


def chi_square_tail(x, freedom):
    """P(chi-square >= x) by Wilson and Hilferty's cube root: within 0.001 for 10 degrees of freedom and more."""
    spread = 2 / (9 * freedom)
    return math.erfc(((x / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread)) / 2


PARAMS = [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(top_k=3, logit_bias=((2, 1.5),)),
          SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, min_p=0.02)]


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "top_p", "top_k+bias", "penalties"])
def test_texts_have_the_targets_distribution(params):
    rng, probabilities = random.Random(11), exact(params, 3)
    texts = [generate(SamplingParams(**{**vars(params), "seed": s}), 3, rng) for s in range(4000)]
    assert p_value(texts, probabilities) > 0.01


def test_a_wrong_rule_is_found_out():
    rng, probabilities = random.Random(11), exact(SamplingParams(), 3)
    texts = [generate_hopefully(SamplingParams(seed=s), 3, rng) for s in range(4000)]
    assert p_value(texts, probabilities) < 1e-6


def test_the_same_seed_gives_the_same_text():
    rng = random.Random(5)
    for params in PARAMS:
        for seed in range(50):
            seeded = SamplingParams(**{**vars(params), "seed": seed})
            assert generate(seeded, 8, rng) == generate(seeded, 8)


def test_greedy_is_argmax():
    rng, greedy = random.Random(1), SamplingParams(temperature=0.0)
    for _ in range(50):
        text = generate(greedy, 6, rng)
        assert all(text[i] == int(target([0, *text[:i]]).argmax()) for i in range(6))
