"""The MLP on the device: gate and up as one matrix, their gated product, down.

    x f16 [T, D] -> product f16 [T, F] -> delta f32 [T, D], or added     packed weights; norm.py says when
    x -> gate_up f32 [T, 2 F] -> product -> delta                        16-bit ones: the product is a kernel of its own

Who calls: model/cuda.py. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass

import numpy as np

from ..kernels import swiglu
from .matrix import Matrix


@dataclass(frozen=True)
class Mlp:
    gate_up: Matrix
    down: Matrix

    @classmethod
    def read(cls, source, prefix):
        return cls(source.glu(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
                   source.matrix(prefix + "mlp.down_proj.weight"))

    def queue(self, backend, b, work, norm, then):
        """Queue the MLP of a round with buffers b, from one norm to the next: b.x -> b.delta."""
        if self.gate_up.gated:
            norm.after(backend, b, self.gate_up, b.product, work)
        else:
            norm.after(backend, b, self.gate_up, b.gate_up, work)
            swiglu.launch(backend.stream, b.gate_up, b.product)
        then.before(backend, b, self.down, b.product, work)

    @property
    def matrices(self):
        return self.gate_up, self.down

    @property
    def row_bytes(self):
        """Of a chunk's pieces (arena.py)."""
        return {"wide": 0 if self.gate_up.gated else 2 * self.gate_up.width, "rows": 2 * self.down.inputs}

    def queue_wide(self, backend, c):
        """Queue the MLP of a chunk: its rows ready -> c.delta."""
        product = c.piece("rows", np.float16, self.down.inputs)
        if self.gate_up.gated:
            c.times(self.gate_up, product, gated=True)
        else:
            gate_up = c.piece("wide", np.float16, self.gate_up.width)
            c.times(self.gate_up, gate_up)
            swiglu.launch(backend.stream, gate_up, product)
        c.multiply(self.down, product, c.delta)
