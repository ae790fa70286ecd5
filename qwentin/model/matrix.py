"""A weight matrix on the device, and how a checkpoint's tensors become one.

    tensors of one input, stacked      | packed: one gemv                     | 16-bit: one dense |
    columns of the product               0 .................................. n  ................ width

Small 16-bit tensors that go with packed ones may be packed too, as sums of terms (terms.py): a launch less.
An MLP's gate and up, packed, are woven into one matrix whose gemv writes their gated product (kernels/gemv_glu.py).
Tensors that share a packing become one run of strips (packed.py), so that one launch reads them all; what the converter
left in 16 bits comes behind, in f16. Anything else that a checkpoint may hold (block FP8, NVFP4 as published, float32) is
decoded and held in f16: right, but as large as BF16; `qwentin convert` makes it small.

Who calls: the files of the layers, at load. Proven by tests/test_cuda.py.
"""
from dataclasses import dataclass, replace

import numpy as np

from .. import numerics
from ..errors import CheckpointError
from ..kernels import dense, gemv, gemv_glu, gemv_residual, packed, strips
from ..kernels.quantise import alpha_of
from . import terms
from .encodings import Rows, Tiles

LARGEST = 65504.0               # of f16
WOVEN = 8                       # strips of each tensor that are woven at a time on the host: 4 MB of 27B's


