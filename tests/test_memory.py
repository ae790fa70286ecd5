"""The CUDA tower's memory, counted before it is built and counted when it stands."""
import numpy as np

from qwentin import nano
from qwentin.model import memory
from qwentin.model.backend import EmulatorBackend
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
    items = memory.needed(checkpoint, backend.multiprocessors, backend.shared, **SHAPE, **more)
    assert {name: items[name] for name in items if name != "weights"} == memory.parts(tower)
    assert backend.bytes <= sum(items.values()) < backend.bytes + 512 * 400         # pieces are rounded up to 512 bytes
    return items


def test_plain_weights():
    items = agree(nano.DIRECTORY, kv="bf16")
    assert items["KV"] == 2 * 3 * 5 * 128 * 256 * 2 and items["state"] == 6 * 3 * 4 * (6 * 128 * 128 + 3 * 1280)


def test_chunks_of_prefill(tmp_path):
    prepare(nano.DIRECTORY, tmp_path / "fp6", weights="fp6").run()
    assert agree(tmp_path / "fp6", wide=256)["prefill"] > 256 * (6 * 256 + 2 * 768)


def test_packed_weights(tmp_path):
    prepare(nano.DIRECTORY, tmp_path / "fp4", weights="fp4").run()
    assert agree(tmp_path / "fp4", kv="e4m3")["KV"] == 2 * 3 * 5 * 128 * 256
