"""The memory budget: the figures that are known from elsewhere, and what the numpy tower really allocates."""
import json

import pytest
import random_checkpoint
from random_checkpoint import RECIPES, Recipe
from test_pack import WIDE
from test_weights import published

from qwentin import nano
from qwentin.__main__ import main
from qwentin.kvpool import PAGE
from qwentin.model.budget import GIB, budget, float32_weights, kv_row_bytes, state_bytes, window_bytes
from qwentin.model.convert import prepare
from qwentin.model.cpu import CpuTower
from qwentin.model.weights import open_checkpoint

# qwen36-fp4's own figures for 27B at 32,768 tokens; its 3 and 3.5 bits leave the quantiser's metadata out
KV_32K = {"bf16": 2_147_483_648, "fp8": 1_073_741_824, "3.5": 469_762_048, "3": 402_653_184}


@pytest.fixture(scope="module")
def config_27b(tmp_path_factory):
    """A directory with nothing but the 27B's config.json."""
    directory = tmp_path_factory.mktemp("27b")
    c = published("27B")
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "linear_conv_kernel_dim", "rms_norm_eps", "max_position_embeddings",
            "mtp_num_hidden_layers")
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_5", **{key: getattr(c, key) for key in keys}}))
    return directory


def shown(arguments, capsys):
    assert main(["budget", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KV_32K)
def test_kv_of_27b_at_32k(kind, config_27b, capsys):
    result = shown([config_27b, "--ctx", 32768, "--kv", kind], capsys)
    assert result["kv_cache_bytes"] == KV_32K[kind]
    assert result["context_tokens"] == 32768 and result["kv_cache_dtype"] == kind


def test_q4_of_27b_is_26880_bytes_a_token():
    assert kv_row_bytes(published("27B"), "q4", 16) == 26_880
    assert kv_row_bytes(published("27B"), "q4", 1) == 1_680


def test_state_of_27b():
    """144 MiB in float32, twice the 75,497,472 bytes of engines that keep bf16; 10240 x 3 bf16 in each of 48 layers."""
    assert state_bytes(published("27B")) == 2 * 75_497_472 == 144 << 20
    assert window_bytes(published("27B"), 2) == 2_949_120


def test_27b_in_fp6_with_the_whole_context_fits_a_32_gb_card(config_27b, capsys):
    result = shown([config_27b, "--ctx", 262144, "--kv", "q4", "--gpu-gib", 31.4], capsys)
    assert result["fits"] and result["largest_context"] == 262144
    assert result["total_bytes"] == sum(result["items"].values())
    weights = sum(size for name, size in result["items"].items() if name.startswith("weights"))
    assert weights / 1e9 == pytest.approx(21.00, abs=0.01)


def test_the_largest_context_is_the_last_that_fits(config_27b, capsys):
    result = shown([config_27b, "--kv", "bf16", "--gpu-gib", 31.4], capsys)
    largest = result["largest_context"]
    assert 32768 < largest < 262144 and largest % PAGE == 0
    assert shown([config_27b, "--kv", "bf16", "--gpu-gib", 31.4, "--ctx", largest], capsys)["fits"]
    assert not shown([config_27b, "--kv", "bf16", "--gpu-gib", 31.4, "--ctx", largest + 1], capsys)["fits"]


def test_nothing_fits_a_small_card(config_27b, capsys):
    result = shown([config_27b, "--gpu-gib", 8], capsys)
    assert not result["fits"] and result["largest_context"] == 0


@pytest.mark.parametrize("name", ["nano", *RECIPES])
@pytest.mark.parametrize("context, slots", [(1, 1), (300, 3)])
def test_prediction_equals_what_the_numpy_tower_allocates(name, context, slots, tmp_path):
    directory = nano.DIRECTORY if name == "nano" else random_checkpoint.write(RECIPES[name], tmp_path)
    with open_checkpoint(directory) as checkpoint:
        weights = float32_weights(checkpoint.config, checkpoint.has_mtp)
        items = budget(checkpoint, weights, context, "f32", GIB, slots).items
        tower = CpuTower(checkpoint, pages=-(-context // PAGE), slots=slots)
    assert items["KV, f32"] + items.get("KV of the MTP head", 0) == tower.kv.nbytes
    assert items["state S"] == tower.S.nbytes and items["convolution window"] == tower.window.nbytes
    assert items["weights"] == tower.weight_bytes()


@pytest.mark.parametrize("weights", ["fp6", "fp4", "fp8", "bf16"])
def test_planned_weights_equal_the_packed_directory(weights, tmp_path, capsys):
    source = random_checkpoint.write(Recipe(31, WIDE), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    prepare(source, tmp_path / "packed", weights).run()
    planned = shown([source, "--weights", weights], capsys)["items"]
    assert planned == shown([tmp_path / "packed"], capsys)["items"]
    planned.pop("weights: wider on the GPU")
    with open_checkpoint(tmp_path / "packed") as done:
        stored = sum(tensor.nbytes for tensor in done.tensors.values())
    assert sum(size for name, size in planned.items() if name.startswith("weights")) == stored


@pytest.mark.parametrize("options, sentence", [
    (["--ctx", "0"], "--ctx is 0; a positive number was wanted"),
    (["--ctx", "9000"], "--ctx is 9000; this model's longest context is 8192"),
    (["--kv", "int3"], "--kv is 'int3'; f32, bf16, fp8, q4 or a number of bits"),
    (["--kv", "33"], "--kv is '33'"),
    (["--gpu-gib", "-1"], "--gpu-gib is -1.0"),
    (["--seqs", "0"], "--seqs is 0"),
])
def test_wrong_values_are_named(options, sentence, capsys):
    assert main(["budget", str(nano.DIRECTORY), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_chip_and_memory_choose_how_prompts_are_read(config_27b, capsys):
    """The whole context in e4m3 leaves 27B in FP6 chunks of 4,096 rows in 32 GB of a Hopper, unpacked matrices in 139."""
    asked = [config_27b, "--ctx", 262144, "--chip", "sm_90a", "--gpu-gib"]
    small, large = (shown([*asked, gib], capsys) for gib in (31.4, 139))
    assert small["prefill"] == "chunks of 4096 rows, e4m3 activations" and small["fits"]
    assert large["prefill"] == small["prefill"] + ", matrices kept unpacked"
    assert small["items"]["prefill"] == 785_048_064 and large["items"]["prefill"] == 26_099_311_104
    tight = shown([*asked, (small["total_bytes"] - 1) / GIB], capsys)
    assert tight["prefill"] == "chunks of 2048 rows, e4m3 activations" and tight["largest_context"] == 262144
    half = shown([*asked, 31.4, "--prefill-format", "f16"], capsys)
    assert half["prefill"] == "chunks of 4096 rows, f16 activations" and half["items"]["prefill"] == 1_071_104_512


def test_the_table_for_people(capsys):
    assert main(["budget", str(nano.DIRECTORY), "--kv", "f32", "--ctx", "1024"]) == 0
    said = capsys.readouterr().out
    assert "fits in 31.4 GiB" in said and "one more token takes 6,144 bytes" in said
