"""A full-attention mixer on the device: projection, norm + rope + append, attention over pages with its gate, projection.

    x f16 [T, D] -> qkv f32 -> q; K and V into the pages -> attended f16 [T, H, 256] -> delta f32 [T, D] (norm.py)

Who calls: model/cuda.py. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass

import numpy as np

from ..kernels import attn_decode, attn_prefill, attn_prefill_sm90a, rope_append
from .matrix import Matrix

PREFILL = {"sm_90a": attn_prefill_sm90a}                # chips with a form of their own


@dataclass(frozen=True)
class Attention:
    """Weights of one layer and its planes of the cache."""
    qkv: Matrix
    out: Matrix
    q_norm: object              # f32 [256], as stored: rope_append adds 1
    k_norm: object
    inv_freq: object            # f32 [rotary / 2]
    keys: object                # [P, 128, G, 256], bf16 or e4m3
    values: object
    eps: float
    kind = "attention"

    @classmethod
    def read(cls, source, prefix, config, keys, values):
        a, upload = prefix + "self_attn.", source.backend.upload
        frequency = config.rope_theta ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim)
        return cls(source.matrix(*(f"{a}{n}_proj.weight" for n in "qkv")), source.matrix(a + "o_proj.weight"),
                   upload(source.vector(a + "q_norm.weight")), upload(source.vector(a + "k_norm.weight")),
                   upload(frequency.astype(np.float32)), keys, values, config.rms_norm_eps)

    def queue(self, backend, b, work, norm, then):
        """Queue the mixer of a round with buffers b, from one norm to the next: b.x -> b.delta."""
        norm.after(backend, b, self.qkv, b.qkv, work)
        heads = b.q.shape[1]
        rope_append.launch(backend.stream, b.qkv, self.q_norm, self.k_norm, self.inv_freq, b.positions, b.places, heads, b.q,
                           self.keys, self.values, eps=self.eps)
        attn_decode.launch(backend.stream, b.q, b.qkv, self.keys, self.values, b.pages, b.starts, b.lengths, b.ancestors,
                           1.0, 1.0, b.attended, b.partial, b.stats)
        then.before(backend, b, self.out, b.attended.reshape(b.bucket.rows, heads * 256), work)

    @property
    def matrices(self):
        return self.qkv, self.out

    @property
    def heads(self):
        return self.out.inputs // 256

    @property
    def row_bytes(self):
        """Of a chunk's pieces (arena.py)."""
        return {"wide": 2 * self.qkv.width, "rows": 2 * 256 * self.heads, "mixer": 2 * 256 * self.heads}

    def queue_wide(self, backend, c):
        """Queue the mixer of a chunk: its rows ready -> c.delta."""
        q, qkv = self.append(backend, c, c.places)
        attended = c.piece("rows", np.float16, self.heads, 256)
        form = PREFILL.get(backend.chip, attn_prefill)
        form.launch(backend.stream, q, qkv, self.keys, self.values, c.pages, c.span, 1.0, 1.0, attended,
                    *self.shared(backend, c))
        c.multiply(self.out, attended.reshape(c.rows, self.heads * 256), c.delta)

    def shared(self, backend, c):
        """(partial, stats) where blocks share the keys of few rows, as many as what no product uses now allows."""
        groups = self.keys.shape[2]
        per = self.heads // groups
        for splits in range(attn_prefill.splits_for(backend.multiprocessors, c.rows, per, groups), 1, -1):
            lines = groups, splits + 1, c.rows * per
            arrays = ((*lines, 256), np.float32), ((*lines, 2), np.float32)
            if c.arena.fits(c.arena.spare, *arrays):
                return c.arena.carve(c.arena.spare, *arrays)
        return None, None

    def append(self, backend, c, places):
        """Queue a chunk's projection, and its keys and values into the pages: its rows ready -> q, qkv."""
        qkv = c.piece("wide", np.float16, self.qkv.width)
        q = c.piece("mixer", np.uint16 if self.keys.dtype == np.uint16 else np.float16, self.heads, 256)
        c.times(self.qkv, qkv)
        rope_append.launch(backend.stream, qkv, self.q_norm, self.k_norm, self.inv_freq, c.positions, places, self.heads, q,
                           self.keys, self.values, eps=self.eps)
        return q, qkv
