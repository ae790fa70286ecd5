"""The CUDA tower's memory, counted before it is built and counted when it stands."""
import numpy as np

from qwentin import nano
from qwentin.commands.budget import on_card
from qwentin.config import EngineConfig
from qwentin.model import memory, rehearsal
from qwentin.model.backend import EmulatorBackend
from qwentin.model.budget import CONTEXT
from qwentin.model.convert import prepare
from qwentin.model.cuda import CudaTower
from qwentin.model.matrix import Source
from qwentin.model.weights import open_checkpoint

SHAPE = dict(pages=5, slots=3, has_mtp=True, active=2)


class Weighing(EmulatorBackend):
    """Adds up what is really allocated, and refuses to launch."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def empty(self, shape, dtype):
        array = np.zeros(shape, dtype)
        self.bytes += array.nbytes
        return array

    zeros = empty

    def upload(self, values):
        self.bytes += values.nbytes
        return super().upload(values)


def agree(directory, **more):
    checkpoint, backend = open_checkpoint(directory), Weighing()
    tower = CudaTower(checkpoint.config, Source(checkpoint, backend), **SHAPE, **more)
    counted = memory.imagined(checkpoint, backend.chip, backend.multiprocessors, backend.shared, **SHAPE, **more)
    items = memory.needed(counted)
    assert {name: items[name] for name in items if name != "weights"} == memory.parts(tower)
    assert backend.bytes <= sum(items.values()) < backend.bytes + 512 * 400         # pieces are rounded up to 512 bytes
    return items


def test_plain_weights():
    items = agree(nano.DIRECTORY, kv="bf16")
    assert items["KV"] == 2 * 3 * 5 * 128 * 256 * 2 and items["state"] == 6 * 3 * 4 * (6 * 128 * 128 + 3 * 1280)


def test_budget_is_what_a_wide_tower_takes(tmp_path):
    prepare(nano.DIRECTORY, tmp_path / "fp6", weights="fp6").run()
    checkpoint, limit = open_checkpoint(tmp_path / "fp6"), 4 << 30
    for resident in (True, False):
        backend = Weighing()
        result, plan = on_card(EngineConfig(max_seqs=2), checkpoint, 600, "fp8", limit, backend)
        tower = CudaTower(checkpoint.config, Source(checkpoint, backend), **plan.shape, pages=5)
        assert tower.wide.most == 4096 and bool(tower.wide.arena.resident) == resident
        items = result.items
        assert memory.parts(tower) == {
            "KV": items["KV, fp8"] + items["KV of the MTP head"], "state": items["state S"] + items["convolution window"],
            **{name: items[name] for name in ("rounds", "scratch", "prefill")}}
        assert 0 <= result.total - CONTEXT - backend.bytes < 512 * 400      # pieces are rounded up to 512 bytes
        assert items["prefill"] > 4096 * (6 * 256 + 2 * 768) and result.total <= limit
        limit = result.total - 1


def test_packed_weights(tmp_path):
    prepare(nano.DIRECTORY, tmp_path / "fp4", weights="fp4").run()
    assert agree(tmp_path / "fp4", kv="e4m3")["KV"] == 2 * 3 * 5 * 128 * 256


def test_kernels_are_known_before_the_tower_is(monkeypatch):
    """All that 95 graphs of nano launch; those that are not on disk are compiled, by their numbers, elsewhere."""
    shape = dict(SHAPE, kv="bf16")
    found = rehearsal.kernels((nano.DIRECTORY, "sm_90a", 132, 227 << 10), tuple(shape.items()))
    names = {kernel.name for kernel in found}
    assert {"embed", "dense", "attn_decode", "delta_decode", "delta_verify", "kv_move", "topk", "gather"} <= names
    assert len(set(found)) == len(found) > 20
    asked = []

    class Pool:
        def __init__(self, count, mp_context):
            asked.append(count)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, work, numbers):
            asked.append(numbers)
            return []
    monkeypatch.setattr(rehearsal, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(rehearsal.build, "on_disk", lambda kernel, chip: kernel.name not in ("embed", "gather"))
    rehearsal.compile_ahead(nano.DIRECTORY, "sm_90a", 132, 227 << 10, **shape)
    assert [found[i].name for i in asked[1]].count("gather") == 2 and "embed" in {found[i].name for i in asked[1]}
    asked.clear()
    monkeypatch.setattr(rehearsal.build, "on_disk", lambda kernel, chip: True)
    rehearsal.compile_ahead(nano.DIRECTORY, "sm_90a", 132, 227 << 10, **shape)
    assert not asked
