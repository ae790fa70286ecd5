"""One sequence's past, out of a CUDA tower and back into one: for the disk, and for sleep.

    kv_bf16 or kv_e4m3   [2 L, length, G, 256]       K and V of the full layers in turn, the draft head's last
    S, window            f32 [layers, ...]           of its slot

Who calls: model/cuda.py. Proven by tests/test_cuda.py.
"""
import numpy as np

from ..kvpool import PAGE


def export(tower, slot, pages, length):
    """The arrays of a slot whose state is settled."""
    kv = tower.kv
    rows = download(tower.backend, (kv[plane][page] for plane in range(kv.shape[0]) for page in pages))
    return {tower.kv_name: rows.reshape(kv.shape[0], len(pages) * PAGE, *kv.shape[3:])[:, :length],
            "S": download(tower.backend, (p.S[slot] for p in tower.pools)),
            "window": download(tower.backend, (p.window[slot] for p in tower.pools))}


def download(backend, arrays):
    """Device arrays of one shape, stacked on the host."""
    found = []
    for array in arrays:
        found.append(np.empty(array.shape, array.dtype))
        backend.read(array, found[-1])
    backend.synchronize()
    return np.stack(found)


def fits(tower, pages, arrays) -> bool:
    """Whether the arrays are this model's and format's, and no more than the pages hold."""
    kv, pools = arrays.get(tower.kv_name), tower.pools
    states = {name: (len(pools), *getattr(pools[0], name).shape[1:]) for name in ("S", "window")}
    return kv is not None and kv.shape[1] <= len(pages) * PAGE and kv.shape == (
        tower.kv.shape[0], kv.shape[1], *tower.kv.shape[3:]) and all(arrays[n].shape == shape for n, shape in states.items())


def restore(tower, slot, pages, arrays):
    """Copy them in."""
    for plane, kv in enumerate(arrays[tower.kv_name]):
        for i, page in enumerate(pages):
            rows = kv[i * PAGE:(i + 1) * PAGE]
            tower.backend.fill(tower.kv[plane][page][:len(rows)], np.ascontiguousarray(rows))
    for i, pools in enumerate(tower.pools):
        tower.backend.fill(pools.S[slot], arrays["S"][i])
        tower.backend.fill(pools.window[slot], arrays["window"][i])
