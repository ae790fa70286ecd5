"""penalise: lower the logits of tokens that were there before, in place, as sampler.py defines it.

    n         = how often v was generated: counts[slots[t], v] without its top bit, and once for each row that row t sees
                (itself and its ancestors in the draft tree) whose token is v
    logits[t, v] is divided by repetition[t] if it is positive, multiplied if not, where v was generated or is in the prompt;
    then         loses frequency[t] n, and presence[t] where n > 0

    logits     f32 [T, V]             V a multiple of 4
    counts     u32 [S, V]             of the rows committed before this step; top bit: v is in the prompt
    slots      i32 or u32 [T]         SKIP (-1) for a row without penalties, whose logits are not read
    tokens     i32 or u32 [T]         what the step's rows were fed
    starts     i32 or u32 [R + 1], ancestors u32 [T]      as in attn_decode.py; rows of a prompt, bits 0
    repetition, frequency, presence   f32 [T]

Blocks of 256 threads take 1024 logits of a row, a thread four, which it compares with each of the row's own tokens.
"""
import functools

import numpy as np

from . import ptx, shares
from .build import device, kernel
from .parity import Output
from .ptx import f32, u32, u64
from .unroll import static_range

THREADS = 256
FIELD = THREADS * 4
PROMPT = 0x80000000           # bit of a count: the token is in the prompt
SKIP = 0xFFFFFFFF             # -1 in int32
REGISTERS = 48
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128"), "sm_120a": ("LDG.E.128", "STG.E.128")}
# Terms are below 2^5 in CASES. The quotient, a product with rcp.approx, is off by 2^-23 + 2^-24 of itself, the penalty by
# 2^-24; their difference may cancel.
OUTPUTS = {"logits": Output(atol=2.0 ** -17)}


def ref(logits, counts, slots, tokens, starts, ancestors, repetition, frequency, presence):
    """Row after row, in float64."""
    out = logits.astype(np.float64)
    for r in range(len(starts) - 1):
        for t in range(starts[r], starts[r + 1]):
            if slots[t] == -1:
                continue
            generated = (counts[slots[t]] & 0x7FFFFFFF).astype(np.int64)
            for i in range(starts[r + 1] - starts[r]):
                generated[tokens[starts[r] + i]] += ancestors[t] >> np.uint32(i) & 1
            seen = (generated > 0) | (counts[slots[t]] >= PROMPT)
            x, factor = out[t], np.float64(repetition[t])
            out[t] = np.where(seen, np.where(x > 0, x / factor, x * factor), x)
            out[t] -= frequency[t].astype(np.float64) * generated + presence[t].astype(np.float64) * (generated > 0)
    return dict(logits=out)


@functools.cache
def build():
    """The kernel, of any vocabulary."""

    @device
    def penalised(x, count, more, repetition, frequency, presence):
        """One logit."""
        n = u32(u32(count & 0x7FFFFFFF) + more)
        factor = ptx.select(x > 0.0, ptx.reciprocal(repetition), repetition)
        x = ptx.select((count | more) != 0, x * factor, x)
        return x - ptx.select(n != 0, ptx.fma(frequency, f32(n), presence), 0.0)

    @kernel(threads=THREADS)
    def penalise(logits: u64, counts: u64, slots: u64, tokens: u64, starts: u64, ancestors: u64, repetition: u64,
                 frequency: u64, presence: u64, sequences: u32, columns: u32):
        row, lane = ptx.block_y(), ptx.lane()
        at = u32(ptx.block_x() * FIELD + ptx.thread_x() * 4)
        slot, bits = ptx.load_u32(slots + row * 4), ptx.load_u32(ancestors + row * 4)
        end = u32(0xFFFFFFFF)
        if lane < sequences:
            end = ptx.load_u32(starts + lane * 4 + 4)
        r = shares.sequence_of(row, end)
        if slot != SKIP and r < sequences and at < columns:
            first = ptx.load_u32(starts + r * 4)
            more = (u32(0),) * 4
            while bits != 0:
                i = ptx.count_ones(u32(~bits & u32(bits - 1)))              # number of the lowest bit
                token = ptx.load_u32(tokens + u64(first + i) * 4)
                more = tuple(u32(more[j] + ptx.select(token == at + j, u32(1), u32(0))) for j in static_range(4))
                bits = u32(bits & u32(bits - 1))
            here = logits + (u64(row) * columns + at) * 4
            x = ptx.read_f32x4(here)
            count = ptx.load_x4(counts + (u64(slot) * columns + at) * 4)
            factor, per_use, once = (ptx.load_f32(repetition + row * 4), ptx.load_f32(frequency + row * 4),
                                     ptx.load_f32(presence + row * 4))
            ptx.store_f32x4(here, tuple(penalised(x[j], count[j], more[j], factor, per_use, once)
                                        for j in static_range(4)))
    return penalise


