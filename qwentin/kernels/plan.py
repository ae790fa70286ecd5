"""plan: of each sequence in a step, where its recurrent state lies and which rows of its last round it accepted.

    plan     i32 [R, 8 + M]    device data, one row a sequence; M a multiple of 4, at most 32

        0      1       2      3        4     5          6   7   8         ...   8 + M - 1
      | slot | first | rows | before | now | accepted | -   - | path[0] | ... | path[M-1] |

    parents  i32 [T]           of the step's rows, counted from the sequence's `first`; -1: the committed state

A state cannot be cropped, so a round leaves it alone: its rows (the convolution's inputs, k, v, beta, g) are kept in an
entry of pools [E, M, ...], and the sequence's next round first replays those of them that were accepted. Rows first ..
first + rows - 1 of the step are written to entry `now`; rows path[0] .. path[accepted - 1], root first, are read from
entry `before`, so the two differ. Plain decode is a round of one row whose predecessor accepted its only row: path 0.

The convolution's window, the three inputs before a round's rows, goes from entry to entry, so that blocks that share it
need not agree on when to move it on:

    pending      [E, 3 + M, C]    | window: 3 | rows: M |
    entry now    <- the last three of ( entry before's window, its accepted rows ), then the new rows

    before -1    no round yet, or settled: the window is the slot's own, and nothing is accepted
    rows 0       settle: the slot's own window is written, no entry; the sequence goes on with before -1
    both         padding: nothing is read or written

Used by conv_split, delta_verify and delta_decode; proven by their cases and tests/test_delta_kernels.py.
"""
import numpy as np

from . import ptx
from .build import device
from .ptx import u32

HEADER = 8                # columns before the path
WINDOW = 3                # the convolution's inputs before a row that it sees
MAX_ROWS = 32             # a lane of a warp holds a row, a bit of a word its descendant's debt to it
NONE = 0xFFFFFFFF         # -1 in int32
PAD = (-1, 0, 0, -1, -1, ())


@device
def read(plan, sequence, width):
    """(slot, first, rows, before, now, accepted) of a sequence; `width` is the number of columns."""
    p = plan + sequence * width * 4
    a, b = ptx.read_x4(p), ptx.read_x2(p + 16)
    return a[0], a[1], a[2], a[3], b[0], b[1]


@device
def path(plan, sequence, width):
    """path[lane] in each lane of a warp (its last in those beyond); read at once with the rest, not after it."""
    column = min(u32(ptx.lane() + HEADER), u32(u32(width) - 1))
    return ptx.read_u32(plan + (sequence * width + column) * 4)


@device
def past(load, window, pending, path, slot, before, at, octets, column, m):
    """An octet of row `at` of [window of the round before | its accepted rows], rows of so many octets."""
    accepted = u32(WINDOW + ptx.shuffle_idx(path, u32(at - WINDOW) % 32))
    p, row = pending, u32(before * (WINDOW + m) + ptx.select(at < WINDOW, at, accepted))
    if before == NONE:
        p, row = window, u32(slot * WINDOW + at)
    return load(p, row * octets + column)


def table(sequences, m):
    """The array, from (slot, first, rows, before, now, path) of each sequence; PAD for none."""
    plan = np.full((len(sequences), HEADER + m), -1, np.int32)
    for row, (slot, first, rows, before, now, path) in zip(plan, sequences):
        row[:6] = slot, first, rows, before, now, len(path)
        row[HEADER:HEADER + len(path)] = path
    return plan


def check(plan, parents, rows, pending=None, **pools):
    """M; ValueError unless plan, parents, the pools and the most rows of a sequence fit one another."""
    m = plan.shape[1] - HEADER if len(plan.shape) == 2 else 0
    if plan.dtype != np.int32 or not 4 <= m <= MAX_ROWS or m % 4:
        raise ValueError(f"plan must be int32 [R, {HEADER} + M] with M 4, 8, ... {MAX_ROWS}, "
                         f"got {plan.dtype} {tuple(plan.shape)}")
    if parents is not None and (parents.dtype != np.int32 or len(parents.shape) != 1):
        raise ValueError(f"parents must be int32 [T], got {parents.dtype} {tuple(parents.shape)}")
    if not 0 <= rows <= m:
        raise ValueError(f"rows must be 0 to {m}, the rows of an entry, got {rows}")
    entries = next(iter(pools.values())).shape[0]
    for name, pool in pools.items():
        if tuple(pool.shape[:2]) != (entries, m):
            raise ValueError(f"{name} must have shape ({entries}, {m}, ...), got {tuple(pool.shape)}")
    if pending is not None and tuple(pending.shape[:2]) != (entries, WINDOW + m):
        raise ValueError(f"pending must have shape ({entries}, {WINDOW + m}, ...), got {tuple(pending.shape)}")
    return m


def random(rng, new, accepted, m):
    """(plan, parents) of sequences with so many new and accepted rows (None: no round before): random paths, slots and
    entries; every other sequence's rows are a random tree, the others' a chain, as deep as a tree can be."""
    count = len(new)
    slot, entry = rng.permutation(count), rng.permutation(2 * count)
    first = np.cumsum([0, *new])
    paths = [np.sort(rng.choice(m, n or 0, replace=False)) for n in accepted]
    before = [-1 if accepted[r] is None else entry[2 * r] for r in range(count)]
    plan = table([PAD if before[r] < 0 and not new[r] else
                  (slot[r], first[r], new[r], before[r], entry[2 * r + 1] if new[r] else -1, paths[r])
                  for r in range(count)], m)
    parents = [i - 1 if r % 2 else rng.integers(max(-1, i - 4), i) for r, n in enumerate(new) for i in range(n)]
    return plan, np.array(parents, np.int32)
