"""What every part of a forward pass gave, by name, so that two towers can be compared where they first part ways.

    >>> gpu.trace(step).first_difference(cpu.trace(step))
    'layer 3 attention: relative error 0.71, worst at [0, 17]: -1.25, wanted 0.75'

    embed f32 [T, D];   layer i "delta net", "attention" or "mlp": what it adds to the stream;   normed: the last norm's

Both towers' `trace` make one. Proven by tests/test_cuda.py.
"""
import copy

import numpy as np

ALLOWED = 1e-2      # of a mixer with 16-bit activations and keys: two correct ones of this family differ by up to 7e-3


class Trace:
    """Arrays f32 [T, D] by name, in the order of the pass."""

    def __init__(self):
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, name, array):
        self.arrays[name] = np.array(array, np.float32)

    def grow(self, name, stream):
        """Add what the residual stream has grown by since all that was added before, the embeddings first."""
        self.add(name, stream - sum(self.arrays.values()))

    def first_difference(self, reference, rtol: float = ALLOWED) -> str | None:
        """The first part whose error ||got - want|| / ||want|| exceeds rtol, in words; None if there is none.

        Raises ValueError if the two traces do not have the same parts.
        """
        for name, error in self.errors(reference).items():
            if not error <= rtol:                           # NaN is a difference
                got, want = self.arrays[name], reference.arrays[name]
                off = np.where(np.isnan(got), np.inf, np.abs(got - want))
                at = tuple(int(i) for i in np.unravel_index(off.argmax(), off.shape))
                return f"{name}: relative error {error:.2g}, worst at {list(at)}: {got[at]:.6g}, wanted {want[at]:.6g}"
        return None

    def errors(self, reference) -> dict[str, float]:
        """Every part's relative error, by the Euclidean norm."""
        if list(self.arrays) != list(reference.arrays):
            raise ValueError(f"the traces have different parts: {sorted(set(self.arrays) ^ set(reference.arrays))}")
        norm = np.linalg.norm
        return {name: float(norm(got - reference.arrays[name]) / max(norm(reference.arrays[name]), 1e-30))
                for name, got in self.arrays.items()}


def trace_cpu(tower, step) -> Trace:
    """A step on the numpy tower with its parts kept: its methods are wrapped on a copy that shares its arrays."""
    found, watched, count = Trace(), copy.copy(tower), iter(range(len(tower.layers)))
    now = {"layer": -1}
    found.add("embed", tower.embed[step.tokens])

    def mixer(method, kind):
        def run(*args):
            now["layer"] = next(count)
            return kept(f"layer {now['layer']} {kind}", method(*args))
        return run

    def kept(name, array):
        found.add(name, array)
        return array
    watched.attention, watched.delta_net = mixer(tower.attention, "attention"), mixer(tower.delta_net, "delta net")
    watched.mlp = lambda *args: kept(f"layer {now['layer']} mlp", tower.mlp(*args))

    def read_out(hidden, norm, step):
        rms = hidden / np.sqrt((hidden.astype(np.float64) ** 2).mean(-1, keepdims=True) + tower.config.rms_norm_eps)
        found.add("normed", rms * norm)
        return tower.read_out(hidden, norm, step)
    watched.read_out = read_out
    watched.forward(step)
    return found