@dataclass(frozen=True)
class Matrix:
    """[width, K] as up to two parts: `tiles`, u8 packing.shape(n, K), then `plain`, f16 [rest, K].

    `width` is a multiple of 8, so that rows of the product start at 16-byte boundaries; the last columns may be padding.
    """
    width: int
    packing: packed.Packing | None
    tiles: object
    alpha: object               # f32 [n / 16], nvfp4 only
    n: int                      # rows of tiles
    plain: object
    terms: int = 1              # what the last rows are a sum of
    gated: bool = False         # gate and up take turns; the product is silu(gate) * up, f16 [M, n / 2]

    @property
    def inputs(self) -> int:
        """K."""
        return self.plain.shape[1] if self.tiles is None else self.tiles.shape[1] * packed.DEPTH

    def first(self, rows) -> "Matrix":
        """The first outputs of one that is neither gated nor in terms, whole strips; nothing is copied."""
        n = min(rows, self.n)
        if rows % packed.STRIP or rows > self.width or self.gated or self.terms > 1:
            raise ValueError(f"{rows} rows cannot be cut off a matrix of {self.width}: whole strips of {packed.STRIP} can")
        return replace(self, width=rows, n=n, tiles=self.tiles[:n // packed.STRIP] if n else None,
                       alpha=None if self.alpha is None else self.alpha[:n // packed.ROWS],
                       plain=self.plain[:rows - n] if rows > n else None)

    def launch(self, backend, x, out, work, **norm):
        """Queue out[:, :] = x w^T. x f16 [M, K], M <= 32; out f32 [M, width]. norm: squares and eps of x that `add` left."""
        if self.gated:
            gemv_glu.launch(backend.stream, self.tiles, x, out, work, self.n, self.packing, backend.multiprocessors,
                            self.alpha, shared=backend.shared, **norm)
            return
        if self.plain is not None:                  # the small one first: meanwhile gemv asks for its first weights
            dense.launch(backend.stream, self.plain, x, self.n, out)
        if self.tiles is not None:
            gemv.launch(backend.stream, self.tiles, x, out, work, self.n, self.packing, backend.multiprocessors, self.alpha,
                        shared=backend.shared, **norm)

    @property
    def adds(self):
        """Whether `add` can be called."""
        return self.tiles is not None and self.plain is None and not self.gated and self.n % packed.STRIP == 0

    def add(self, backend, x, b, weight, work):
        """Queue b.hidden += x w^T, and b.x and b.squares for a norm of this weight, which the next product applies."""
        gemv_residual.launch(backend.stream, self.tiles, x, b.hidden, weight, b.x, b.squares, work, self.n, self.packing,
                             backend.multiprocessors, self.alpha, shared=backend.shared)


def workspace(backend):
    """What every Matrix.launch of a stream shares."""
    return backend.upload(strips.workspace(strips.MAX_ROWS, backend.multiprocessors))


class Source:
    """A checkpoint's tensors, on their way to a backend. The synthetic weights of bench/ have the same five methods."""

    def __init__(self, checkpoint, backend):
        self.checkpoint, self.backend = checkpoint, backend

    def vector(self, name):
        """A small tensor, f32 on the host."""
        return self.checkpoint.f32(name)

    def matrix(self, *names, columns=None) -> Matrix:
        """The named tensors stacked. columns: a slice of the inputs, in whole 128s."""
        tensors = [self.checkpoint.tensors[name] for name in names]
        tiled = [t for t in tensors if isinstance(t.encoding, Tiles)]
        packing = tiled[0].encoding.packing if tiled else None
        together = tensors[:len(tiled)] == tiled and all(
            t.encoding.packing == packing and t.shape[0] % packed.STRIP == 0 for t in tiled)
        if tiled and not together and len(tensors) > 1:
            raise CheckpointError(f"{', '.join(names)} are packed in ways that cannot be stacked; convert the checkpoint "
                                  "again with one --weights for all.")
        n = sum(t.shape[0] for t in tiled)
        rest = [half(t, columns) for t in tensors[len(tiled):]]
        width = n + sum(map(len, rest))
        return Matrix(-(-width // 8) * 8, packing, self.tiles(tiled, columns), self.uploaded(self.alphas(tiled)), n,
                      self.backend.upload(np.concatenate(rest)) if rest else None)

    def with_terms(self, names, small) -> Matrix:
        """The named tensors stacked, and behind them the small ones: packed like them if they are packed, in terms."""
        big, rest = ([self.checkpoint.tensors[name] for name in some] for some in (names, small))
        if not can_add_terms(big, rest):
            return self.matrix(*names, *small)
        packing, n, w = big[0].encoding.packing, sum(t.shape[0] for t in big), np.concatenate([t.f32() for t in rest])
        alpha, factors = alpha_of(np.abs(w).max()) if packing == packed.NVFP4 else np.float32(1), self.alphas(big)
        whole = n + terms.rows(packing, len(w))
        if factors is not None:
            factors = np.concatenate([factors, np.full((whole - n) // packed.ROWS, alpha)])
        tiles = self.tiles(big, None, terms.pack(packing, w, alpha))
        return Matrix(whole, packing, tiles, self.uploaded(factors), whole, None, terms.TERMS[packing])

    def glu(self, gate, up) -> Matrix:
        """Two named tensors as one gated matrix; stacked as `matrix` does if they are not packed, which swiglu finishes."""
        tensors = [self.checkpoint.tensors[name] for name in (gate, up)]
        if not can_weave(*tensors):
            return self.matrix(gate, up)
        first, second = (t.parts[t.encoding.codes].array() for t in tensors)
        (n, _), packing, step = tensors[0].shape, tensors[0].encoding.packing, WOVEN * packed.STRIP
        half = packed.STRIP // 2
        out = self.backend.empty((n // half, *first.shape[1:]), np.uint8)
        for at in range(0, n, step):
            rows, some = min(step, n - at), slice(at // packed.STRIP, at // packed.STRIP + WOVEN)
            self.backend.fill(out[at // half:(at + rows) // half], packed.interleave(first[some], second[some], rows))
        alphas = self.alphas(tensors)
        if alphas is not None:
            alphas = alphas.reshape(2, -1).T.reshape(-1)
        return Matrix(n, packing, out, self.uploaded(alphas), 2 * n, None, gated=True)

    def tiles(self, tensors, columns, *behind):
        """Their strips, one after the other, streamed from the file's map, and arrays of strips behind them."""
        if not tensors:
            return None
        parts = [*(t.parts[t.encoding.codes].array() for t in tensors), *behind]
        if columns is not None:
            parts = [p[:, columns.start // packed.DEPTH:columns.stop // packed.DEPTH] for p in parts]
        out = self.backend.empty((sum(map(len, parts)), *parts[0].shape[1:]), np.uint8)
        at = 0
        for part in parts:
            self.backend.fill(out[at:at + len(part)], part)
            at += len(part)
        return out

    def alphas(self, tensors):
        """nvfp4's factor of each tile, on the host."""
        if not tensors or tensors[0].encoding.packing != packed.NVFP4:
            return None
        return np.concatenate([
            np.full(t.shape[0] // packed.ROWS, t.parts["weight_alpha"].floats(), np.float32) for t in tensors])

    def uploaded(self, array):
        return None if array is None else self.backend.upload(array)

    def table(self, name):
        """(codes, scales or None, format): the embedding as kernels/embed.py reads it."""
        tensor = self.checkpoint.tensors[name]
        if isinstance(tensor.encoding, Rows):
            parts, bits = tensor.parts, tensor.encoding.packing.codes.bits
            return (self.backend.upload(parts[tensor.encoding.codes].array()),
                    self.backend.upload(parts["weight_rows_scale"].floats()), {6: "e2m3", 8: "e4m3"}[bits])
        bits = tensor.parts["weight"].array() if tensor.format == "bf16" else numerics.encode_bf16(tensor.f32())
        return self.backend.upload(bits), None, "bf16"


def can_add_terms(big, small) -> bool:
    """Whether the small tensors may stand behind the big ones as terms: these are packed alike, in whole strips."""
    kinds = {t.encoding for t in big if isinstance(t.encoding, Tiles)}
    return len(kinds) == 1 and kinds.pop().packing in terms.TERMS and not any(isinstance(t.encoding, Tiles) for t in small) \
        and all(isinstance(t.encoding, Tiles) and t.shape[0] % packed.STRIP == 0 for t in big)


def can_weave(gate, up) -> bool:
    """Whether two tensors may be one gated matrix: packed alike, in whole half strips."""
    return isinstance(gate.encoding, Tiles) and gate.encoding == up.encoding and gate.shape == up.shape \
        and gate.shape[0] % (packed.STRIP // 2) == 0


def half(tensor, columns) -> np.ndarray:
    """A tensor in f16; CheckpointError if a weight does not fit."""
    values = tensor.f32() if columns is None else tensor.f32()[:, columns]
    if np.abs(values).max(initial=0) > LARGEST:
        raise CheckpointError(f"tensor {tensor.name} holds {np.abs(values).max()}; at most {LARGEST} fits the GPU's f16.")
    return values.astype(np.float16)
