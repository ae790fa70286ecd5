"""What a wide chunk reads and writes besides weights and state: its integers and one arena, planned at load.

Everything is a view of a few pieces of memory, as long as `most` rows of their widest use take. What is never alive at the
same time shares a piece:

    hidden          f32 [T, D], the residual stream;    delta   bf16 or f32 [T, D], what it gathers (products.py says which)
    rows            f16: o [T, Nv, 128] | attended [T, H 256] | product [T, F] | a norm on its way to tiles
    wide            projected f16 [T, W] | qkv f16 | normed f32 [T, D] | gate_up f16 [T, 2 F] where they are not woven
    mixer           q [T, H, 256] | what the delta rule's three kernels hand on (deltanet.py)
    tiles, scale    a product's rows;  matrix, matrix_scale: its matrix, where it is unpacked (products.py)
                    the larger of tiles and matrix: what attn_prefill splits, too

Where memory is plenty all matrices stay unpacked beside the packed ones (resident): in e4m3 27 GB of 27B, 11 ms a chunk.

The integers are one block, copied in at the chunk's start:

    tokens, positions, places [T]       as in buffers.py; T is rounded up to whole tiles, and places there are -1
    follows, seeds [T]                  the token behind each row, and the place of the draft head's K and V; -1: not known
    outputs [T]                         rows whose logits are wanted
    slot [2]                            the slot, rows;   span [3]: 0, rows, length, the rows in the cache before
    pages [B]                           the sequence's table

Who calls: model/wide.py and the files of the layers. Proven by tests/test_wide.py.
"""
import math

import numpy as np

from .buffers import ALIGN
from .products import TILE, itemsize, size, way_of
from .staging import place


class Arena:
    """The memory of chunks of up to `most` rows that go through `parts`, which name their matrices and bytes a row; each
    matrix goes one of `ways`."""

    def __init__(self, backend, config, most, pages, parts, ways, resident=False):
        self.backend, self.config = backend, config
        matrices = [m for part in parts for m in part.matrices]
        self.ways = {id(m): way_of(ways, m) for m in matrices}
        self.resident = {id(m): self.ways[id(m)].kept(backend, m) for m in matrices
                         if resident and self.ways[id(m)].scratch(m)}
        used = {way.activations: way for way in self.ways.values()}
        self.activations, self.delta = " and ".join(sorted(used)), max((way.delta for way in used.values()), key=itemsize)
        row = largest(dict(hidden=4 * config.hidden_size, delta=itemsize(self.delta) * config.hidden_size,
                           wide=4 * config.hidden_size),
                      *(p.row_bytes for p in parts), *(self.ways[id(m)].row_bytes(size(m)[1]) for m in matrices))
        pieces = {name: most * bytes_ for name, bytes_ in row.items()}
        pieces |= largest(*(self.ways[id(m)].scratch(m) for m in matrices))
        self.memory = {name: backend.zeros((aligned(bytes_),), np.uint8) for name, bytes_ in pieces.items()}
        self.spare = max({"tiles", "matrix"} & set(pieces), key=pieces.get)     # nobody's between two products
        count = places(fields(most, pages))[1]
        self.staging, self.integers = backend.staging((count,), np.int32), backend.zeros((count * 4,), np.uint8)

    @property
    def nbytes(self):
        return sum(a.nbytes for a in self.memory.values()) + self.integers.nbytes \
            + sum(m.nbytes for m in self.resident.values())

    def settle(self, matrices):
        """Queue the unpacking of those that stay so."""
        for matrix in matrices:
            if id(matrix) in self.resident:
                self.ways[id(matrix)].prepare(self, matrix)

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


def largest(*pieces):
    """Name -> the most bytes that one of these dicts wants for it."""
    return {name: max(p.get(name, 0) for p in pieces) for name in {n: None for p in pieces for n in p}}


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
        self.hidden, self.delta = self.piece("hidden", np.float32, D), self.piece("delta", arena.delta, D)
        self.normed = self.piece("wide", np.float32, D)

    def __getattr__(self, name):
        try:
            return self.__dict__["integers"][name]
        except KeyError:
            raise AttributeError(name) from None

    def piece(self, name, dtype, *row):
        """A piece as an array with so many elements a row."""
        return self.arena.piece(name, (self.rows, *row), dtype)

    def norm(self, matrix, hidden, delta, weight, eps):
        """Queue hidden += delta, and its norm as the rows that a matrix is multiplied with next."""
        self.arena.ways[id(matrix)].norm(self, hidden, delta, weight, eps)

    def multiply(self, matrix, rows, out):
        """Queue out[:, :] = rows w^T. rows f16 [T, K], out f32, f16 or bf16 [T, N]."""
        way = self.arena.ways[id(matrix)]
        way.times(self, matrix, way.ready(self, rows), out, False)

    def times(self, matrix, out, gated=False):
        """The same for the rows that a norm left; gated: the product of gate and up, out f16 [T, N / 2]."""
        way = self.arena.ways[id(matrix)]
        way.times(self, matrix, way.rows(self, size(matrix)[1]), out, gated)
