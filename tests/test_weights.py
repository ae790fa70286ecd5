"""Checkpoints of every layout open and decode exactly; each kind of damage gets one sentence naming tensor and file."""
import json
import logging
import math

import ml_dtypes
import numpy as np
import pytest
import random_checkpoint
from random_checkpoint import RECIPES, Recipe
from safetensors.numpy import save_file

from qwentin import nano
from qwentin.config import ModelConfig
from qwentin.errors import CheckpointError, QwentinError
from qwentin.model import names
from qwentin.model.weights import SLICE_BYTES, open_checkpoint

# the published dense sizes: D, F, layers, H, G, Nv, tied, parameters of the text model, of the MTP head
SIZES = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, True, 752_393_024, 20_452_864),
    "2B": (2048, 6144, 24, 8, 2, 16, True, 1_881_825_088, 60_828_160),
    "4B": (2560, 9216, 32, 16, 4, 32, True, 4_205_751_296, 120_599_552),
    "9B": (4096, 12288, 32, 16, 4, 32, False, 8_953_803_264, 243_290_624),
    "27B": (5120, 17408, 64, 24, 4, 48, False, 26_895_998_464, 424_699_392),
}


def published(size):
    d, f, layers, heads, kv, values, tied, *_ = SIZES[size]
    return ModelConfig.from_dict(dict(
        model_type="qwen3_5", vocab_size=248320, hidden_size=d, intermediate_size=f, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=values, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6, max_position_embeddings=262144, tie_word_embeddings=tied, mtp_num_hidden_layers=1))


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_of_the_published_sizes(size):
    shapes = names.expected(published(size))
    head = {name for name in shapes if names.is_mtp(name)}
    assert len(head) == 15
    assert sum(math.prod(shapes[name]) for name in head) == SIZES[size][-1]
    assert sum(math.prod(shape) for name, shape in shapes.items() if name not in head) == SIZES[size][-2]


def test_nano_has_exactly_the_expected_tensors():
    stored = random_checkpoint.load(nano.DIRECTORY / "model.safetensors")
    shapes = {name: array.shape for name, array in stored.items()}
    assert names.expected(ModelConfig.from_directory(nano.DIRECTORY)) == shapes


@pytest.mark.parametrize("name", RECIPES)
def test_every_layout_decodes_exactly(name, tmp_path):
    recipe = RECIPES[name]
    random_checkpoint.write(recipe, tmp_path)
    stored = random_checkpoint.stored(recipe)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config == ModelConfig.from_directory(tmp_path)
        assert checkpoint.names() == list(names.expected(recipe.config))
        assert checkpoint.has_mtp == bool(recipe.config.mtp_num_hidden_layers)
        for tensor in checkpoint.names():
            want = stored[tensor].astype(np.float64)
            if tensor + "_scale_inv" in stored:
                scale = stored[tensor + "_scale_inv"].astype(np.float64)
                n, k = want.shape
                want = want * np.repeat(np.repeat(scale, 128, 0)[:n], 128, 1)[:, :k]
            got = checkpoint.f32(tensor)
            assert got.dtype == np.float32 and got.flags.c_contiguous and np.array_equal(got, want), tensor


