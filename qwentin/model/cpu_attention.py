"""Attention of the numpy tower: queries of one sequence over its keys and values, and where those lie in the pages.

Two forms. `attend` is for many rows, a prompt's: two large products. `attend_few` is for the rows of a decode step or of a
draft tree: whatever tree a row stands in and whoever stands beside it, its bits are the same. Keys are taken in the order of
their positions, PAGE of them at a time, each sum one chain of multiply-adds; what is masked adds zeros to it.

Who calls: model/cpu.py alone. Proven by tests/test_cpu.py and tests/test_panels.py.
"""
import numpy as np

from ..kvpool import PAGE
from ..step import ancestors, depths, is_chain
from .panels import VECTOR

QUERIES = 128               # rows of attention scored at once: bounds the scratch, and the causal triangle is cut in steps


def attend(q, keys, values, mask):
    """Grouped-query attention of n scaled queries. q [n, H, hd]; keys and values [L, G, hd], the last t of them the step's
    own rows, which mask bool [n, t] restricts; if n = t, to the diagonal and below. Returns [n, H, hd]."""
    (rows, t), (_, H, hd) = mask.shape, q.shape
    past, G = len(keys) - t, keys.shape[1]
    out = np.empty((rows, H, hd), np.float32)
    kt, vt = keys.transpose(1, 2, 0), values.transpose(1, 0, 2)         # [G, hd, L], [G, L, hd]
    for i in range(0, rows, QUERIES):
        end = min(i + QUERIES, rows)
        n, seen = end - i, past + (end if rows == t else t)             # later keys are nobody's ancestors
        some = q[i:end].reshape(n, G, H // G, hd).transpose(1, 2, 0, 3).reshape(G, -1, hd)
        scores = (some @ kt[:, :, :seen]).reshape(G, H // G, n, seen)
        if t > 1:
            scores[..., past:] += np.where(mask[i:end, :seen - past], np.float32(0), np.float32(-np.inf))
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        o = (scores.reshape(G, -1, seen) @ vt[:, :seen]).reshape(G, H // G, n, hd)
        out[i:end] = o.transpose(2, 0, 1, 3).reshape(n, H, hd)
    return out


def attend_few(q, keys, values, parents, which):
    """The same for few queries: rows `which` (i32 [n], ascending) of the step's own, whose parents are i32 [t]."""
    n, H, hd = q.shape
    L, G = keys.shape[:2]
    t, m = len(parents), -(-n * H // G // VECTOR) * VECTOR              # columns: a query's heads of one group side by side
    start, edge, (behind, behind_values), mask = last_page(keys, values, parents)
    columns = np.zeros((G, hd, m), np.float32)
    columns[:, :, :n * H // G] = q.reshape(n, G, H // G, hd).transpose(1, 3, 0, 2).reshape(G, hd, -1)
    pages = lambda x: x[:start].reshape(-1, PAGE, G, hd).transpose(2, 0, 1, 3)              # [G, pages, 128, hd]
    scores = np.empty((G, L, m), np.float32)
    if start:
        np.matmul(pages(keys), columns[:, None], out=scores[:, :start].reshape(G, -1, PAGE, m))
    if L - start > 1:
        np.matmul(behind.swapaxes(0, 1), columns, out=scores[:, start:])
    elif L > 1:                                                         # a single key would go through another routine
        np.matmul(keys[-2:].swapaxes(0, 1), columns, out=scores[:, -2:])
    else:
        scores[:] = behind.swapaxes(0, 1) @ columns
    if t > 1:
        own = scores[:, L - t:, :n * H // G].reshape(G, t, n, -1)       # a view
        own += np.where(mask[which].T, np.float32(0), np.float32(-np.inf))[:, :, None]
    scores -= scores.max(1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(1)                                               # along the slow axis: one key after the other
    scores = scores.swapaxes(1, 2)
    parts = []
    if start:
        parts.append((scores[:, :, :start].reshape(G, m, -1, PAGE).swapaxes(1, 2) @ pages(values)).sum(1))
    for a, b in ((start, edge), (edge, L)):
        if a < b:
            parts.append(scores[:, :, a:b] @ behind_values[a - start:b - start].swapaxes(0, 1))
    o = (sum(parts[1:], parts[0]) / total[:, :, None])[:, :n * H // G]
    return o.reshape(G, n, H // G, hd).swapaxes(0, 1).reshape(n, H, hd)


def last_page(keys, values, parents):
    """What stands behind the whole pages, a tree's rows by position: (rows in whole pages, where the page after those ends,
    keys and values from there on, mask [t, t] of the step's own rows in that order)."""
    L, t = len(keys), len(parents)
    if is_chain(parents):
        start = L // PAGE * PAGE
        return start, L, (keys[start:], values[start:]), ancestors(parents)
    past, depth = L - t, depths(parents)
    start, order = past // PAGE * PAGE, np.argsort(depth, kind="stable")
    rows = np.concatenate([np.arange(start, past), past + order])
    edge = past + int(np.searchsorted(depth[order], start + PAGE - past))
    return start, edge, (keys[rows], values[rows]), ancestors(parents)[:, order]


def write_rows(kv, pages, start, k, v):
    """Store rows k, v [t, G, hd] at token rows start... of a sequence. kv [2, P, 128, G, hd], pages i32 [B]."""
    at = np.arange(start, start + len(k))
    page, row = pages[at // PAGE], at % PAGE
    kv[0, page, row], kv[1, page, row] = k, v


def read_rows(kv, pages, count):
    """The first `count` token rows of a sequence: keys and values [count, G, hd]; a view where its pages are neighbours."""
    used = pages[:-(-count // PAGE)]
    first = int(used[0])
    neighbours = np.array_equal(used, np.arange(first, first + len(used)))
    picked = kv[:, first:first + len(used)] if neighbours else kv[:, used]
    return picked.reshape((2, -1) + kv.shape[3:])[:, :count]
