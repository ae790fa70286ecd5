"""What a round of the CUDA tower reads and writes besides weights and state: its integers and its scratch, planned at load.

A round is up to 32 rows of up to 32 sequences. Its sizes are rounded up to a Bucket, for which a graph is captured once;
everything else that changes from round to round is device data, one block of 32-bit integers copied in at its start:

    tokens, positions, places, parents, ancestors  [T]      places: page * 128 + row where K and V go, -1 for padding
    starts [R + 1], lengths [R], pages [R, B]               lengths: rows in the cache before this round's
    plan [R, 8 + M]                                         kernels/plan.py
    outputs [O]                                             rows whose logits are wanted

and a block comes back: best, values f32 [O, 64] and ids u32 [O, 64] of each wanted row's largest logits (kernels/topk.py).

There are so few buckets that all graphs can be captured at load (graphs.py): whatever a round could do without, such as a
page table as short as its sequences, would be another bucket.

Padding rows belong to no sequence: they are computed from token 0 and nobody looks at them.
Who calls: model/cuda.py. Proven by tests/test_cuda.py.
"""
import math
from dataclasses import dataclass, field

import numpy as np

from ..kernels import attn_decode, folded_norm, plan, strips, topk
from . import terms

ROWS = 32                       # of a round: what gemv takes, and the bits of an ancestor mask
STEPS = (1, 2, 4, 8, 16, 32)
DEEP = (1, 8, 16, 32)           # the most rows of a sequence: shapes of delta_verify and attn_decode
ALIGN = 64                      # integers: fields start at 256-byte boundaries
BEST = 64                       # candidates of a row: what comes back instead of its logits


def up(value, steps):
    """The first step that `value` fits."""
    return next(step for step in steps if step >= value)


@dataclass(frozen=True)
class Bucket:
    """Sizes of a round, rounded up: rows, sequences, the most rows of one, wanted outputs."""
    rows: int
    sequences: int
    deep: int
    outputs: int

    @classmethod
    def of(cls, rows, sequences, deep, outputs):
        """One sequence or as many as rows; no output or, of one sequence, one, or as many as rows."""
        T = up(max(rows, 1), STEPS)
        R = 1 if sequences == 1 else T
        return cls(T, R, up(max(deep, 1), DEEP), outputs if outputs < 2 - (R > 1) else T)

    @classmethod
    def every(cls, sequences):
        """All that rounds of so many sequences can need, the most common ones first."""
        alone = [cls.of(rows, 1, rows, outputs) for rows in STEPS for outputs in range(3)]
        beside = [cls.of(rows, 2, deep, outputs) for rows in STEPS for deep in range(1, rows) for outputs in (0, 1)]
        return list(dict.fromkeys(alone + (beside if sequences > 1 else [])))

    def fields(self, pages) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the integers; `pages` of a sequence at most."""
        T, R = self.rows, self.sequences
        return dict(tokens=(T,), positions=(T,), places=(T,), parents=(T,), ancestors=(T,), starts=(R + 1,), lengths=(R,),
                    pages=(R, pages), plan=(R, plan.HEADER + ROWS), outputs=(self.outputs,))

    def places(self, pages) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
        """Name -> (first integer, shape), and how many integers in all."""
        found, at = {}, 0
        for name, shape in self.fields(pages).items():
            found[name] = at, shape
            at += -(-int(np.prod(shape)) // ALIGN) * ALIGN
        return found, at


DTYPES = {"ancestors": np.uint32}


@dataclass
class Buffers:
    """One bucket's arrays: views of the memory that all buckets share, as attributes."""
    bucket: Bucket
    staging: np.ndarray         # i32, on the host: where the integers are written
    integers: object            # i32, on the device
    inputs: dict = field(default_factory=dict)
    host: dict = field(default_factory=dict)
    graphs: dict = field(default_factory=dict)      # what -> Replay, as cuda.py has them by bucket

    def __getattr__(self, name):
        try:
            return self.__dict__["inputs"][name]
        except KeyError:
            raise AttributeError(name) from None