def test_fp8_is_decided_by_the_presence_of_a_scale(tmp_path):
    random_checkpoint.write(RECIPES["fp8"], tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        kinds = {name: tensor.encoding.name for name, tensor in checkpoint.tensors.items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "fp8-block"
    assert kinds["mtp.fc.weight"] == kinds["model.layers.0.linear_attn.in_proj_a.weight"] == "plain"
    assert sum(kind == "fp8-block" for kind in kinds.values()) == 3 * 6 + 7 + 7


def test_raw_gives_the_stored_bytes(tmp_path):
    random_checkpoint.write(RECIPES["fp8"], tmp_path)
    name = "model.layers.3.self_attn.o_proj.weight"
    stored = random_checkpoint.stored(RECIPES["fp8"])
    with open_checkpoint(tmp_path) as checkpoint:
        parts = checkpoint.raw(name)
        assert set(parts) == {"weight", "weight_scale_inv"}
        for part, (data, dtype, shape) in parts.items():
            want = stored[name.removesuffix("weight") + part]
            assert data.tobytes() == want.tobytes() and shape == want.shape
            assert dtype == ("F8_E4M3" if part == "weight" else "BF16")
        del data, parts


def test_slices_cover_a_large_tensor_in_aligned_pieces():
    with open_checkpoint(nano.DIRECTORY) as checkpoint:
        tensor = checkpoint.tensors["model.embed_tokens.weight"]
    cut = list(tensor.slices())
    assert cut[0][0] == 0 and cut[-1][1] == 4096
    big = type(tensor)("x", (248320, 5120), tensor.encoding, tensor.parts)
    cut = list(big.slices())
    assert [start for start, _ in cut[1:]] == [stop for _, stop in cut[:-1]] and cut[-1][1] == 248320
    assert all(start % 128 == 0 and (stop - start) * 5120 * 4 <= SLICE_BYTES for start, stop in cut)


def test_maps_and_files_are_closed(tmp_path):
    random_checkpoint.write(RECIPES["sharded"], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert all(shard._map is None for shard in checkpoint.shards), "opening reads headers only"
    checkpoint.f32("model.norm.weight")
    assert any(shard._map for shard in checkpoint.shards)
    checkpoint.close()
    assert all(shard._map is None for shard in checkpoint.shards)


def test_both_nvfp4_conventions_decode(tmp_path):
    rng = np.random.RandomState(7)
    random_checkpoint.write(RECIPES["plain"], tmp_path)
    arrays = random_checkpoint.load(tmp_path / "model.safetensors")
    gate, up = (f"model.layers.0.mlp.{kind}_proj." for kind in ("gate", "up"))
    codes = rng.randint(0, 256, (96, 32)).astype(np.uint8)
    scale = (0.5 + rng.rand(96, 4)).astype(ml_dtypes.float8_e4m3fn)
    for stem, kind in ((gate, "packed"), (up, "plain")):
        del arrays[stem + "weight"]
        arrays[stem + ("weight_packed" if kind == "packed" else "weight")] = codes
        arrays[stem + "weight_scale"] = scale
    arrays[gate + "weight_global_scale"] = np.array([512], np.float32)          # divided by
    arrays[up + "weight_scale_2"] = np.array(1 / 512, np.float32)              # multiplied with
    arrays[up + "input_scale"] = np.array(1, np.float32)                       # of the activations: not used
    save_file(arrays, tmp_path / "model.safetensors")
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(96, 64)
    want = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    want = want * np.repeat(scale.astype(np.float64), 16, 1) / 512
    with open_checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.f32(gate + "weight"), want)
        assert np.array_equal(checkpoint.f32(up + "weight"), want)


# ---- damage ---------------------------------------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj.weight"
LONG_UP = "model.language_model.layers.0.mlp.up_proj.weight"


def change(directory, edit, file="model.safetensors"):
    """Apply `edit` to the arrays of a file."""
    arrays = random_checkpoint.load(directory / file)
    edit(arrays)
    save_file(arrays, directory / file)


def drop(d, name=UP):
    change(d, lambda a: a.pop(name))


def poison(d, value):
    def edit(arrays):
        arrays[UP][3, 5] = value
    change(d, edit)


def truncate(d, keep):
    path = d / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


def edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def lose_scale(d):
    change(d, lambda a: a.pop(LONG_UP + "_scale_inv"), "layers-0.safetensors")
    edit_json(d / "model.safetensors.index.json", lambda index: index["weight_map"].pop(LONG_UP + "_scale_inv"))


def wrong_scale(d):
    def edit(arrays):
        arrays[LONG_UP + "_scale_inv"] = arrays[LONG_UP + "_scale_inv"][:1]
    change(d, edit, "layers-0.safetensors")


def poison_fp8(d):
    def edit(arrays):
        arrays[LONG_UP][130, 2] = np.nan
    change(d, edit, "layers-0.safetensors")


def with_offsets(d):
    """Let a tensor's offsets overlap its neighbour's: one byte of the header is changed."""
    path = d / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header[UP]["data_offsets"][1] += 2
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:])


