"""Small random checkpoints from a seed, one recipe for each layout that published checkpoints come in.

The files are written by the safetensors package and rounded by ml_dtypes: nothing of the code under test takes part,
but for the table of tensor names and shapes.
"""
import json
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from qwentin.config import ModelConfig
from qwentin.model import names

GEOMETRY = dict(
    model_type="qwen3_5_text", vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    full_attention_interval=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4, rms_norm_eps=1e-6, max_position_embeddings=512, mtp_num_hidden_layers=1,
    tie_word_embeddings=False, eos_token_id=255,
    rope_parameters={"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25})
GATED = ("linear_attn.A_log", "linear_attn.norm.weight")                # F32 in the 3.5 releases, BF16 since 3.6
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
UNQUANTISED = ("embed_tokens", "lm_head", "norm", "conv1d", "A_log", "dt_bias", "in_proj_a", "in_proj_b", "mtp.fc")


@dataclass(frozen=True)
class Recipe:
    """A layout: what differs from a single BF16 file with text-only names."""
    seed: int
    change: dict = field(default_factory=dict)                          # of GEOMETRY
    prefix: str = "model."                                              # in place of "model."
    nested: bool = False                                                # the text keys under text_config
    vision: bool = False                                                # with tensors of a vision tower
    shards: str = "one"                                                 # "one", "three" or "layers"
    float32: tuple = ()                                                 # suffixes stored as F32
    fp8: bool = False                                                   # the matrices as F8_E4M3 with block scales

    @property
    def geometry(self) -> dict:
        return GEOMETRY | self.change

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.geometry)


RECIPES = {
    "plain": Recipe(1),
    "sharded": Recipe(2, dict(linear_num_value_heads=6, num_attention_heads=6, num_key_value_heads=1),
                      prefix="model.language_model.", nested=True, vision=True, shards="three"),
    "tied": Recipe(3, dict(tie_word_embeddings=True, full_attention_interval=2, linear_num_key_heads=4,
                           mtp_num_hidden_layers=0, linear_conv_kernel_dim=3)),
    "fp8": Recipe(4, dict(hidden_size=160, intermediate_size=200, linear_num_value_heads=6, head_dim=64),
                  prefix="model.language_model.", nested=True, shards="layers", fp8=True),
    "float32": Recipe(5, dict(num_hidden_layers=3, layer_types=["full_attention", "linear_attention",
                                                                "linear_attention"],
                              linear_num_key_heads=1, linear_num_value_heads=5, linear_key_head_dim=24,
                              linear_value_head_dim=16, num_key_value_heads=4), float32=GATED),
}


def draw(name: str, shape: tuple, rng: np.random.RandomState) -> np.ndarray:
    """f32 values of a size that keeps activations near one and every gate in its curved part."""
    x = rng.standard_normal(shape)
    if name.endswith("A_log"):
        x = rng.uniform(-2, 1, shape)
    elif name.endswith("linear_attn.norm.weight"):
        x = 0.9 + 0.2 * x
    elif "norm" in name:
        x = 0.2 * x
    elif name.endswith("conv1d.weight"):
        x = 0.6 * x
    elif name.endswith("embed_tokens.weight"):
        x = x
    elif len(shape) == 2:
        x = 1.5 * x / np.sqrt(shape[1])
    return x.astype(np.float32)


def blocks(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 [N, K] -> e4m3 codes [N, K] and bf16 scales [ceil(N/128), ceil(K/128)], as the official release has them."""
    n, k = (-(-size // 128) for size in w.shape)
    scale = np.empty((n, k), ml_dtypes.bfloat16)
    codes = np.empty(w.shape, ml_dtypes.float8_e4m3fn)
    for i in range(n):
        for j in range(k):
            at = np.s_[i * 128:(i + 1) * 128, j * 128:(j + 1) * 128]
            scale[i, j] = np.abs(w[at]).max() / 440
            codes[at] = (w[at] / np.float32(scale[i, j])).astype(codes.dtype)
    return codes, scale


def stored(recipe: Recipe) -> dict[str, np.ndarray]:
    """Canonical names -> arrays as they go into the files, FP8 scales included. RandomState: its stream is frozen."""
    rng = np.random.RandomState(recipe.seed)
    out = {}
    for name, shape in names.expected(recipe.config).items():
        x = draw(name, shape, rng)
        if recipe.fp8 and not any(word in name for word in UNQUANTISED):
            out[name], out[name + "_scale_inv"] = blocks(x)
        else:
            out[name] = x if name.endswith(recipe.float32 or "-") else x.astype(ml_dtypes.bfloat16)
    return out


def place(name: str, recipe: Recipe) -> str:
    """The file that a tensor goes to."""
    if recipe.shards == "three":
        return f"model-{sum(name.encode()) % 3 + 1:05d}-of-00003.safetensors"
    if recipe.shards == "layers":
        parts = name.split(".")
        outside = "mtp" if parts[0] == "mtp" else "outside"
        return f"layers-{parts[2]}.safetensors" if name.startswith("model.layers.") else f"{outside}.safetensors"
    return "model.safetensors"


def write(recipe: Recipe, directory) -> Path:
    """Write the recipe's checkpoint into `directory`, made if need be."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = stored(recipe)
    if recipe.vision:
        arrays["model.visual.blocks.0.norm1.weight"] = np.zeros(8, ml_dtypes.bfloat16)
    files, index = {}, {}
    for name, array in arrays.items():
        file = place(name, recipe)
        text = name.startswith("model.") and not name.startswith("model.visual.")
        name = recipe.prefix + name.removeprefix("model.") if text else name
        files.setdefault(file, {})[name] = array
        index[name] = file
    for file, content in files.items():
        save_file(content, directory / file)
    if len(files) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    write_config(recipe, directory)
    return directory


def load(path) -> dict[str, np.ndarray]:
    """A file's arrays, to be changed and saved again. (The safetensors package writes FP8 for numpy but reads none.)"""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: np.frombuffer(bytearray(data[start + e["data_offsets"][0]:start + e["data_offsets"][1]]),
                                DTYPES[e["dtype"]]).reshape(e["shape"]) for name, e in header.items()}


def write_config(recipe: Recipe, directory: Path) -> None:
    config = dict(recipe.geometry)
    if recipe.nested:
        config = {"model_type": "qwen3_5", "tie_word_embeddings": config["tie_word_embeddings"], "text_config": config}
    if recipe.fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
