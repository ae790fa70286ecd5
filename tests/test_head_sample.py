"""head_sample and penalise against sampler.py, the definition: the same tokens for the same uniform numbers."""
from collections import Counter

import numpy as np
import pytest

from qwentin.kernels import head_sample, lab, machines, penalise, philox, topk
from qwentin.request import SamplingParams
from qwentin.sampler import Sampler, pick
from qwentin.step import ancestors

V, K = 500, 32
EMULATOR = machines.Emulator()
NO_PROMPT = np.zeros(0, np.int32)
PARAMS = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
          for t in (0.0, 0.6, 1.3) for k in (0, 1, 20, K) for p in (1.0, 0.9, 0.4) for m in (0.0, 0.05)] * 4


def sampled(logits, params, seeds, counters, allowed=None, k=K):
    """The kernel's tokens for rows of logits [T, columns], the first V of which have text."""
    rows, columns = logits.shape
    best = topk.ref(logits, allowed, V, k)
    numbers = {n: np.array([getattr(p, n) for p in params], np.float32) for n in ("temperature", "top_p", "min_p")}
    return lab.run(head_sample, dict(
        logits=logits, allowed=allowed, valid=V, values=best["values"].astype(np.float32), ids=best["ids"], **numbers,
        top_k=np.array([p.top_k for p in params], np.uint32), seeds=seeds, counters=counters,
        tokens=np.empty(rows, np.uint32), sums=np.empty((rows, -(-columns // head_sample.FIELD)), np.float32)),
        EMULATOR)["tokens"]


def numbers(rng, rows):
    return rng.integers(0, 2 ** 32, (rows, 2), np.uint32), rng.integers(0, 2 ** 18, (rows, 2), np.uint32)


@pytest.mark.parametrize("spread", [4.0, 1.0])
def test_it_picks_what_the_sampler_picks(spread):
    """The same token wherever the K candidates can tell, NONE elsewhere; rows of spread 1 are flat: many tokens are kept."""
    rng, kinds = np.random.default_rng(0), Counter()
    logits = (spread * rng.standard_normal((len(PARAMS), V + 12))).astype(np.float32)
    logits[:, V:] = 99                                                  # ids without text
    seeds, counters = numbers(rng, len(PARAMS))
    got, u = sampled(logits, PARAMS, seeds, counters), philox.uniforms(counters, seeds)
    for t, params in enumerate(PARAMS):
        ids, p = Sampler(params, NO_PROMPT, V).distribution(logits[t])
        order = np.lexsort((ids, -p))                                   # an unrestricted row comes in the order of ids
        rank = pick(p[order], u[t])
        assert len(ids) != K or params.top_k == K, "no nucleus just as large as K"
        kind = "kept" if len(ids) <= K else "best" if len(ids) == V and rank < K else "open"
        assert got[t] == (head_sample.NONE if kind == "open" else ids[order][rank]), params
        kinds[kind] += 1
    assert len(kinds) == 3 and min(kinds.values()) >= 3, kinds


def test_tokens_follow_the_distribution():
    """4,096 rows that differ in their counter alone: chi-square with 7 degrees of freedom stays under 24.3 (p = 0.001)."""
    rows, row = 4096, np.full(V + 12, -np.inf, np.float32)
    row[100:108] = np.linspace(0, 2, 8)
    positions = np.stack([np.arange(rows), np.zeros(rows)], 1).astype(np.uint32)
    got = sampled(np.tile(row, (rows, 1)), [SamplingParams(temperature=0.7)] * rows,
                  np.full((rows, 2), 3, np.uint32), positions, k=8)
    p = np.exp(row[100:108].astype(np.float64) / 0.7)
    p /= p.sum()
    counts = np.array([Counter(got.tolist())[100 + i] for i in range(8)])
    assert counts.sum() == rows and (((counts - rows * p) ** 2) / (rows * p)).sum() < 24.3


def test_a_mask_and_choices():
    """Disallowed tokens are never chosen; a choice index, a position or a seed changes what is drawn, nothing else does."""
    rng = np.random.default_rng(1)
    logits = np.repeat(rng.standard_normal((1, V + 12)).astype(np.float32), 64, 0)
    allowed = np.zeros((64, 16), np.uint32)
    allowed[:, 3] = 0xF0F0F0F0                                          # of ids 96 .. 127
    seeds, counters = np.zeros((64, 2), np.uint32), np.zeros((64, 2), np.uint32)
    params = [SamplingParams(temperature=2.0)] * 64
    assert len(set(sampled(logits, params, seeds, counters, allowed).tolist())) == 1
    for which, array, column in (("choice", counters, 1), ("position", counters, 0), ("seed", seeds, 0), ("high", seeds, 1)):
        array[:, column] = np.arange(64)
        got = sampled(logits, params, seeds, counters, allowed)
        array[:, column] = 0
        assert len(set(got.tolist())) > 5, which
        assert ((got // 32 == 3) & (got % 8 >= 4)).all()


def test_nobody_to_choose():
    logits = np.zeros((2, V + 12), np.float32)
    got = sampled(logits, [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)], *numbers(
        np.random.default_rng(0), 2), allowed=np.zeros((2, 16), np.uint32))
    assert got.tolist() == [head_sample.NONE] * 2


@pytest.mark.parametrize("params", [
    SamplingParams(repetition_penalty=1.3), SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=-0.5)])
def test_penalties_are_the_samplers_on_every_path_of_a_tree(params):
    """Row by row: a sampler that was told the committed tokens and the row's own path lowers the same logits."""
    rng, vocabulary = np.random.default_rng(2), 48
    prompt, committed = rng.integers(0, 20, 12), rng.integers(0, 40, 30)
    parents = np.array([-1, 0, 0, 2, 1, 4], np.int32)
    tokens = np.array([5, 44, 44, 5, 45, 44], np.int32)                 # one that was there before; twice on a path
    sees = ancestors(parents)
    counts = np.bincount(committed, minlength=vocabulary).astype(np.uint32)
    counts[prompt] |= np.uint32(penalise.PROMPT)
    logits = rng.standard_normal((6, vocabulary)).astype(np.float32) * 3
    got = lab.run(penalise, dict(
        logits=logits, counts=np.stack([np.zeros_like(counts), counts]), slots=np.ones(6, np.int32), tokens=tokens,
        starts=np.array([0, 6], np.int32), ancestors=(sees << np.arange(6)).sum(1).astype(np.uint32),
        **{name: np.full(6, getattr(params, f"{name}_penalty"), np.float32)
           for name in ("repetition", "frequency", "presence")}), EMULATOR)["logits"]
    for t in range(6):
        sampler = Sampler(params, prompt, vocabulary)
        for token in [*committed, *tokens[sees[t]]]:
            sampler.counts[token] += 1
            sampler.seen[token] = True
        want = logits[t].copy()
        sampler.penalise(want)
        assert np.abs(got[t] - want).max() < 1e-5 and np.abs(want - logits[t]).max() > 0.1


@pytest.mark.parametrize("module, change, words", [
    (head_sample, dict(values=np.zeros((1, 200), np.float32)), "values must have 1 to 128 columns, got 200"),
    (head_sample, dict(logits=np.zeros((1, 6), np.float32)), "logits has 6 columns"),
    (head_sample, dict(top_k=np.zeros(1, np.int32)), "top_k must be uint32 (1,), got int32 (1,)"),
    (head_sample, dict(seeds=np.zeros(1, np.uint64)), "seeds must be uint32 (1, 2), got uint64 (1,)"),
    (penalise, dict(counts=np.zeros((1, 32), np.uint32)), "counts must be uint32 (1, 64), got uint32 (1, 32)"),
    (penalise, dict(slots=np.zeros(2, np.int32)), "slots must be int32 (1,), got int32 (2,)"),
    (penalise, dict(starts=np.zeros(40, np.int32)), "a step takes at most 32 sequences, got 39")],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_refusals(module, change, words):
    case = dict(vocabulary=64, k=8) if module is head_sample else dict(vocabulary=64)
    arguments, recorder = {**module.make(np.random.default_rng(0), **case), **change}, machines.Recorder()
    with pytest.raises(ValueError) as caught:
        module.launch(recorder, **arguments)
    assert words in str(caught.value) and not recorder.kernels