DAMAGE = {
    # kind: (recipe, what is done to the directory, what the sentence says beside the tensor and the file)
    "missing tensor": ("plain", drop, f"{UP} is missing: .*model.safetensors does not hold it"),
    "missing MTP tensor": ("plain", lambda d: drop(d, "mtp.fc.weight"), "mtp.fc.weight is missing: .*model.safeten"),
    "extra tensor": ("plain", lambda d: change(d, lambda a: a.update({"model.layers.9.x": np.zeros(3, np.float32)})),
                     "model.layers.9.x in .*model.safetensors is not part of the model"),
    "wrong shape": ("plain", lambda d: change(d, lambda a: a.update({UP: a[UP][:95]})),
                    rf"{UP} in .*model.safetensors has shape \[95, 64\]; \[96, 64\] was wanted"),
    "wrong dtype": ("plain", lambda d: change(d, lambda a: a.update({UP: a[UP].astype(np.int8)})),
                    f"{UP} in .*model.safetensors has dtype I8; BF16 or F16 or F32 was wanted"),
    "FP8 without its scale": ("fp8", lose_scale, "up_proj.weight in .*layers-0.safetensors is F8_E4M3 but has no sca"),
    "scale of another shape": ("fp8", wrong_scale, r"weight_scale_inv in .*layers-0.safetensors has shape \[1, 2\]; "
                                                   r"\[2, 2\] was wanted"),
    "two names, one tensor": ("plain", lambda d: change(d, lambda a: a.update(
        {"model.language_model.norm.weight": a["model.norm.weight"]})), "is the same tensor as model.*norm.weight in"),
    "truncated data": ("plain", lambda d: truncate(d, 100_000), r"model.safetensors is truncated: tensor \S+ ends at"),
    "truncated header": ("plain", lambda d: truncate(d, 500), "model.safetensors is truncated .* header claims"),
    "empty file": ("plain", lambda d: truncate(d, 0), "model.safetensors is truncated: 0 bytes"),
    "no safetensors": ("plain", lambda d: (d / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0hello"),
                       "model.safetensors is no safetensors file"),
    "bytes after the end": ("plain", lambda d: (d / "model.safetensors").open("ab").write(b"x"),
                            "model.safetensors has 1 bytes after its last tensor"),
    "overlapping tensors": ("plain", with_offsets, f"{UP} in .*model.safetensors has offsets that do not fit"),
    "no file at all": ("plain", lambda d: (d / "model.safetensors").unlink(), r"holds no \*.safetensors file"),
    "missing shard": ("sharded", lambda d: (d / "model-00002-of-00003.safetensors").unlink(),
                      r"tensor \S+ should be in .*model-00002-of-00003.safetensors.* but that file is missing"),
    "tensor not in its shard": ("sharded", lambda d: edit_json(
        d / "model.safetensors.index.json", lambda index: index["weight_map"].update(
            {"model.language_model.norm.weight": random_checkpoint.place("model.norm.weighu", RECIPES["sharded"])})),
        "model.language_model.norm.weight should be in .*safetensors, says .*, but is not in it"),
    "index without a map": ("sharded", lambda d: (d / "model.safetensors.index.json").write_text("{}"),
                            "model.safetensors.index.json has no weight_map"),
    "index that forgets": ("sharded", lambda d: edit_json(
        d / "model.safetensors.index.json", lambda index: index["weight_map"].pop("lm_head.weight")),
        "lm_head.weight is missing: .*model.safetensors.index.json does not hold it"),
    "unknown quantisation": ("plain", lambda d: edit_json(
        d / "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq"})),
        "config.json: quant_method is 'gptq'; fp8, compressed-tensors, modelopt"),
    "another FP8 block": ("fp8", lambda d: edit_json(
        d / "config.json", lambda c: c["quantization_config"].update(weight_block_size=[64, 64])),
        r"weight_block_size is \[64, 64\]; \[128, 128\]"),
    "no config": ("plain", lambda d: (d / "config.json").unlink(), "config.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_before_data_is_read(kind, tmp_path):
    recipe, spoil, sentence = DAMAGE[kind]
    random_checkpoint.write(RECIPES[recipe], tmp_path)
    spoil(tmp_path)
    with pytest.raises(QwentinError, match=sentence) as caught:
        open_checkpoint(tmp_path)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and str(tmp_path) in text


@pytest.mark.parametrize("kind, value", [("nan", np.nan), ("inf", -np.inf)])
def test_not_a_number_is_named_with_its_place(kind, value, tmp_path):
    random_checkpoint.write(RECIPES["plain"], tmp_path)
    poison(tmp_path, value)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.f32("model.layers.0.mlp.gate_proj.weight")
        with pytest.raises(CheckpointError, match=rf"{UP} in .*model.safetensors holds -?{kind} at \[3, 5\]"):
            checkpoint.f32(UP)


def test_not_a_number_in_fp8_is_named_with_its_place(tmp_path):
    random_checkpoint.write(RECIPES["fp8"], tmp_path)
    poison_fp8(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match=r"up_proj.weight in .*layers-0.safetensors holds nan at \[130, 2\]"):
            checkpoint.f32(UP)


def test_an_absent_mtp_head_is_served_without_and_said(tmp_path, caplog):
    random_checkpoint.write(RECIPES["plain"], tmp_path)
    change(tmp_path, lambda a: [a.pop(name) for name in list(a) if name.startswith("mtp.")])
    with caplog.at_level(logging.WARNING), open_checkpoint(tmp_path) as checkpoint:
        assert not checkpoint.has_mtp and not any(map(names.is_mtp, checkpoint.names()))
    assert "no mtp.* tensor" in caplog.text


@pytest.mark.parametrize("recipe, added, said", [
    (Recipe(8, dict(tie_word_embeddings=True)), "lm_head.weight", "config.json ties the head"),
    (Recipe(9, dict(mtp_num_hidden_layers=0)), "mtp.fc.weight", "mtp_num_hidden_layers 0"),
])
def test_tensors_without_a_use_are_ignored_and_said(recipe, added, said, tmp_path, caplog):
    random_checkpoint.write(recipe, tmp_path)
    change(tmp_path, lambda a: a.update({added: np.zeros((256, 64), np.float32)}))
    with caplog.at_level(logging.WARNING), open_checkpoint(tmp_path) as checkpoint:
        assert added not in checkpoint.names()
    assert said in caplog.text
