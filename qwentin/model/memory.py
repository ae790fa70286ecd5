"""What the CUDA tower will take, to the byte, before anything is: the tower is built on a backend that only counts.

    weights   packed tiles, f16 matrices, vectors        KV      pages of every full layer and the draft head's
    state     S and window of every slot                 rounds  the rows that states lag behind by (rounds.py)
    scratch   a round's arrays (buffers.py)                      prefill  a wide chunk's (arena.py)

Who calls: towers.py, to refuse a context that does not fit before the weights are read. Proven by tests/test_memory.py.
"""
import math

import numpy as np

from ..device import DeviceArray
from ..kernels import packed
from .cuda import CudaTower
from .encodings import Rows, Tiles
from . import terms
from .matrix import Matrix, can_add_terms, can_weave

ALLOCATION = 512                # bytes: what the driver rounds a small piece of memory up to


class CountingBackend:
    """Arrays have shapes and no memory; `bytes` is what they would take."""

    def __init__(self, chip, multiprocessors, shared):
        self.chip, self.multiprocessors, self.shared, self.bytes = chip, multiprocessors, shared, 0
        self.name = "counting"

    def empty(self, shape, dtype):
        array = DeviceArray(0, (shape,) if isinstance(shape, int) else shape, dtype, None)
        self.bytes += -(-max(array.nbytes, 1) // ALLOCATION) * ALLOCATION
        return array

    zeros = empty

    def staging(self, shape, dtype):
        return np.broadcast_to(np.zeros((), dtype), shape)

    def upload(self, values):
        return self.empty(values.shape, values.dtype)

    def view(self, array, offset, shape, dtype):
        return DeviceArray(0, shape, dtype, None)


class CountingSource:
    """matrix.Source's five methods over headers alone."""

    def __init__(self, checkpoint, backend):
        self.tensors, self.backend = checkpoint.tensors, backend

    def vector(self, name):
        return np.broadcast_to(np.float32(0), self.tensors[name].shape)

    def matrix(self, *names, columns=None):
        tensors = [self.tensors[name] for name in names]
        tiled = [t for t in tensors if isinstance(t.encoding, Tiles)]
        k = tensors[0].shape[1] if columns is None else columns.stop - columns.start
        n, rest = sum(t.shape[0] for t in tiled), sum(t.shape[0] for t in tensors if t not in tiled)
        packing = tiled[0].encoding.packing if tiled else None
        empty = self.backend.empty
        return Matrix(-(-(n + rest) // 8) * 8, packing, empty(packing.shape(n, k), np.uint8) if tiled else None,
                      empty((n // 16,), np.float32) if packing == packed.NVFP4 else None, n,
                      empty((rest, k), np.float16) if rest else None)

    def with_terms(self, names, small):
        big, rest = ([self.tensors[name] for name in some] for some in (names, small))
        if not can_add_terms(big, rest):
            return self.matrix(*names, *small)
        packing, k, empty = big[0].encoding.packing, big[0].shape[1], self.backend.empty
        n = sum(t.shape[0] for t in big) + terms.rows(packing, sum(t.shape[0] for t in rest))
        return Matrix(n, packing, empty(packing.shape(n, k), np.uint8),
                      empty((n // 16,), np.float32) if packing == packed.NVFP4 else None, n, None, terms.TERMS[packing])

    def glu(self, gate, up):
        if not can_weave(self.tensors[gate], self.tensors[up]):
            return self.matrix(gate, up)
        (n, k), packing, empty = self.tensors[gate].shape, self.tensors[gate].encoding.packing, self.backend.empty
        return Matrix(n, packing, empty(packing.shape(2 * n, k), np.uint8),
                      empty((n // 8,), np.float32) if packing == packed.NVFP4 else None, 2 * n, None, gated=True)

    def table(self, name):
        tensor, empty = self.tensors[name], self.backend.empty
        if not isinstance(tensor.encoding, Rows):
            return empty(tensor.shape, np.uint16), None, "bf16"
        shapes, bits = tensor.encoding.shapes(*tensor.shape), tensor.encoding.packing.codes.bits
        return (empty(shapes[tensor.encoding.codes][1], np.uint8), empty(shapes["weight_rows_scale"][1], np.float32),
                {6: "e2m3", 8: "e4m3"}[bits])


def imagined(checkpoint, chip, multiprocessors, shared, **tower) -> CudaTower:
    """A tower that takes no memory; `tower` are CudaTower's own arguments."""
    source = CountingSource(checkpoint, CountingBackend(chip, multiprocessors, shared))
    return CudaTower(checkpoint.config, source, **tower)


def needed(counted) -> dict[str, int]:
    """Bytes by item of an imagined tower."""
    items = parts(counted)
    return {"weights": counted.backend.bytes - sum(items.values()), **items}


def parts(tower) -> dict[str, int]:
    """Bytes of a tower's memory other than weights."""
    pools = tower.pools
    sizes = lambda names: sum(getattr(p, name).nbytes for p in pools for name in names)
    return {"KV": tower.kv.nbytes, "state": sizes(("S", "window")), "rounds": sizes(("pending", "k", "v", "beta", "g")),
            "scratch": tower.scratch.nbytes + tower.chain.nbytes + math.prod(tower.work.shape) * 4,
            **({"prefill": tower.wide.nbytes} if tower.wide else {})}
