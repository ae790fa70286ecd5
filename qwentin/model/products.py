"""How a wide chunk's rows meet a weight matrix: one class a way of multiplying, chosen by chip and by format of activations.

    way            rows                                 matrix                           product       where
    Unpacking      e4m3 tiles, a scale for each row     as e4m3 tiles, in a scratch      gemm_sm90a    sm_90a, e4m3
                   (rmsnorm_tiles, quantise_rows)       (unpack_e4m3, unpack_nvfp4)
    Halves         f16 tiles                            as f16 tiles, in a scratch       gemm_sm90a    sm_90a, f16, and of
                   (tile_rows)                          (unpack_f16, tile_rows)                        e4m3 what is left
    BlockScaled    as for Unpacking                     as it is packed                  gemm_sm120a   sm_120a, e4m3
    Portable       f16, as they are                     as it is packed                  gemm          sm_120a, f16, and of
                                                                                                       e4m3 what is left

A matrix goes the first way that takes it. A way says what memory it wants and queues three things: a norm whose results are
rows that are multiplied next, rows of f16 made ready for it, and the product. What it has no memory of its own for are
pieces of the chunk's arena, named in `row_bytes` and `scratch`.

Who calls: model/arena.py. Proven by tests/test_wide.py.
"""
import math
from dataclasses import dataclass

import numpy as np

from ..kernels import (gemm, gemm_sm90a, gemm_sm120a, packed, quantise_rows, rmsnorm, rmsnorm_tiles, tile_rows,
                       unpack_e4m3, unpack_f16, unpack_nvfp4)
from ..kernels.packed import NVFP4

TILE = gemm_sm90a.TILE


def ways(chip, activations):
    """The ways of a chip, the first that takes a matrix is its own; none where prompts go in rounds."""
    return WAYS.get((chip, activations), ())


def way_of(found, matrix):
    """The way of `found` that a matrix goes, or None."""
    return next((way for way in found if way.takes(matrix)), None)


def whole(matrix) -> bool:
    """Whether a matrix is packed, all of it."""
    return matrix.plain is None and matrix.tiles is not None and size(matrix)[0] == matrix.n


def size(matrix) -> tuple[int, int]:
    """(N, K)."""
    return matrix.width * (1 + matrix.gated), matrix.inputs


def itemsize(dtype):
    return np.dtype(dtype).itemsize


