"""`python -m qwentin inspect-config DIR`: the geometry that config.json gives, as this engine reads it."""
import json
from collections import Counter

from ..config import ModelConfig

HELP = "show the model geometry that config.json describes"
EXAMPLE = "python -m qwentin inspect-config ~/models/Qwen3.6-27B"


def add_arguments(parser):
    parser.add_argument("directory", metavar="DIR", help="directory with a config.json; no weights are needed")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments) -> int:
    fields = topology(ModelConfig.from_directory(arguments.directory))
    if arguments.json:
        print(json.dumps(fields))
        return 0
    kinds = Counter(fields["layer_types"])
    shown = fields | {"layer_types": ", ".join(f"{count} {kind}" for kind, count in kinds.items())}
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"{name:{width}}  {value}")
    return 0


def topology(c: ModelConfig) -> dict:
    """The eighteen fields that qwen36-fp4's inspect-config and model_layout.json carry, by their names."""
    full = c.full_layers
    interval = full[0] + 1 if full else c.num_hidden_layers + 1
    return {
        "hidden_size": c.hidden_size, "vocab_size": c.vocab_size, "num_hidden_layers": c.num_hidden_layers,
        "layer_types": list(c.layer_types), "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_position_embeddings, "mtp_num_hidden_layers": c.mtp_num_hidden_layers,
        "full_attention_interval": interval, "attention_num_heads": c.num_attention_heads,
        "attention_num_kv_heads": c.num_key_value_heads, "attention_head_dim": c.head_dim,
        "partial_rotary_factor": c.rotary_dim / c.head_dim, "linear_num_key_heads": c.linear_num_key_heads,
        "linear_num_value_heads": c.linear_num_value_heads, "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim, "linear_conv_kernel_dim": c.linear_conv_kernel_dim,
        "rope_theta": c.rope_theta}
