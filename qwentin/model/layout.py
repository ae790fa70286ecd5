"""model_layout.json: the inventory of a checkpoint directory in the schema that qwen36-fp4's `discover` writes.

Every tensor of every safetensors file with its role, the geometry, the quantisation, and sums by layer and kind. Unlike
open_checkpoint it takes the directory as it finds it: nothing has to be complete.
"""
from collections import Counter
from pathlib import Path

from ..config import FULL, ModelConfig, read_json
from ..errors import CheckpointError
from .budget import GIB, kv_row_bytes, state_bytes, window_bytes
from .safetensor import Shard

GENERATED_BY = "qwentin"
DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E4M3": "f8_e4_m3", "F8_E5M2": "f8_e5_m2", "U8": "u8", "I8": "i8",
          "I32": "i32", "I64": "i64", "BOOL": "bool"}
CAPITAL = {"bf16": "Bf16", "f16": "F16", "f32": "F32", "f8_e4_m3": "F8E4M3", "f8_e5_m2": "F8E5M2", "u8": "U8", "i8": "I8",
           "i32": "I32", "i64": "I64", "bool": "Bool"}       # as the schema writes dtypes where it counts them
LAYER_MARKS = ("model.language_model.layers.", "model.layers.", "language_model.layers.")
BF16_ROLES = ("bf16_weight", "lm_head_bf16", "mtp_bf16", "conv1d_bf16", "embedding")
SCALE_ROLES = ("nvfp4_block_scale", "nvfp4_tensor_scale", "nvfp4_input_scale", "fp8_scale")


def layout(directory, model_id: str, topology: dict) -> dict:
    """The whole document. Raises ConfigError or CheckpointError."""
    directory = Path(directory)
    config = ModelConfig.from_directory(directory)
    shards = [Shard(path) for path in sorted(directory.glob("*.safetensors"))]
    if not shards:
        raise CheckpointError(f"{directory} holds no *.safetensors file.")
    tensors = sorted((describe(name, entry, shard) for shard in shards for name, entry in shard.entries.items()),
                     key=lambda tensor: tensor["name"])
    return {"model_id": model_id, "generated_by": GENERATED_BY, "topology": topology,
            "quantization": quantisation(read_json(directory / "config.json")),
            "files": [{"path": s.path.name, "size_bytes": s.size, "tensor_count": len(s.entries)} for s in shards],
            "tensors": tensors, "layers": [layer(i, tensors) for i in range(config.num_hidden_layers)],
            "derived": derived(config, tensors)}


def describe(name: str, entry, shard: Shard) -> dict:
    """One tensor's row."""
    return {"name": name, "file": shard.path.name, "dtype": DTYPES.get(entry.dtype, {"unknown": entry.dtype}),
            "shape": list(entry.shape), "size_bytes": entry.stop - entry.start, "role": role(name, entry.dtype),
            "layer_index": layer_index(name)}


def role(name: str, dtype: str) -> str:
    """What a tensor is for, by its name and dtype; the first rule that fits."""
    rules = (
        (name.startswith("mtp."), "mtp_bf16"),
        (name.startswith("lm_head."), "lm_head_bf16"),
        ("linear_attn.conv1d" in name, "conv1d_bf16"),
        ("embed_tokens" in name, "embedding"),
        (name.endswith("weight_scale_2"), "nvfp4_tensor_scale"),
        (name.endswith("input_scale"), "nvfp4_input_scale"),
        (name.endswith("weight_scale"), "nvfp4_block_scale" if dtype in ("F8_E4M3", "U8") else "fp8_scale"),
        (name.endswith(".weight") and dtype == "U8", "nvfp4_packed_weight"),
        (name.endswith(".weight") and dtype == "BF16", "bf16_weight"))
    return next((kind for fits, kind in rules if fits), "other")


def layer_index(name: str) -> int | None:
    """The layer a tensor belongs to; None outside the layers, and for the draft head's own."""
    mark = next((mark for mark in LAYER_MARKS if mark in name), None)
    if mark is None or name.startswith("mtp."):
        return None
    digits = name.split(mark, 1)[1].split(".", 1)[0]
    return int(digits) if digits.isdigit() else None


def quantisation(outer: dict) -> dict:
    """The fields of quantization_config that matter, null where absent."""
    config = outer.get("quantization_config") or {}
    producer = config.get("producer") or {}
    return {"quant_method": config.get("quant_method"), "quant_algo": config.get("quant_algo"),
            "producer_name": producer.get("name"), "producer_version": producer.get("version"),
            "ignored_modules": config.get("ignore") or config.get("modules_to_not_convert") or []}


def layer(i: int, tensors: list[dict]) -> dict:
    """Counts of one layer's tensors by dtype and role."""
    mine = [tensor for tensor in tensors if tensor["layer_index"] == i]
    dtypes = Counter(CAPITAL[t["dtype"]] if isinstance(t["dtype"], str) else t["dtype"]["unknown"] for t in mine)
    roles = Counter("".join(word.capitalize() for word in t["role"].split("_")) for t in mine)
    return {"layer_index": i, "tensor_count": len(mine), "dtype_counts": dict(dtypes), "role_counts": dict(roles)}


def derived(config: ModelConfig, tensors: list[dict]) -> dict:
    """Sums, and what looks wrong."""
    size = Counter()
    for tensor in tensors:
        size[tensor["role"]] += tensor["size_bytes"]
    full = [i for i, kind in enumerate(config.layer_types) if kind == FULL]
    warnings = []
    if config.mtp_num_hidden_layers and not any(t["name"].startswith("mtp.") for t in tensors):
        warnings.append("config.json declares an MTP head but there is no mtp.* tensor")
    if not any("linear_attn.conv1d" in t["name"] for t in tensors):
        warnings.append("there is no linear_attn.conv1d tensor")
    return {"attention_layers": full, "linear_attention_layers": list(config.linear_layers),
            "turboquant_skip_layers": [full[0], full[-1]] if full else [], "tensor_count": len(tensors),
            "total_safetensor_bytes": sum(size.values()), "nvfp4_weight_bytes": size["nvfp4_packed_weight"],
            "bf16_weight_bytes": sum(size[kind] for kind in BF16_ROLES),
            "fp8_scale_bytes": sum(size[kind] for kind in SCALE_ROLES),
            "ctx_32k_fp8_budget": {
                "context_tokens": 32768, "kv_cache_dtype": "fp8",
                "kv_cache_bytes": 32768 * kv_row_bytes(config, "fp8", len(full)),
                "deltanet_state_bytes": state_bytes(config), "deltanet_conv_history_bytes": window_bytes(config, 2),
                "estimated_activation_workspace_bytes": GIB},
            "warnings": warnings}