class Scratch:
    """All memory of a round, at its largest, and the view of it for each bucket."""

    def __init__(self, backend, config, pages, kv_format):
        self.backend, self.config, self.kv_format = backend, config, kv_format
        c, T = config, ROWS
        H, G, Nk, Nv = c.num_attention_heads, c.num_key_value_heads, c.linear_num_key_heads, c.linear_num_value_heads
        self.pages = pages
        _, count = Bucket.of(ROWS, ROWS, ROWS, ROWS).places(pages)
        self.staging, self.integers = backend.staging((count,), np.int32), backend.zeros((count * 4,), np.uint8)
        moves = 1 + 2 * ROWS * ROWS             # kv_move.py; of each sequence a whole tree at most
        self.host_moves, self.moves = backend.staging((moves,), np.int32), backend.zeros((moves,), np.int32)
        D, F, V, gates = c.hidden_size, c.intermediate_size, c.vocab_size, -(-terms.MOST * 2 * Nv // 16) * 16
        f32, f16 = np.float32, np.float16
        self.shapes = dict(
            hidden=((T, D), f32), delta=((T, D), f32), x=((T, D), f16), normed=((T, D), f32), head_x=((T, D), f16),
            pair=((T, D), f32), projected=((T, c.conv_channels + Nv * 128 + gates), f32), linear_q=((T, Nk, 128), f32),
            linear_out=((T, Nv, 128), f32), gated=((T, Nv, 128), f16), qkv=((T, (2 * H + 2 * G) * 256), f32),
            q=((T, H, 256), np.uint16 if kv_format == "bf16" else f16), attended=((T, H, 256), f16),
            gate_up=((T, 2 * F), f32), product=((T, F), f16), logits=((T, V), f32))
        self.arrays = {name: backend.zeros(shape, dtype) for name, (shape, dtype) in self.shapes.items()}
        self.best, self.host_best = backend.zeros((T * BEST * 8,), np.uint8), backend.staging((T * BEST * 2,), np.uint32)
        self.topk_work = backend.zeros((topk.workspace_size(T, V, BEST),), np.uint32)
        self.squares = backend.zeros((math.prod(folded_norm.shape(strips.groups_of(T), D)),), f32)
        lines = max(G * (self.splits(d) + ROWS) * d * (H // G) for d in DEEP)
        self.partial, self.stats = backend.zeros((lines * 256 * 4,), np.uint8), backend.zeros((lines * 8,), np.uint8)
        self.made, self.found = {}, {}          # Buffers by bucket, and by the sizes of rounds that they were for

    def splits(self, deep):
        """Blocks that share a group's keys."""
        c = self.config
        per = c.num_attention_heads // c.num_key_value_heads
        return attn_decode.splits_for(self.backend.multiprocessors, self.backend.shared, c.num_key_value_heads, per, deep,
                                      self.kv_format, self.kv_format)

    @property
    def nbytes(self):
        rest = self.squares, self.partial, self.stats, self.integers, self.moves, self.topk_work, self.best
        return sum(a.nbytes for a in (*self.arrays.values(), *rest))

    def buffers(self, bucket) -> Buffers:
        """The views of a bucket, made once."""
        if bucket not in self.made:
            self.made[bucket] = self.make(bucket)
        return self.made[bucket]

    def fitting(self, *sizes) -> Buffers:
        """The views of Bucket.of(*sizes)."""
        if sizes not in self.found:
            self.found[sizes] = self.buffers(Bucket.of(*sizes))
        return self.found[sizes]

    def make(self, bucket):
        view, c = self.backend.view, self.config
        places, count = bucket.places(self.pages)
        buffers = Buffers(bucket, self.staging[:count], view(self.integers, 0, (count,), np.int32))
        for name, (at, shape) in places.items():
            dtype = DTYPES.get(name, np.int32)
            buffers.inputs[name] = view(self.integers, at * 4, shape, dtype)
            buffers.host[name] = self.staging[at:at + int(np.prod(shape))].view(dtype).reshape(shape)
        T, R, O = bucket.rows, bucket.sequences, bucket.outputs
        for name, array in self.arrays.items():
            buffers.inputs[name] = array[:O if name in ("head_x", "logits") else T]
        G, per = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
        lines = G, self.splits(bucket.deep) + R, bucket.deep * per
        buffers.inputs["partial"] = view(self.partial, 0, (*lines, 256), np.float32)
        buffers.inputs["stats"] = view(self.stats, 0, (*lines, 2), np.float32)
        for i, (name, dtype) in enumerate((("best_values", np.float32), ("best_ids", np.uint32))):
            buffers.inputs[name] = view(self.best, i * O * BEST * 4, (O, BEST), dtype)
            buffers.host[name] = self.host_best[i * O * BEST:][:O * BEST].view(dtype).reshape(O, BEST)
        buffers.inputs["best"], buffers.host["best"] = view(self.best, 0, (2 * O * BEST,), np.uint32), \
            self.host_best[:2 * O * BEST]
        buffers.inputs["squares"] = self.squares[:math.prod(folded_norm.shape(strips.groups_of(T), c.hidden_size))]
        buffers.inputs["topk_work"] = self.topk_work[:topk.workspace_size(O, c.vocab_size, BEST)]
        return buffers
