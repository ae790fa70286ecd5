"""What each stored tensor becomes, and that what comes back out is the codec's own rounding of what went in."""
import ml_dtypes
import numpy as np
import pytest
import random_checkpoint
from random_checkpoint import Recipe
from safetensors.numpy import save_file

from qwentin import nano, numerics
from qwentin.errors import CheckpointError
from qwentin.kernels import packed, quantise
from qwentin.kernels.packed import FP6, FP8, NVFP4
from qwentin.model import pack
from qwentin.model.convert import prepare
from qwentin.model.weights import open_checkpoint

WIDE = dict(hidden_size=128, intermediate_size=256, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=32)
UP, TABLE = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


def convert(recipe_or_directory, tmp_path, **options):
    """A checkpoint packed: (the original, the packed one), both open."""
    source = recipe_or_directory
    if isinstance(source, Recipe):
        source = random_checkpoint.write(source, tmp_path / "source")
    tokenizer = tmp_path / "source" / "tokenizer.json"
    if tokenizer.parent.exists():
        tokenizer.write_text("{}")
    prepare(source, tmp_path / "packed", **options).run()
    return open_checkpoint(source), open_checkpoint(tmp_path / "packed")


def law(kind, x):
    """What a matrix should be after packing, by numerics and the numpy law alone."""
    packing = {"fp6": FP6, "fp8": FP8, "nvfp4": NVFP4}[kind.removesuffix("-rows")]
    alpha = quantise.alpha_of(np.abs(x).max()) if packing == NVFP4 else np.float32(1)
    codes, scales = quantise.quantise(packing, x, alpha)
    scale = numerics.E4M3.decode(scales) if packing == NVFP4 else numerics.decode_bf16(scales)
    value = packing.codes.decode(codes) * np.repeat(scale, packing.block, axis=1)
    return value * alpha if packing == NVFP4 else value


@pytest.mark.parametrize("weights", pack.WEIGHTS)
@pytest.mark.parametrize("embedding", pack.EMBEDDINGS)
def test_round_trip_is_the_codecs_rounding(weights, embedding, tmp_path):
    source, packed_one = convert(Recipe(11, WIDE), tmp_path, weights=weights, embedding=embedding)
    kinds = set()
    for name, tensor in packed_one.tensors.items():
        x, kind = source.f32(name), tensor.encoding.name
        kinds.add(kind)
        want = x if kind == "plain" else law(kind, x)
        np.testing.assert_array_equal(packed_one.f32(name), want, err_msg=name)
    wanted = {"plain", "nvfp4" if weights == "fp4" else weights, f"{embedding}-rows"}
    assert kinds == {kind if not kind.startswith("bf16") else "plain" for kind in wanted}


def test_what_is_no_matrix_stays_as_it_is(tmp_path):
    _, done = convert(Recipe(11, WIDE, float32=random_checkpoint.GATED), tmp_path)
    for name, tensor in done.tensors.items():
        steered = name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
        assert (tensor.encoding.name == "plain") == (len(tensor.shape) != 2 or steered), name
    assert done.raw("model.layers.0.linear_attn.A_log")["weight"][1] == "F32"


def test_matrices_that_do_not_tile_are_copied(tmp_path):
    """Hidden size 64: no tile of 128 inputs fits, but the down projection's 128 do."""
    source, done = convert(Recipe(12, dict(intermediate_size=128)), tmp_path)
    kinds = {name: tensor.encoding.name for name, tensor in done.tensors.items()}
    assert kinds[UP] == "plain" and kinds["model.layers.0.mlp.down_proj.weight"] == "fp6"
    np.testing.assert_array_equal(done.f32(UP), source.f32(UP))


def test_fp8_codes_of_the_official_release_are_kept(tmp_path):
    recipe = Recipe(13, WIDE, fp8=True)
    source, done = convert(recipe, tmp_path, weights="fp8", embedding="bf16")
    stored = random_checkpoint.stored(recipe)
    for name, tensor in done.tensors.items():
        if name + "_scale_inv" in stored:
            np.testing.assert_array_equal(done.f32(name), source.f32(name), err_msg=name)
            tiles = done.raw(name)["weight_fp8"]
            codes, _ = packed.unpack(FP8, tiles[0].reshape(tiles[2]), tensor.shape[0])
            np.testing.assert_array_equal(codes, stored[name].view(np.uint8))


@pytest.mark.parametrize("weights", ["fp6", "bf16"])
def test_fp8_is_requantised_from_its_values(weights, tmp_path):
    source, done = convert(Recipe(13, WIDE, fp8=True), tmp_path, weights=weights)
    x = source.f32(UP)
    want = law("fp6", x) if weights == "fp6" else x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(done.f32(UP), want)