def launch(stream, logits, counts, slots, tokens, starts, ancestors, repetition, frequency, presence):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    rows, columns = logits.shape
    sequences = len(starts) - 1
    if columns % 4 or not columns:
        raise ValueError(f"logits has {columns} columns; penalise wants a positive multiple of 4")
    if sequences > shares.MAX_SEQUENCES:
        raise ValueError(f"a step takes at most {shares.MAX_SEQUENCES} sequences, got {sequences}")
    for name, array, dtype, shape in (
            ("logits", logits, np.float32, (rows, columns)), ("counts", counts, np.uint32, (counts.shape[0], columns)),
            ("slots", slots, None, (rows,)), ("tokens", tokens, None, (rows,)), ("ancestors", ancestors, np.uint32, (rows,)),
            ("repetition", repetition, np.float32, (rows,)), ("frequency", frequency, np.float32, (rows,)),
            ("presence", presence, np.float32, (rows,))):
        if tuple(array.shape) != shape or dtype and array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype or np.int32)} {shape}, got {array.dtype} {tuple(array.shape)}")
    if rows:
        stream.launch(build(), (-(-columns // FIELD), rows, 1), logits, counts, slots, tokens, starts, ancestors, repetition,
                      frequency, presence, sequences, columns)


CASES = (
    dict(rows=(3, 5), vocabulary=4096),                                # nano; 27B has more blocks
    dict(rows=(1, 0, 4), vocabulary=1100, skip=1),                     # ragged
    dict(rows=(32,), vocabulary=8),                                    # every token on every path
    dict(rows=(1,), vocabulary=4),
    dict(rows=(), vocabulary=4),
)


def make(rng, rows=(1,), vocabulary=248320, skip=0):
    """Named random arguments: a chain in each sequence; `skip` rows have no penalties."""
    total, slots = sum(rows), max(len(rows), 1)
    counts = rng.integers(0, 4, (slots, vocabulary), np.uint32) * rng.integers(0, 2, (slots, vocabulary), np.uint32)
    counts[rng.random(counts.shape) < 0.3] |= np.uint32(PROMPT)
    slot = np.repeat(rng.permutation(slots)[:len(rows)], rows).astype(np.int32)
    slot[:skip] = -1
    return dict(logits=(rng.standard_normal((total, vocabulary)) * 4).astype(np.float32), counts=counts, slots=slot,
                tokens=rng.integers(0, vocabulary, total).astype(np.int32),
                starts=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
                ancestors=np.array([2 ** (i + 1) - 1 for t in rows for i in range(t)], np.uint32),
                repetition=rng.uniform(0.5, 2, total).astype(np.float32),
                frequency=rng.uniform(-0.5, 0.5, total).astype(np.float32),
                presence=rng.uniform(-2, 2, total).astype(np.float32))


def cost(rows=(1,), vocabulary=248320, skip=0):
    """Bytes that must move, and float operations."""
    return dict(bytes=max(sum(rows) - skip, 0) * vocabulary * 12, flops=max(sum(rows) - skip, 0) * vocabulary * 4)
