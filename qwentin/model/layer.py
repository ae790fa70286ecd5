"""A layer of a round: norm, mixer, norm, MLP. The residual stream is b.hidden, what is still to be added to it b.delta.

A norm between two packed matrices is no launch: the products do it (norm.py).
Who calls: model/cuda.py; the draft head's layer, mtp.py. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass

from .attention import Attention
from .deltanet import DeltaNet
from .mlp import Mlp
from .norm import Norm, can_fold


@dataclass(frozen=True)
class Layer:
    norm_in: Norm
    mixer: Attention | DeltaNet
    norm_post: Norm
    mlp: Mlp

    @classmethod
    def read(cls, source, prefix, config, mixer, before=None):
        """before: the matrix that ends the layer before it, if there is one."""
        mlp, (begins, ends) = Mlp.read(source, prefix), mixer.matrices

        def norm(name, *around):
            weight = source.vector(f"{prefix}{name}_layernorm.weight")
            return Norm(source.backend.upload(weight), config.rms_norm_eps, can_fold(*around))
        return cls(norm("input", before, begins), mixer, norm("post_attention", ends, mlp.gate_up), mlp)

    def queue(self, backend, b, work, then, first=False, watch=lambda name, delta: None):
        """then: the norm that follows. watch: shown what each part gave, None where b.hidden has it already."""
        self.norm_in.queue(backend, b, first)
        self.mixer.queue(backend, b, work, self.norm_in, self.norm_post)
        watch(self.mixer.kind, None if self.norm_post.folded else b.delta)
        self.norm_post.queue(backend, b)
        self.mlp.queue(backend, b, work, self.norm_post, then)
        watch("mlp", None if then.folded else b.delta)
