"""The numpy tower's weights, float32, as dataclasses: read once from a checkpoint, matrices of one input stacked.

Norm weights come with their 1 added, except the linear layers' own norm, whose weight is plain. Matrices are [out, in],
kept as Panels.
Who calls: model/cpu.py alone.
"""
from dataclasses import dataclass

import numpy as np

from ..config import FULL
from .panels import Panels


@dataclass(frozen=True)
class Attention:
    """Weights of a full-attention mixer. qg holds [q and gate of head 0, of head 1, ...] as rows, kv [k | v]."""
    qg: Panels                  # [2*H*hd, D]
    kv: Panels                  # [2*G*hd, D]
    out: Panels                 # [D, H*hd]
    q_norm: np.ndarray          # [hd], 1 + w
    k_norm: np.ndarray


@dataclass(frozen=True)
class DeltaNet:
    """Weights of a linear-attention mixer. into holds [qkv | z | b | a] as rows."""
    into: Panels                # [C + Nv*dv + 2*Nv, D]
    out: Panels                 # [D, Nv*dv]
    conv: np.ndarray            # [taps, C]
    decay: np.ndarray           # [Nv], -exp(A_log)
    dt_bias: np.ndarray         # [Nv]
    norm: np.ndarray            # [dv], the plain weight


@dataclass(frozen=True)
class Layer:
    norm_in: np.ndarray         # [D], 1 + w, as every norm below
    mixer: Attention | DeltaNet
    norm_post: np.ndarray
    gate_up: Panels             # [2*F, D]
    down: Panels                # [D, F]


@dataclass(frozen=True)
class DraftHead:
    """The MTP head: one more full layer fed with [embedding of the next token | hidden of this one]."""
    fc: Panels                  # [D, 2*D]
    norm_embedding: np.ndarray
    norm_hidden: np.ndarray
    layer: Layer
    norm: np.ndarray


def read_layer(checkpoint, prefix: str, kind: str) -> Layer:
    """One layer's weights in float32, matrices that share an input stacked, norms with their 1 added."""
    get = lambda *names: np.concatenate([checkpoint.f32(prefix + n) for n in names])
    if kind == FULL:
        a = "self_attn."
        mixer = Attention(qg=Panels(get(a + "q_proj.weight")), kv=Panels(get(a + "k_proj.weight", a + "v_proj.weight")),
                          out=Panels(get(a + "o_proj.weight")),
                          q_norm=1 + get(a + "q_norm.weight"), k_norm=1 + get(a + "k_norm.weight"))
    else:
        a = "linear_attn."
        mixer = DeltaNet(into=Panels(get(*(f"{a}in_proj_{n}.weight" for n in ("qkv", "z", "b", "a")))),
                         out=Panels(get(a + "out_proj.weight")), norm=get(a + "norm.weight"),
                         conv=np.ascontiguousarray(get(a + "conv1d.weight")[:, 0].T),
                         decay=-np.exp(get(a + "A_log")), dt_bias=get(a + "dt_bias"))
    return Layer(norm_in=1 + get("input_layernorm.weight"), mixer=mixer,
                 norm_post=1 + get("post_attention_layernorm.weight"),
                 gate_up=Panels(get("mlp.gate_proj.weight", "mlp.up_proj.weight")), down=Panels(get("mlp.down_proj.weight")))


def read_draft_head(checkpoint) -> DraftHead:
    norm = lambda name: 1 + checkpoint.f32(f"mtp.{name}.weight")
    return DraftHead(fc=Panels(checkpoint.f32("mtp.fc.weight")), norm_embedding=norm("pre_fc_norm_embedding"),
                     norm_hidden=norm("pre_fc_norm_hidden"), layer=read_layer(checkpoint, "mtp.layers.0.", FULL),
                     norm=norm("norm"))
