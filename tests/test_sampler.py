"""Sampler: each processor against its definition, the distribution against counts, seeds, refusals."""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from qwentin import nano
from qwentin.errors import RequestError
from qwentin.request import SamplingParams
from qwentin.sampler import Sampler, best, check, default_sampling, log_probabilities, pick, truncate
from qwentin.step import Row

V = 50
PLAIN = SamplingParams()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def logits(seed=0, rows=V + 14):
    return (3 * np.random.default_rng(seed).standard_normal(rows)).astype(np.float32)


def dense(ids, probabilities):
    out = np.zeros(V)
    out[ids] = probabilities
    return out


def distribution(row, **fields):
    return dense(*Sampler(replace(PLAIN, **fields), np.zeros(1, np.int32), V).distribution(row))


def test_plain_is_softmax_over_ids_with_text():
    row = logits()
    row[V:] = 100                                       # padded rows of the head: never sampled
    assert np.allclose(distribution(row), softmax(row[:V].astype(np.float64)))


def test_temperature_zero_is_argmax_lowest_id_first():
    row = logits()
    row[[7, 20]] = 50
    row[V:] = 100
    assert distribution(row, temperature=0.0)[7] == 1


def test_temperature():
    row = logits()
    assert np.allclose(distribution(row, temperature=0.5), softmax(row[:V].astype(np.float64) / 0.5))


@pytest.mark.parametrize("k", [1, 2, 5, 49, 50, 500, 0, -1])
def test_top_k(k):
    row = logits()
    full = softmax(row[:V].astype(np.float64))
    kept = np.argsort(-full)[:k if k > 0 else V]
    wanted = np.zeros(V)
    wanted[kept] = full[kept] / full[kept].sum()
    assert np.allclose(distribution(row, top_k=k), wanted)


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_fewest_that_reach_it(p):
    row = logits()
    full = softmax(row[:V].astype(np.float64))
    got = distribution(row, top_p=p)
    kept = np.flatnonzero(got)
    assert full[kept].sum() >= p - 1e-12
    assert full[kept].sum() - full[kept].min() < p or len(kept) == 1
    assert full[kept].min() >= np.delete(full, kept).max(initial=0)
    assert np.allclose(got[kept], full[kept] / full[kept].sum())


def test_min_p():
    row = logits()
    full = softmax(row[:V].astype(np.float64))
    assert set(np.flatnonzero(distribution(row, min_p=0.2))) == set(np.flatnonzero(full >= 0.2 * full.max()))


def test_filters_apply_in_order():
    """top_p counts the mass that top_k left: 0.5 and 0.3 of 0.8 are 0.625 and 0.375."""
    row = np.log(np.array([0.5, 0.3, 0.2]))
    ids, p = truncate(row, 2, 0.6, 0.0)
    assert ids.tolist() == [0] and p.tolist() == [1.0]
    ids, p = truncate(row, 2, 0.63, 0.0)
    assert ids.tolist() == [0, 1] and np.allclose(p, [0.625, 0.375])


def test_equal_logits_are_cut_the_same_way_everywhere():
    ids, _ = truncate(np.zeros(9), 0, 0.34, 0.0)
    assert ids.tolist() == [0, 1, 2, 3]


def test_penalties():
    row = np.zeros(V, np.float32)
    row[3], row[4] = 2.0, -2.0
    prompt = np.array([3, 4], np.int32)
    sampler = Sampler(replace(PLAIN, repetition_penalty=2.0), prompt, V)
    wanted = row.copy()
    wanted[3], wanted[4] = 1.0, -4.0                    # the prompt counts for repetition
    assert np.allclose(dense(*sampler.distribution(row)), softmax(wanted.astype(np.float64)))
    sampler = Sampler(replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.25), prompt, V)
    assert np.allclose(dense(*sampler.distribution(row)), softmax(row.astype(np.float64))), "the prompt does not count"
    for _ in range(3):
        peak = np.full(V, -np.inf, np.float32)
        peak[9] = 0
        assert sampler.choose(peak) == 9
    wanted = row.copy()
    wanted[9] -= 0.5 + 3 * 0.25
    assert np.allclose(dense(*sampler.distribution(row)), softmax(wanted.astype(np.float64)))
    assert row[9] == 0, "the caller's logits are left alone"


def test_the_lower_of_equal_ids_is_among_the_best():
    row = np.zeros(200)
    row[[150, 90]] = 1
    assert truncate(row, 4, 1.0, 0.0)[0].tolist() == [90, 150, 0, 1]


