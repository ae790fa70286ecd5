"""How a wide chunk's rows meet a weight matrix: one class a way of multiplying, chosen by chip and by format of activations.

    way            rows                                 matrix                           product       where
    Unpacking      e4m3 tiles, a scale for each row     as e4m3 tiles, in a scratch      gemm_sm90a    sm_90a, e4m3
                   (rmsnorm_tiles, quantise_rows)       (unpack_e4m3, unpack_nvfp4)

A matrix goes the first way that takes it. A way says what memory it wants and queues three things: a norm whose results are
rows that are multiplied next, rows of f16 made ready for it, and the product. What it has no memory of its own for are
pieces of the chunk's arena, named in `row_bytes` and `scratch`.

Who calls: model/arena.py. Proven by tests/test_wide.py.
"""
import math
from dataclasses import dataclass

import numpy as np

from ..kernels import gemm_sm90a, packed, quantise_rows, rmsnorm_tiles, unpack_e4m3, unpack_nvfp4
from ..kernels.packed import NVFP4

TILE = gemm_sm90a.TILE


def ways(chip, activations):
    """The ways of a chip, the first that takes a matrix is its own; none where prompts go in rounds."""
    return WAYS.get((chip, activations), ())


def way_of(found, matrix):
    """The way of `found` that a matrix goes, or None."""
    return next((way for way in found if whole(matrix) and way.takes(matrix)), None)


def whole(matrix) -> bool:
    """Whether a matrix is packed, all of it."""
    return matrix.plain is None and matrix.tiles is not None and matrix.width * (1 + matrix.gated) == matrix.n


def size(matrix) -> tuple[int, int]:
    """(N, K)."""
    return matrix.n, matrix.tiles.shape[1] * TILE


def tiles_of(rows, k):
    """Shapes of the tiles and scales of a matrix of so many rows of K inputs."""
    count = -(-rows // TILE)
    return (count, k // TILE, TILE, TILE), (k // TILE, count * TILE)


class TiledRows:
    """Rows in e4m3 tiles, with a scale each."""

    def row_bytes(self, k):
        """Of a row of K inputs, by piece."""
        return {"tiles": k, "scale": 4}

    def rows(self, c, k):
        """(tiles, scale) of a chunk's rows that are multiplied next."""
        return c.arena.piece("tiles", tiles_of(c.rows, k)[0], np.uint8), c.arena.piece("scale", (c.rows,), np.float32)

    def norm(self, c, hidden, delta, weight, eps):
        """Queue hidden += delta, and its norm as the rows that are multiplied next."""
        rmsnorm_tiles.launch(c.arena.backend.stream, hidden, delta, weight, *self.rows(c, hidden.shape[1]), eps)

    def ready(self, c, rows):
        """Queue rows f16 [T, K] as those that are multiplied next: what `times` takes."""
        made = self.rows(c, rows.shape[1])
        quantise_rows.launch(c.arena.backend.stream, rows, *made)
        return made


@dataclass
class Unpacked:
    """A matrix as e4m3 tiles; `made` once they are there to stay."""
    tiles: object
    scale: object
    made: bool = False


class Unpacking(TiledRows):
    """The matrix is unpacked to tiles like those of the rows, for each chunk or once."""

    def takes(self, matrix) -> bool:
        packing = matrix.packing
        if packing == NVFP4:
            return matrix.n % packed.ROWS == 0
        return packing.block == TILE and packing.codes.bits in unpack_e4m3.PLACED

    def scratch(self, matrix):
        """Bytes of the matrix, by piece."""
        tiles, scale = tiles_of(*size(matrix))
        return {"matrix": math.prod(tiles), "matrix_scale": math.prod(scale) * 4}

    def kept(self, backend, matrix):
        """Memory in which a matrix stays unpacked."""
        tiles, scale = tiles_of(*size(matrix))
        return Unpacked(backend.empty(tiles, np.uint8), backend.empty(scale, np.float32))

    def prepare(self, arena, matrix) -> Unpacked:
        """The matrix unpacked: queued now, unless it stays and was before."""
        found = arena.resident.get(id(matrix))
        if found is None:
            tiles, scale = tiles_of(*size(matrix))
            found = Unpacked(arena.piece("matrix", tiles, np.uint8), arena.piece("matrix_scale", scale, np.float32))
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


WAYS = {("sm_90a", "e4m3"): (Unpacking(),)}
