"""Check an EAGLE-3 drafter directory against the target it was trained for: config.json, then every tensor.

One decoder layer that reads [embedding ; fc(hidden states of some target layers)] and a head over a vocabulary of its
own, mapped to the target's by d2t: target id = draft id + d2t[draft id]. (EAGLE-3, arXiv 2503.01840.)
"""
import math
from pathlib import Path

import numpy as np

from ..config import read_json
from ..errors import CheckpointError, ConfigError
from .encodings import Part
from .weights import read_headers

ARCHITECTURE = "LlamaForCausalLMEagle3"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "draft_vocab_size", "max_position_embeddings")


def validate(directory) -> dict:
    """What was found, as JSON. Raises ConfigError for config.json, CheckpointError for a tensor: one sentence."""
    directory = Path(directory)
    config = read_json(directory / "config.json")
    where = directory / "config.json"
    check_config(config, where)
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    _, stored = read_headers(directory)
    shapes = tensor_shapes(config, len(layers))
    for name, (dtype, shape) in shapes.items():
        if name not in stored:
            raise CheckpointError(f"tensor {name} is missing: {directory} does not hold it.")
        stored[name].demand((dtype,), shape)
    targets = check_map(stored["d2t"], config) if "d2t" in shapes else config["vocab_size"]
    return report(directory, config, layers, shapes, targets)


def check_config(config: dict, where: Path) -> None:
    """Architecture, sizes and their divisibility."""
    if ARCHITECTURE not in config.get("architectures", []):
        raise ConfigError(f"{where}: architectures is {config.get('architectures')}; {ARCHITECTURE} was wanted.")
    for key in SIZES:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ConfigError(f"{where}: {key} is {config.get(key)!r}; a positive integer was wanted.")
    if config.get("num_hidden_layers") != 1:
        raise ConfigError(f"{where}: num_hidden_layers is {config.get('num_hidden_layers')!r}; 1 was wanted.")
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ConfigError(f"{where}: num_attention_heads {config['num_attention_heads']} is not a multiple of "
                          f"num_key_value_heads {config['num_key_value_heads']}.")
    if config["draft_vocab_size"] > config["vocab_size"]:
        raise ConfigError(f"{where}: draft_vocab_size {config['draft_vocab_size']} is larger than vocab_size "
                          f"{config['vocab_size']}.")
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or not layers or not all(isinstance(i, int) and i >= 0 for i in layers):
        raise ConfigError(f"{where}: eagle_config.eagle_aux_hidden_state_layer_ids is {layers!r}; a list of target layers "
                          "was wanted.")


def tensor_shapes(config: dict, taps: int) -> dict:
    """Name -> dtype and shape of the 13 tensors, 14 with a vocabulary of its own."""
    d, f, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    layer = {"hidden_norm": (d,), "input_layernorm": (d,), "post_attention_layernorm": (d,),
             "self_attn.q_proj": (q, 2 * d), "self_attn.k_proj": (kv, 2 * d), "self_attn.v_proj": (kv, 2 * d),
             "self_attn.o_proj": (d, q), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    shapes = {f"layers.0.{name}.weight": ("BF16", shape) for name, shape in layer.items()}
    shapes |= {"fc.weight": ("BF16", (d, taps * d)), "norm.weight": ("BF16", (d,)),
               "lm_head.weight": ("BF16", (config["draft_vocab_size"], d))}
    if config["draft_vocab_size"] != config["vocab_size"]:
        shapes["d2t"] = ("I64", (config["draft_vocab_size"],))
    return shapes


def check_map(d2t: Part, config: dict) -> int:
    """How many target ids the map reaches; CheckpointError where it leaves the target's vocabulary."""
    offsets = d2t.shard.data(d2t.key).view(np.int64)
    targets = np.arange(len(offsets)) + offsets
    out = np.flatnonzero((targets < 0) | (targets >= config["vocab_size"]))
    if len(out):
        raise d2t.fault(f"maps draft id {out[0]} to {targets[out[0]]}; ids from 0 to {config['vocab_size'] - 1} exist")
    return len(np.unique(targets))


def report(directory: Path, config: dict, layers: list, shapes: dict, targets: int) -> dict:
    """The fields that qwen36-fp4's validate-eagle3-drafter prints, by their names."""
    keys = (*SIZES[:2], "num_hidden_layers", *SIZES[2:7])
    fc = shapes["fc.weight"][1]
    return {"drafter_dir": str(directory), "architectures": config["architectures"], **{key: config[key] for key in keys},
            "compressed_vocab": "d2t" in shapes, "d2t_entries": config["draft_vocab_size"] if "d2t" in shapes else 0,
            "target_token_entries": targets, "target_layer_ids": layers, "fc_shape": list(fc), "fc_in_features": fc[1],
            "attention_in_features": 2 * config["hidden_size"], "lm_head_shape": list(shapes["lm_head.weight"][1]),
            "tensors_validated": len(shapes), "rope_theta": config.get("rope_theta"),
            "rope_scaling": config.get("rope_scaling"),
            "parameters": sum(math.prod(shape) for dtype, shape in shapes.values() if dtype == "BF16")}
