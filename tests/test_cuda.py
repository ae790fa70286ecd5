"""The CUDA tower, its kernels' real PTX executed by the emulator, against the numpy tower: nano, a few rows at a time.

One test runs all of nano on both chips, the others its first four layers, which are of every kind.

A part of a layer may be off by 1e-2 of its norm (trace.py says why). Logits are of magnitude 10 to 20 and reach 0.03 from
the numpy tower's with 16-bit activations and keys; 0.15 is five times that, and an error in any formula moves them by 0.5.
"""
from dataclasses import replace

import numpy as np
import pytest

from qwentin import nano
from qwentin.model.backend import EmulatorBackend
from qwentin.model.convert import prepare
from qwentin.model.cpu import CpuTower
from qwentin.model.cuda import CudaTower
from qwentin.model.matrix import Source
from qwentin.model.trace import trace_cpu
from qwentin.model.weights import open_checkpoint
from qwentin.step import Rows, pack

ATOL = 0.15
PAGES, SLOTS = 6, 4
IDS = np.random.default_rng(0).integers(0, 4000, 64).astype(np.int32)
TABLE = np.array([3, 1], np.int32)
TREE = np.array([-1, 0, 0, 1, 2, 4], np.int32)          # row 5 is behind 4, 2 and 0


def towers(directory=nano.DIRECTORY, chip="sm_90a", kv="bf16", layers=4):
    """Both, of nano's first layers: three of the delta rule and one of attention, or all eight."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    checkpoint.config = replace(config, num_hidden_layers=layers, layer_types=config.layer_types[:layers])
    source = Source(checkpoint, EmulatorBackend(chip))
    return CudaTower(checkpoint.config, source, PAGES, SLOTS, kv=kv, active=2), CpuTower(checkpoint, PAGES, SLOTS)


@pytest.fixture(scope="module")
def pair():
    return towers()


class Both:
    """The same steps on both towers, outputs compared."""

    def __init__(self, pair, slot=0, table=TABLE):
        self.pair, self.slot, self.table, self.length = pair, slot, table, 0
        for tower in pair:
            tower.clear_slot(slot)

    def rows(self, tokens, **more):
        more.setdefault("outputs", np.array([len(tokens) - 1], np.int32))
        return Rows(np.asarray(tokens, np.int32), self.slot, self.table, self.length, **more)

    def run(self, tokens, **more):
        step = pack([self.rows(tokens, **more)], hidden=True)
        got, want = (tower.forward(step) for tower in self.pair)
        assert np.abs(got.logits - want.logits).max() < ATOL
        assert np.linalg.norm(got.hidden - want.hidden) < 1e-2 * np.linalg.norm(want.hidden)
        for row, logits in zip(got.rows(), got.logits):
            assert row.finite and np.array_equal(row.logits, logits) and np.array_equal(row.values, logits[row.ids])
            assert np.array_equal(row.ids, np.lexsort((np.arange(len(logits)), -logits))[:64])
        self.length += len(more.get("accepted", ())) + (len(tokens) if more.get("commit", True) else 0)
        return got, want

    def trace(self, tokens):
        step = pack([self.rows(tokens)])
        self.length += len(tokens)
        return self.pair[0].trace(step).first_difference(trace_cpu(self.pair[1], step))


@pytest.mark.parametrize("chip", ["sm_90a", "sm_120a"])
def test_two_decode_steps_behind_a_prompt(chip):
    both = Both(towers(chip=chip, layers=8))
    assert both.trace(IDS[:5]) is None
    assert both.trace(IDS[5:6]) is None
    both.run(IDS[6:7])


def test_a_difference_is_named(pair):
    both = Both(pair)
    broken = pair[0].layers[3].mixer.q_norm
    broken[:] += 0.5
    try:
        assert both.trace(IDS[:3]).startswith("layer 3 attention: relative error 0.")
    finally:
        broken[:] -= 0.5


def test_a_prompt_of_several_rounds_crosses_pages(pair):
    both = Both(pair)
    both.length = 126                                   # whatever stood in the pages before: both towers have zeros
    both.run(IDS[:35], outputs=np.array([3, 30, 34], np.int32))
    both.run(IDS[35:36])


def test_a_tree_and_its_accepted_path(pair):
    both = Both(pair)
    both.run(IDS[:4])
    both.run(IDS[4:10], parents=TREE, commit=False, outputs=np.arange(6, dtype=np.int32))
    both.run(IDS[10:11], accepted=np.array([0, 2, 4, 5]))
    small = dict(parents=np.array([-1, 0, 0], np.int32), commit=False, outputs=np.arange(3, dtype=np.int32))
    both.run(IDS[11:14], **small)
    both.run(IDS[14:17], accepted=np.array([0, 2]), **small)
    both.run(IDS[17:18])                                # nothing of the third tree was accepted
    both.run(IDS[18:21], **small)
    pair[0].settle(0)                                   # nor of the fourth, and the window in its entry is paid
    both.run(IDS[21:22])
    assert both.length == 13


def test_a_path_is_committed_without_a_step(pair):
    """As the next step would: the step after it gives the same, on both towers; the draft head's rows stay."""
    both = Both(pair)
    both.run(IDS[:4])
    both.run(IDS[4:10], parents=TREE, commit=False, outputs=np.arange(6, dtype=np.int32))
    drafted = [np.array(pair[0].kv[4:]), pair[1].kv[:, -1].copy()]
    accepted = np.array([0, 2, 4, 5], np.int32)
    for tower in pair:
        tower.commit(0, TABLE, both.length, accepted)
    both.length += 4
    both.run(IDS[10:11])
    assert np.array_equal(pair[0].kv[4:], drafted[0]) and np.array_equal(pair[1].kv[:, -1], drafted[1])


