"""What a wide chunk reads and writes besides weights and state: its integers and one arena, planned at load.

Everything is a view of a few pieces of memory, as long as `most` rows of their widest use take. What is never alive at the
same time shares a piece:

    hidden          f32 [T, D], the residual stream;    delta   bf16 [T, D]: its 2^-9 is nothing beside e4m3's 2^-4
    rows            f16: o [T, Nv, 128] | attended [T, H 256] | product [T, F]
    wide            projected f16 [T, W] | qkv f16 | normed f32 [T, D] | gate_up f16 [T, 2 F] where they are not woven
    mixer           q [T, H, 256] | what the delta rule's three kernels hand on (deltanet.py)
    tiles, scale    a product's rows in e4m3;  matrix, matrix_scale: its matrix (matrix: what attn_prefill splits, too)

Where memory is plenty all matrices stay unpacked beside the packed ones (resident): 27 GB of 27B, 11 ms a chunk.

The integers are one block, copied in at the chunk's start:

    tokens, positions, places [T]       as in buffers.py; T is rounded up to whole tiles, and places there are -1
    follows, seeds [T]                  the token behind each row, and the place of the draft head's K and V; -1: not known
    outputs [T]                         rows whose logits are wanted
    slot [2]                            the slot, rows;   span [3]: 0, rows, length, the rows in the cache before
    pages [B]                           the sequence's table

Who calls: model/wide.py and the files of the layers. Proven by tests/test_wide.py.
"""
import math
from dataclasses import dataclass

import numpy as np

from ..kernels import gemm_sm90a, packed, quantise_rows, rmsnorm_tiles, unpack_e4m3, unpack_nvfp4
from ..kernels.packed import NVFP4
from .buffers import ALIGN
from .staging import place

TILE = gemm_sm90a.TILE


def goes_wide(matrix) -> bool:
    """Whether a matrix is what one of the unpacking kernels takes, whole."""
    packing = matrix.packing
    if matrix.plain is not None or matrix.tiles is None or matrix.width * (1 + matrix.gated) != matrix.n:
        return False
    if packing == NVFP4:
        return matrix.n % packed.ROWS == 0
    return packing.block == TILE and packing.codes.bits in unpack_e4m3.PLACED


def size(matrix) -> tuple[int, int]:
    """(N, K)."""
    return matrix.n, matrix.tiles.shape[1] * TILE


