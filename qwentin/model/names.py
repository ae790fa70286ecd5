"""The tensors of a Qwen3.5-family text model: canonical names and shapes, and how published names map to them.

Canonical names are those of a text-only export: `model.layers.0.mlp.up_proj.weight`, `lm_head.weight`, `mtp.fc.weight`.
Linear weights are [out, in]. Axes: D hidden, F intermediate, V vocabulary, H query heads, G kv heads.
"""
from ..config import FULL, ModelConfig

PREFIXES = (                                            # published -> canonical, the first that matches
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.lm_head.", "lm_head."),
)
VISION = ("model.visual.", "visual.")                   # the vision tower of the multimodal release; not served


def canonical(name: str) -> str:
    """The name without the prefix that multimodal releases put before the text model."""
    for published, ours in PREFIXES:
        if name.startswith(published):
            return ours + name.removeprefix(published)
    return name


def is_vision(name: str) -> bool:
    return name.startswith(VISION)


def is_mtp(name: str) -> bool:
    """Belongs to the draft head (multi-token prediction)."""
    return name.startswith("mtp.")


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the configuration asks for, in the order of a forward pass."""
    d, vocab = config.hidden_size, config.vocab_size
    shapes = {"model.embed_tokens.weight": (vocab, d)}
    for i, kind in enumerate(config.layer_types):
        mixer = full_attention(config) if kind == FULL else linear_attention(config)
        shapes |= layer(config, f"model.layers.{i}.", mixer)
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, d)
    if config.mtp_num_hidden_layers:
        shapes |= mtp(config)
    return shapes


def layer(config: ModelConfig, prefix: str, mixer: dict) -> dict:
    """A decoder layer under `prefix`: two norms, the token mixer, the MLP."""
    d, f = config.hidden_size, config.intermediate_size
    inside = {"input_layernorm.weight": (d,), **mixer, "post_attention_layernorm.weight": (d,),
              "mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f)}
    return {prefix + name: shape for name, shape in inside.items()}


def full_attention(config: ModelConfig) -> dict:
    """q_proj holds, head by head, the rows of the query and then those of the output gate."""
    d, hd = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    inside = {"q_proj.weight": (2 * q, d), "k_proj.weight": (kv, d), "v_proj.weight": (kv, d),
              "o_proj.weight": (d, q), "q_norm.weight": (hd,), "k_norm.weight": (hd,)}
    return {"self_attn." + name: shape for name, shape in inside.items()}


def linear_attention(config: ModelConfig) -> dict:
    """in_proj_qkv holds the rows of all query heads, then all key heads, then all value heads."""
    d, channels, heads = config.hidden_size, config.conv_channels, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    inside = {"in_proj_qkv.weight": (channels, d), "in_proj_z.weight": (values, d),
              "in_proj_b.weight": (heads, d), "in_proj_a.weight": (heads, d),
              "conv1d.weight": (channels, 1, config.linear_conv_kernel_dim),
              "A_log": (heads,), "dt_bias": (heads,), "norm.weight": (config.linear_value_head_dim,),
              "out_proj.weight": (d, values)}
    return {"linear_attn." + name: shape for name, shape in inside.items()}


def mtp(config: ModelConfig) -> dict:
    """The draft head: one full-attention layer behind a projection of [embedding, hidden]. 15 tensors."""
    d = config.hidden_size
    return {"mtp.fc.weight": (d, 2 * d), "mtp.pre_fc_norm_embedding.weight": (d,),
            "mtp.pre_fc_norm_hidden.weight": (d,), "mtp.norm.weight": (d,),
            **layer(config, "mtp.layers.0.", full_attention(config))}
