"""A gated-DeltaNet mixer on the device: one projection, convolution and split, delta rule, gated norm, projection.

    x f16 [T, D] -> projected f32 [q k v | z | b a, in terms] -> gated f16 [T, Nv, 128] -> delta f32 [T, D] (norm.py)

Where no sequence has more than one row, all between the two products is one launch (delta_decode).

S is read and, by the rows that the round before accepted, moved on; so is the convolution's window, from entry to entry
(kernels/plan.py).
Who calls: model/cuda.py. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass

import numpy as np

from ..kernels import (conv_split, conv_wide, delta_chunk, delta_chunk_sm90a, delta_decode, delta_prepare, delta_verify,
                       gated_norm)
from .matrix import Matrix

CHUNKED = {"sm_90a": delta_chunk_sm90a}                 # chips with a form of their own


@dataclass(frozen=True)
class Pools:
    """One layer's recurrent state of every slot, and the rows of the last rounds in entries of M rows."""
    S: object                   # f32 [slots, Nv, 128, 128]
    window: object              # f32 [slots, 3, C]
    pending: object             # f32 [E, 3 + M, C]
    k: object                   # f32 [E, M, Nk, 128]
    v: object                   # f32 [E, M, Nv, 128]
    beta: object                # f32 [E, M, Nv]
    g: object

    @classmethod
    def make(cls, backend, config, slots, entries, rows):
        c = config
        Nk, Nv, C = c.linear_num_key_heads, c.linear_num_value_heads, c.conv_channels
        shapes = dict(S=(slots, Nv, 128, 128), window=(slots, 3, C), pending=(entries, 3 + rows, C),
                      k=(entries, rows, Nk, 128), v=(entries, rows, Nv, 128), beta=(entries, rows, Nv),
                      g=(entries, rows, Nv))
        return cls(**{name: backend.zeros(shape, np.float32) for name, shape in shapes.items()})


@dataclass(frozen=True)
class DeltaNet:
    """Weights of one layer and its pools."""
    into: Matrix
    out: Matrix
    conv: object                # f32 [4, C]
    decay: object               # f32 [Nv], -exp(A_log)
    dt_bias: object
    norm: object                # f32 [128], as it is
    pools: Pools
    channels: int
    eps: float
    kind = "delta net"

    @classmethod
    def read(cls, source, prefix, config, pools):
        a, get, upload = prefix + "linear_attn.", source.vector, source.backend.upload
        names = [f"{a}in_proj_{n}.weight" for n in ("qkv", "z", "b", "a")]
        return cls(source.with_terms(names[:2], names[2:]),
                   source.matrix(a + "out_proj.weight"), upload(np.ascontiguousarray(get(a + "conv1d.weight")[:, 0].T)),
                   upload(-np.exp(get(a + "A_log"))), upload(get(a + "dt_bias")), upload(get(a + "norm.weight")), pools,
                   config.conv_channels, config.rms_norm_eps)

    def queue(self, backend, b, work, norm, then):
        """Queue the mixer of a round with buffers b, from one norm to the next: b.x -> b.delta."""
        norm.after(backend, b, self.into, b.projected, work)
        self.advance(backend, b, b.bucket.deep)
        then.before(backend, b, self.out, b.gated.reshape(b.bucket.rows, b.gated.shape[1] * 128), work)

    @property
    def matrices(self):
        return self.into, self.out

    @property
    def row_bytes(self):
        """Of a chunk's pieces (arena.py)."""
        Nk, Nv = self.pools.k.shape[2], self.pools.v.shape[2]
        matrices = 2 * delta_prepare.PIECES * 32 * 8 * 2 // delta_prepare.CHUNK          # inverse and within
        return {"wide": 2 * self.into.width, "rows": 2 * 128 * Nv, "mixer": 4 * 128 * Nk + (2 * 128 + 8 + matrices + 8) * Nv}

    def queue_wide(self, backend, c):
        """Queue the mixer of a chunk: its rows ready -> c.delta; the slot's S and window are moved on."""
        p, stream, T, f16, f32 = self.pools, backend.stream, c.rows, np.float16, np.float32
        Nk, Nv, blocks = p.k.shape[2], p.v.shape[2], -(-c.rows // delta_prepare.CHUNK)
        projected, o = c.piece("wide", f16, self.into.width), c.piece("rows", f16, Nv, 128)
        triangle = (blocks, Nv, delta_prepare.PIECES, 32, 8), f16
        q, k, v, beta, g, inverse, within, decays = c.arena.carve(
            "mixer", ((T, Nk, 128), f16), ((T, Nk, 128), f16), ((T, Nv, 128), f16), ((T, Nv), f32), ((T, Nv), f32),
            triangle, triangle, ((blocks, Nv, 2, delta_prepare.CHUNK), f32))
        c.times(self.into, projected)
        conv_wide.launch(stream, c.slot, projected, self.conv, self.decay, self.dt_bias, p.window, q, k, v, beta, g,
                         self.into.terms)
        delta_prepare.launch(stream, c.slot, q, k, beta, g, inverse, within, decays)
        CHUNKED.get(backend.chip, delta_chunk).launch(stream, c.slot, p.S, q, k, v, inverse, within, decays, o)
        gated_norm.launch(stream, o, projected, self.channels, self.norm, v, self.eps)         # nobody needs v any more
        c.multiply(self.out, v.reshape(T, Nv * 128), c.delta)

    def advance(self, backend, b, rows):
        """Commit what the plan says was accepted, and run up to `rows` new rows of each sequence: b.projected -> b.gated.

        With 0 rows, only commit.
        """
        p, stream, terms = self.pools, backend.stream, self.into.terms
        pools = p.k, p.v, p.beta, p.g
        if rows <= 1:
            delta_decode.launch(stream, p.S, b.projected, self.conv, self.decay, self.dt_bias, self.norm, b.plan, p.window,
                                p.pending, *pools, b.gated, self.eps, terms)
            return
        conv_split.launch(stream, b.projected, self.conv, self.decay, self.dt_bias, b.plan, b.parents, p.window, p.pending,
                          b.linear_q, *pools, rows, terms)
        delta_verify.launch(stream, p.S, b.linear_q, *pools, b.plan, b.parents, b.linear_out, rows)
        gated_norm.launch(stream, b.linear_out, b.projected, self.channels, self.norm, b.gated, self.eps)