def tiles_of(rows, k):
    """Shapes of the tiles and scales of a matrix of so many rows of K inputs."""
    count = -(-rows // TILE)
    return (count, k // TILE, TILE, TILE), (k // TILE, count * TILE)


def nbytes_of(rows, k):
    """Their bytes."""
    tiles, scale = tiles_of(rows, k)
    return math.prod(tiles), math.prod(scale) * 4


@dataclass
class Unpacked:
    """A matrix in e4m3; `made` once the tiles are there to stay."""
    tiles: object
    scale: object
    made: bool = False

    @classmethod
    def empty(cls, backend, matrix):
        tiles, scale = tiles_of(*size(matrix))
        return cls(backend.empty(tiles, np.uint8), backend.empty(scale, np.float32))

    def make(self, stream, matrix):
        """Queue it."""
        if matrix.packing == NVFP4:
            unpack_nvfp4.launch(stream, matrix.tiles, matrix.alpha, self.tiles, self.scale, matrix.n)
        else:
            unpack_e4m3.launch(stream, matrix.tiles, self.tiles, self.scale, matrix.n, matrix.packing)


class Arena:
    """The memory of chunks of up to `most` rows that go through `parts`, which name their matrices and bytes a row."""

    def __init__(self, backend, config, most, pages, parts, resident=False):
        self.backend, self.config = backend, config
        found = [m for part in parts for m in part.matrices]
        matrices = {size(m) for m in found}
        self.resident = {id(m): Unpacked.empty(backend, m) for m in found} if resident else {}
        row = dict(hidden=4 * config.hidden_size, delta=2 * config.hidden_size, wide=4 * config.hidden_size)
        for each in (p.row_bytes for p in parts):
            row |= {name: max(bytes_, row.get(name, 0)) for name, bytes_ in each.items()}
        pieces = {name: most * bytes_ for name, bytes_ in row.items()}
        pieces["tiles"], pieces["scale"] = most * max(k for _, k in matrices), most * 4
        pieces["matrix"], pieces["matrix_scale"] = (max(sizes) for sizes in zip(*(nbytes_of(n, k) for n, k in matrices)))
        self.memory = {name: backend.zeros((aligned(bytes_),), np.uint8) for name, bytes_ in pieces.items()}
        count = places(fields(most, pages))[1]
        self.staging, self.integers = backend.staging((count,), np.int32), backend.zeros((count * 4,), np.uint8)

    @property
    def nbytes(self):
        return sum(a.nbytes for a in self.memory.values()) + self.integers.nbytes \
            + sum(m.tiles.nbytes + m.scale.nbytes for m in self.resident.values())

    def unpacked(self, matrix):
        """(tiles, scale) of a matrix, made now unless they are resident and were made before."""
        kept = self.resident.get(id(matrix))
        if kept is None:
            tiles, scale = tiles_of(*size(matrix))
            kept = Unpacked(self.piece("matrix", tiles, np.uint8), self.piece("matrix_scale", scale, np.float32))
        if not kept.made:
            kept.make(self.backend.stream, matrix)
            kept.made = id(matrix) in self.resident
        return kept.tiles, kept.scale

    def piece(self, name, shape, dtype):
        """A piece's first bytes as an array."""
        return self.backend.view(self.memory[name], 0, shape, dtype)

    def fits(self, name, *arrays):
        """Whether a piece has room for these."""
        taken = sum(aligned(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in arrays)
        return taken <= self.memory[name].nbytes

    def carve(self, name, *arrays):
        """A piece as several arrays, (shape, dtype) each, one behind the other."""
        found, at = [], 0
        for shape, dtype in arrays:
            found.append(self.backend.view(self.memory[name], at, shape, dtype))
            at += aligned(math.prod(shape) * np.dtype(dtype).itemsize)
        return found

    def stage(self, step, span, outputs):
        """A chunk of whole tiles, its integers on their way. outputs: rows of the chunk."""
        n, rows = span.count, slice(span.first, span.first + span.count)
        T = -(-n // TILE) * TILE
        shapes = fields(T, step.pages.shape[1])
        at, count = places(shapes)
        host, device, view = {}, {}, self.backend.view
        integers = view(self.integers, 0, (count,), np.int32)
        for name, shape in shapes.items():
            host[name] = self.staging[at[name]:at[name] + math.prod(shape)].reshape(shape)
            device[name] = view(self.integers, at[name] * 4, shape, np.int32)
        length = int(step.lengths[span.r]) + span.done
        known = np.full(n, -1, np.int32) if step.follows is None else step.follows[rows]
        own = place(step.pages[span.r], length + np.arange(n))
        for name, values, pad in (("tokens", step.tokens[rows], 0), ("positions", step.positions[rows], 0),
                                  ("places", own, -1), ("follows", np.maximum(known, 0), 0),
                                  ("seeds", np.where(known < 0, -1, own), -1), ("outputs", outputs, 0)):
            host[name][:len(values)], host[name][len(values):] = values, pad
        host["pages"][:] = step.pages[span.r]
        host["slot"][:], host["span"][:] = (step.slots[span.r], n), (0, n, length)
        self.backend.write(integers, self.staging[:count])
        return Chunk(self, T, n, device, int((known >= 0).sum()))


def aligned(nbytes):
    """Up to where the next array may begin."""
    return -(-nbytes // 256) * 256


def fields(rows, pages) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the integers. The pages come last: where the others lie depends on the rows alone."""
    T = rows,
    return dict(tokens=T, positions=T, places=T, follows=T, seeds=T, outputs=T, slot=(2,), span=(3,), pages=(pages,))


def places(shapes):
    """Name -> first integer, and how many integers in all."""
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = at
        at += -(-math.prod(shape) // ALIGN) * ALIGN
    return found, at


class Chunk:
    """One chunk's arrays of so many rows, as attributes; the first `count` are rows of the sequence, the others are computed
    and nobody looks at them. `known` of its rows seed the draft head."""

    def __init__(self, arena, rows, count, integers, known):
        self.arena, self.rows, self.count, self.integers, self.known = arena, rows, count, integers, known
        D = arena.config.hidden_size
        self.hidden, self.delta = self.piece("hidden", np.float32, D), self.piece("delta", np.uint16, D)
        self.normed = self.piece("wide", np.float32, D)

    def __getattr__(self, name):
        try:
            return self.__dict__["integers"][name]
        except KeyError:
            raise AttributeError(name) from None

    def piece(self, name, dtype, *row):
        """A piece as an array with so many elements a row."""
        return self.arena.piece(name, (self.rows, *row), dtype)

    def tiles(self, k):
        """(tiles, scale) of the rows that are multiplied next, K inputs each."""
        tiles, _ = tiles_of(self.rows, k)
        return self.arena.piece("tiles", tiles, np.uint8), self.arena.piece("scale", (self.rows,), np.float32)

    def norm(self, hidden, delta, weight, eps):
        """Queue hidden += delta, and its norm as the rows that are multiplied next."""
        rmsnorm_tiles.launch(self.arena.backend.stream, hidden, delta, weight, *self.tiles(hidden.shape[1]), eps)

    def multiply(self, matrix, rows, out):
        """Queue out[:, :] = rows w^T. rows f16 [T, K], out f32, f16 or bf16 [T, N]."""
        quantise_rows.launch(self.arena.backend.stream, rows, *self.tiles(rows.shape[1]))
        self.times(matrix, out)

    def times(self, matrix, out, gated=False):
        """The same for the rows that are in tiles already; gated: the product of gate and up, out f16 [T, N / 2]."""
        backend = self.arena.backend
        gemm_sm90a.launch(backend.stream, *self.tiles(size(matrix)[1]), *self.arena.unpacked(matrix), out,
                          backend.multiprocessors, gated)