def test_sequences_of_one_step(pair):
    a, b = Both(pair, 0), Both(pair, 1, np.array([0], np.int32))
    for each, n in ((a, 3), (b, 2)):
        each.run(IDS[:n])
    step = pack([a.rows(IDS[3:4]), b.rows(IDS[9:13], parents=np.array([-1, 0, 0, 1], np.int32), commit=False)])
    got, want = (tower.forward(step) for tower in pair)
    assert np.abs(got.logits - want.logits).max() < ATOL


def test_the_draft_head(pair):
    both = Both(pair)
    _, want = both.run(IDS[:4])
    step = pack([Rows(IDS[1:5], 0, np.array([5], np.int32), 0, np.arange(4, dtype=np.int32))], hidden=True)
    drafts = [tower.forward_mtp(step, want.hidden) for tower in pair]
    assert np.abs(drafts[0].logits - drafts[1].logits).max() < ATOL
    assert np.linalg.norm(drafts[0].hidden - drafts[1].hidden) < 1e-2 * np.linalg.norm(drafts[1].hidden)


def test_a_draft_head_with_a_part_of_the_vocabulary_and_raw_hiddens(pair, monkeypatch):
    gpu, cpu = pair
    head = replace(gpu.head, raw=True)
    for tower, name, value in ((gpu, "head", head), (gpu, "draft_head", head.first(1024)), (cpu, "raw_hidden", True),
                               (cpu, "draft_rows", cpu.head.first(1024))):
        monkeypatch.setattr(tower, name, value)
    both = Both(pair)
    _, want = both.run(IDS[:4])
    assert np.abs(want.hidden ** 2).mean(-1).max() < 2, "nano's last norm makes it 3"
    step = pack([Rows(IDS[1:5], 0, np.array([5], np.int32), 0, np.arange(4, dtype=np.int32))], hidden=True)
    got, want = (tower.forward_mtp(step, want.hidden) for tower in pair)
    assert want.logits.shape == (4, 1024) and np.abs(got.logits[:, :1024] - want.logits).max() < ATOL
    assert np.linalg.norm(got.hidden - want.hidden) < 1e-2 * np.linalg.norm(want.hidden)
    assert all((row.ids < 1024).all() for row in got.rows())
    with pytest.raises(ValueError, match="1000 rows cannot be cut off a matrix of 4096: whole strips of 128 can"):
        gpu.head.matrix.first(1000)


def test_a_chain_of_drafts(pair):
    """To the bit what steps of the head give whose best ids and hiddens the host carries from one to the next."""
    both, gpu = Both(pair), pair[0]
    _, want = both.run(IDS[:4])
    place = dict(slot=0, pages=np.array([5], np.int32))
    first = Rows(IDS[1:4], length=0, outputs=np.array([2]), **place)
    chain = gpu.draft_chain(pack([first]), want.hidden[:3], 3)
    out = gpu.forward_mtp(pack([first], hidden=True), want.hidden[:3])
    for i, row in enumerate(chain):
        says, = out.rows()
        assert np.array_equal(row.ids, says.ids) and np.array_equal(row.values, says.values)
        step = pack([Rows(row.ids[:1], length=3 + i, outputs=np.array([0]), **place)], hidden=True)
        out = gpu.forward_mtp(step, out.hidden[-1:])
    assert len(chain) == 3 and len({tuple(row.ids) for row in chain}) == 3


def test_a_slot_and_a_page_are_copied(pair):
    """The copy goes on as the original would; the rows that its state owed are paid first."""
    both = Both(pair)
    both.run(IDS[:4])
    for tower in pair:
        tower.copy_slot(0, 2)
        tower.copy_page(3, 4)
    other = Both.__new__(Both)
    other.__dict__ = dict(both.__dict__, slot=2, table=np.array([4], np.int32))
    got = other.run(IDS[4:5])[0].logits
    assert np.array_equal(got, both.run(IDS[4:5])[0].logits)


def test_a_state_leaves_and_comes_back(pair):
    both, gpu = Both(pair), pair[0]
    both.run(IDS[:4])
    saved = {name: array.copy() for name, array in gpu.export_state(0, [3], 4).items()}
    want = both.run(IDS[4:5])[0].logits
    gpu.clear_slot(3)
    assert gpu.import_state(3, [5], saved)
    step = pack([Rows(IDS[4:5], 3, np.array([5], np.int32), 4, np.array([0], np.int32))])
    assert np.array_equal(gpu.forward(step).logits, want)
    assert not gpu.import_state(3, [5], dict(saved, S=saved["S"][:1])) and not pair[1].import_state(3, [5], saved)


@pytest.mark.parametrize("weights, kv", [("fp6", "e4m3"), ("fp4", "bf16")])
def test_packed_weights(tmp_path, weights, kv):
    """Both towers from the same packed directory; e4m3 keys cost 2^-4 of a number, which the numpy tower does not pay."""
    job = prepare(nano.DIRECTORY, tmp_path / "packed", weights=weights)
    job.run()
    both = Both(towers(tmp_path / "packed", kv=kv))
    layers = both.pair[0].layers
    assert all(layer.mlp.gate_up.gated for layer in layers) and layers[0].mixer.into.terms == (5 if weights == "fp4" else 3)
    assert [layer.norm_in.folded for layer in layers] == [False] + [True] * 3
    assert all(layer.norm_post.folded for layer in [*layers, both.pair[0].mtp.layer])
    step = pack([both.rows(IDS[:2])])
    errors = both.pair[0].trace(step).errors(trace_cpu(both.pair[1], step))
    assert max(errors.values()) < (0.1 if kv == "e4m3" else 1e-2), errors