def tiles_of(rows, k, dtype=np.uint8):
    """Shape of the tiles of so many rows of K inputs."""
    width = TILE // itemsize(dtype)
    return -(-rows // TILE), k // width, TILE, width


class TiledRows:
    """Rows in e4m3 tiles, with a scale each."""
    activations = "e4m3"
    delta = np.uint16           # what the residual stream gathers: bf16's 2^-9 is nothing beside e4m3's 2^-4

    def row_bytes(self, k):
        """Of a row of K inputs, by piece."""
        return {"tiles": k, "scale": 4}

    def rows(self, c, k):
        """(tiles, scale) of a chunk's rows that are multiplied next."""
        return c.arena.piece("tiles", tiles_of(c.rows, k), np.uint8), c.arena.piece("scale", (c.rows,), np.float32)

    def norm(self, c, hidden, delta, weight, eps):
        """Queue hidden += delta, and its norm as the rows that are multiplied next."""
        rmsnorm_tiles.launch(c.arena.backend.stream, hidden, delta, weight, *self.rows(c, hidden.shape[1]), eps)

    def ready(self, c, rows):
        """Queue rows f16 [T, K] as those that are multiplied next: what `times` takes."""
        made = self.rows(c, rows.shape[1])
        quantise_rows.launch(c.arena.backend.stream, rows, *made)
        return made


class HalfRows:
    """Rows in f16 tiles, without scales."""
    activations = "f16"
    delta = np.float32

    def row_bytes(self, k):
        """Of a row of K inputs, by piece; a norm leaves `rows`."""
        return {"tiles": 2 * k, "rows": 2 * k}

    def rows(self, c, k):
        """(tiles, None) of a chunk's rows that are multiplied next."""
        return c.arena.piece("tiles", tiles_of(c.rows, k, np.float16), np.float16), None

    def norm(self, c, hidden, delta, weight, eps):
        """Queue hidden += delta, and its norm as the rows that are multiplied next."""
        out = c.piece("rows", np.float16, hidden.shape[1])
        rmsnorm.launch(c.arena.backend.stream, hidden, delta, weight, out, eps)
        self.ready(c, out)

    def ready(self, c, rows):
        """Queue rows f16 [T, K] as those that are multiplied next: what `times` takes."""
        made = self.rows(c, rows.shape[1])
        tile_rows.launch(c.arena.backend.stream, rows, made[0])
        return made


@dataclass
class Unpacked:
    """A matrix as tiles, and its scales or None for ones; `made` once they are there to stay."""
    tiles: object
    scale: object
    made: bool = False

    @property
    def nbytes(self):
        return self.tiles.nbytes + (0 if self.scale is None else self.scale.nbytes)


class Unpacking(TiledRows):
    """The matrix is unpacked to tiles like those of the rows, for each chunk or once."""
    dtype = np.uint8            # of tiles

    def takes(self, matrix) -> bool:
        packing = matrix.packing
        if not whole(matrix):
            return False
        if packing == NVFP4:
            return matrix.n % packed.ROWS == 0
        return packing.block == TILE and packing.codes.bits in unpack_e4m3.PLACED

    def scale_of(self, matrix):
        """Shape of the matrix' scales, or None."""
        n, k = size(matrix)
        return k // TILE, -(-n // TILE) * TILE

    def scratch(self, matrix):
        """Bytes of the matrix, by piece."""
        scale, tiles = self.scale_of(matrix), math.prod(tiles_of(*size(matrix), self.dtype))
        return {"matrix": tiles * itemsize(self.dtype), **({"matrix_scale": math.prod(scale) * 4} if scale else {})}

    def placed(self, matrix, array) -> Unpacked:
        """The matrix, not yet made, in what array(piece, shape, dtype) gives."""
        scale = self.scale_of(matrix)
        return Unpacked(array("matrix", tiles_of(*size(matrix), self.dtype), self.dtype),
                        array("matrix_scale", scale, np.float32) if scale else None)

    def kept(self, backend, matrix):
        """Memory in which a matrix stays unpacked."""
        return self.placed(matrix, lambda _, shape, dtype: backend.empty(shape, dtype))

    def prepare(self, arena, matrix) -> Unpacked:
        """The matrix unpacked: queued now, unless it stays and was before."""
        found = arena.resident.get(id(matrix)) or self.placed(matrix, arena.piece)
        if not found.made:
            self.unpack(arena.backend.stream, matrix, found.tiles, found.scale)
            found.made = id(matrix) in arena.resident
        return found

    def unpack(self, stream, matrix, tiles, scale):
        if matrix.packing == NVFP4:
            unpack_nvfp4.launch(stream, matrix.tiles, matrix.alpha, tiles, scale, matrix.n)
        else:
            unpack_e4m3.launch(stream, matrix.tiles, tiles, scale, matrix.n, matrix.packing)

    def times(self, c, matrix, rows, out, gated):
        """Queue the product of rows that are ready."""
        backend, found = c.arena.backend, self.prepare(c.arena, matrix)
        gemm_sm90a.launch(backend.stream, *rows, found.tiles, found.scale, out, backend.multiprocessors, gated)


class Halves(HalfRows, Unpacking):
    """The same in f16, for matrices that are packed, whose outputs get a scale each, or of 16 bits, which get none."""
    dtype = np.float16

    def takes(self, matrix) -> bool:
        if matrix.tiles is None:
            return matrix.inputs % gemm_sm90a.F16_WIDTH == 0
        return whole(matrix) and unpack_f16.takes(matrix.packing) and matrix.n % packed.ROWS == 0

    def scale_of(self, matrix):
        return None if matrix.tiles is None else (1, -(-matrix.n // TILE) * TILE)

    def unpack(self, stream, matrix, tiles, scale):
        if matrix.tiles is None:
            tile_rows.launch(stream, matrix.plain, tiles)
        else:
            unpack_f16.launch(stream, matrix.tiles, matrix.alpha, tiles, scale, matrix.n, matrix.packing)


class BlockScaled(TiledRows):
    """The matrix is read as it is packed; its scales go to the instruction, or are those of 128 inputs."""

    def takes(self, matrix) -> bool:
        return as_packed(matrix) and matrix.packing.block >= 32

    def scratch(self, matrix):
        return {}

    def times(self, c, matrix, rows, out, gated):
        """Queue the product of rows that are ready."""
        backend, m = c.arena.backend, matrix
        gemm_sm120a.launch(backend.stream, *rows, m.tiles, out, m.n, m.packing, backend.multiprocessors, gated)


class Portable:
    """Rows in f16 as they are, and the matrix as it is packed."""
    activations, delta = HalfRows.activations, HalfRows.delta

    def takes(self, matrix) -> bool:
        return as_packed(matrix)

    def scratch(self, matrix):
        return {}

    def row_bytes(self, k):
        """Of a row of K inputs that a norm leaves, by piece."""
        return {"tiles": 2 * k}

    def rows(self, c, k):
        """A chunk's rows that a norm left."""
        return c.piece("tiles", np.float16, k)

    def norm(self, c, hidden, delta, weight, eps):
        """Queue hidden += delta, and its norm as the rows that are multiplied next."""
        rmsnorm.launch(c.arena.backend.stream, hidden, delta, weight, self.rows(c, hidden.shape[1]), eps)

    def ready(self, c, rows):
        """Rows f16 [T, K] as they are."""
        return rows

    def times(self, c, matrix, rows, out, gated):
        """Queue the product of rows that are ready."""
        gemm.launch(c.arena.backend.stream, matrix.tiles, rows, out, matrix.n, matrix.packing, matrix.alpha, gated)


def as_packed(matrix) -> bool:
    """Whether a matrix is packed, all of it, in whole tiles of outputs, of strips where it is gated."""
    return whole(matrix) and matrix.n % (packed.STRIP if matrix.gated else packed.ROWS) == 0


WAYS = {("sm_90a", "e4m3"): (Unpacking(), Halves()), ("sm_90a", "f16"): (Halves(),),
        ("sm_120a", "e4m3"): (BlockScaled(), Portable()), ("sm_120a", "f16"): (Portable(),)}