@pytest.mark.parametrize("fields, told", [
    (dict(temperature=0.0), 1), (dict(top_k=20, top_p=0.9, temperature=0.7), 1), (dict(top_k=35), 1), (dict(top_k=1), 1),
    (dict(top_k=30, min_p=0.05), 1), (dict(top_k=20, repetition_penalty=1.2, presence_penalty=1.5), 0.5),
    (dict(temperature=0.0, frequency_penalty=0.5), 1), (dict(top_k=20, presence_penalty=-1.0), 0), (dict(top_p=0.9), 0),
    (dict(top_k=65), 0), (dict(top_k=5, logit_bias=((3, 9.0),)), 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_candidates_choose_as_whole_rows_do(fields, told, masked):
    """Bit for bit, equal logits among them; `told`: how often candidates suffice, at least, or 0 for never."""
    rng, size, asked = np.random.default_rng(5), 1500, 0
    for trial in range(60):
        row = (np.round(rng.standard_normal(size + 36) * 24) / 8).astype(np.float32)
        order = np.lexsort((np.arange(size), -row[:size]))[:64]
        mask = rng.random(size) < 0.8 if masked else None

        def ask():
            nonlocal asked
            asked += 1
            return row
        samplers = [Sampler(replace(PLAIN, **fields), order[::2], size) for _ in range(2)]
        for sampler in samplers:
            sampler.steering = SimpleNamespace(mask=lambda: mask)
            sampler.counts[order[::3] if sampler.penalised else []] = 1 + trial % 3
        got = samplers[0].distribution(Row(None, order, row[order], ask))
        for a, b in zip(got, samplers[1].distribution(row)):
            assert np.array_equal(a, b)
    assert asked <= 60 * (1 - told) if told else asked == 60


@pytest.mark.parametrize("fields", [dict(temperature=0.0), dict(temperature=0.0, presence_penalty=0.5),
                                    dict(temperature=0.0, logit_bias=((7, 50.0),)), dict(top_k=8)], ids=str)
def test_candidates_give_the_same_tokens(fields):
    """Token by token, penalties counting up."""
    rng = np.random.default_rng(6)
    one, other = (Sampler(replace(PLAIN, seed=9, **fields), np.arange(3), V) for _ in range(2))
    for _ in range(30):
        row = (np.round(rng.standard_normal(V + 14) * 8) / 4).astype(np.float32)
        order = np.lexsort((np.arange(V), -row[:V]))[:16]
        assert one.choose(Row(None, order, row[order], lambda: row)) == other.choose(row)


def test_logit_bias():
    row = logits()
    assert distribution(row, logit_bias=((5, 100.0),), temperature=0.0)[5] == 1
    assert distribution(row, logit_bias=((int(row[:V].argmax()), -100.0),))[row[:V].argmax()] < 1e-30


def test_choices_follow_the_distribution():
    """20,000 draws over 8 tokens: chi-square with 7 degrees of freedom stays under 24.3 (p = 0.001) for a fixed seed, and a
    sampler that ignores temperature is told apart."""
    row = np.full(V, -np.inf, np.float32)
    row[:8] = np.linspace(0, 2, 8)
    sampler = Sampler(replace(PLAIN, seed=11, temperature=0.7), np.zeros(1, np.int32), V)
    counts = np.bincount([sampler.choose(row) for _ in range(20000)], minlength=8)
    statistic = lambda t: (((counts - (e := 20000 * softmax(row[:8].astype(np.float64) / t))) ** 2) / e).sum()
    assert statistic(0.7) < 24.3 < statistic(1.0)


def test_seeds():
    row = logits()

    def draw(seed, index=0):
        sampler = Sampler(replace(PLAIN, seed=seed), np.zeros(1, np.int32), V, index)
        return [sampler.choose(row) for _ in range(20)]

    assert draw(1) == draw(1) and draw(1) != draw(2) and draw(1) != draw(1, index=1)
    assert draw(-1) == draw(-1) != draw(1)
    assert draw(None) != draw(None)


def test_pick_covers_the_interval():
    p = np.array([0.25, 0.5, 0.25])
    assert [pick(p, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, np.nextafter(1, 0))] == [0, 0, 1, 1, 2, 2]


def test_log_probabilities():
    row = logits()
    row[V:] = 100
    got = log_probabilities(row, V)
    assert np.allclose(got, np.log(softmax(row[:V].astype(np.float64))))
    assert np.allclose(np.exp(log_probabilities(np.stack([row, row + 5]), V)).sum(-1), 1)
    order = np.argsort(-got)
    assert best(got, 3) == tuple((int(i), float(got[i])) for i in order[:3])
    assert best(got, 0) == () and len(best(got, V)) == V


@pytest.mark.parametrize("field, value", [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -0.1), ("min_p", 1.5), ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("repetition_penalty", 0.0),
    ("seed", 2**64), ("logit_bias", ((V, 1.0),)), ("logit_bias", ((-1, 1.0),)), ("logit_bias", ((1, 101.0),))])
def test_out_of_range_names_the_field(field, value):
    with pytest.raises(RequestError) as caught:
        check(replace(PLAIN, **{field: value}), V)
    assert caught.value.param == field and field in str(caught.value) and "." in str(caught.value)


def test_defaults_come_from_the_checkpoint():
    assert default_sampling(nano.DIRECTORY) == SamplingParams(temperature=0.7, top_p=0.9, top_k=20)