@pytest.mark.parametrize("convention", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("weights", pack.WEIGHTS)
def test_nvfp4_is_kept_bit_for_bit(convention, weights, tmp_path):
    directory = random_checkpoint.write(Recipe(14, WIDE), tmp_path / "source")
    arrays = random_checkpoint.load(directory / "model.safetensors")
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (256, 64)).astype(np.uint8)
    scale = (0.5 + rng.random((256, 8))).astype(ml_dtypes.float8_e4m3fn)
    stem, alpha = UP.removesuffix("weight"), np.float32(0.003)
    del arrays[UP]
    if convention == "modelopt":
        arrays |= {UP: codes, stem + "weight_scale": scale, stem + "weight_scale_2": np.array(alpha)}
    else:
        arrays |= {stem + "weight_packed": codes, stem + "weight_scale": scale,
                   stem + "weight_global_scale": np.array([1 / alpha], np.float32)}
    save_file(arrays, directory / "model.safetensors")
    source, done = convert(directory, tmp_path, weights=weights)
    raw = done.raw(UP)
    tiles, kept_scale = packed.unpack(NVFP4, raw["weight_nvfp4"][0].reshape(raw["weight_nvfp4"][2]), 256)
    np.testing.assert_array_equal(tiles, numerics.unpack_bits(codes, 4))
    np.testing.assert_array_equal(kept_scale, scale.view(np.uint8))
    np.testing.assert_allclose(done.f32(UP), source.f32(UP), rtol=2 ** -22)     # 1 / global, rounded once


@pytest.mark.parametrize("part, value, sentence", [
    ("weight_scale", np.nan, r"up_proj.weight in .* holds nan at \[0, 0\]"),
    ("weight_scale_2", np.nan, "weight_scale_2 in .* is nan; a positive number was wanted"),
    ("weight_scale_2", 0, "weight_scale_2 in .* is 0.0; a positive number was wanted")])
def test_a_kept_nvfp4_tensor_is_checked(part, value, sentence, tmp_path):
    directory = random_checkpoint.write(Recipe(14, WIDE), tmp_path / "source")
    arrays = random_checkpoint.load(directory / "model.safetensors")
    stem = UP.removesuffix("weight")
    arrays |= {UP: np.full((256, 64), 0x11, np.uint8), stem + "weight_scale": np.ones((256, 8), ml_dtypes.float8_e4m3fn),
               stem + "weight_scale_2": np.array([1], np.float32)}
    arrays[stem + part].reshape(-1)[0] = value
    save_file(arrays, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        convert(directory, tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.linear_attn.in_proj_a.weight"])
def test_a_copied_tensor_is_checked(name, tmp_path):
    directory = random_checkpoint.write(Recipe(14, WIDE), tmp_path / "source")
    arrays = random_checkpoint.load(directory / "model.safetensors")
    arrays[name].reshape(-1)[5] = -np.inf
    save_file(arrays, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} in .* holds -inf at"):
        convert(directory, tmp_path)


@pytest.mark.parametrize("weights", pack.WEIGHTS)
@pytest.mark.parametrize("name", [UP, TABLE])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_value_is_named_in_every_format(weights, name, value, tmp_path):
    directory = random_checkpoint.write(Recipe(14, WIDE), tmp_path / "source")
    arrays = random_checkpoint.load(directory / "model.safetensors")
    arrays[name][200, 77] = value
    save_file(arrays, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} in .*model.safetensors holds {value} at \[200, 77\]"):
        convert(directory, tmp_path, weights=weights, embedding="bf16" if weights == "bf16" else "fp6")


@pytest.mark.parametrize("poison", ["weight", "weight_scale_inv"])
def test_a_kept_fp8_tensor_is_checked(poison, tmp_path):
    directory = random_checkpoint.write(Recipe(13, WIDE, fp8=True), tmp_path / "source")
    arrays = random_checkpoint.load(directory / "model.safetensors")
    arrays[UP.removesuffix("weight") + poison][1, 0] = np.nan
    save_file(arrays, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="up_proj.weight in .* holds nan at"):
        convert(directory, tmp_path, weights="fp8")


def test_a_tied_head_becomes_a_matrix_of_its_own(tmp_path):
    source, done = convert(Recipe(15, WIDE | dict(tie_word_embeddings=True)), tmp_path)
    assert source.config.tie_word_embeddings and not done.config.tie_word_embeddings
    np.testing.assert_array_equal(done.f32("lm_head.weight"), law("fp6", source.f32(TABLE)))


def test_a_tied_head_stays_tied_in_bf16(tmp_path):
    _, done = convert(Recipe(15, WIDE | dict(tie_word_embeddings=True)), tmp_path, weights="bf16", embedding="bf16")
    assert done.config.tie_word_embeddings and "lm_head.weight" not in done.names()


def test_a_packed_tensor_is_not_packed_again(tmp_path):
    _, done = convert(nano.DIRECTORY, tmp_path)
    with pytest.raises(CheckpointError, match="embed_tokens.weight_rows_fp6 in .* is packed already; convert the original"):
        pack.plan(done)
