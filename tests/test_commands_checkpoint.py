"""inspect, inspect-config, validate-weights, discover, tokenize: what they print and what they refuse."""
import hashlib
import io
import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
import random_checkpoint
from random_checkpoint import RECIPES, Recipe
from safetensors.numpy import save_file
from test_pack import UP, WIDE
from test_weights import change, drop, poison

from qwentin import nano
from qwentin.__main__ import main
from qwentin.model.convert import prepare

NANO = str(nano.DIRECTORY)


def printed(arguments, capsys, code=0):
    assert main([str(a) for a in arguments]) == code
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("packed") / "nano-fp6"
    prepare(nano.DIRECTORY, directory).run()
    return directory


@pytest.mark.parametrize("command, wrong, near", [
    (["convert", "a", "b"], "--wieghts=fp6", "--weights"), (["inspect", "a"], "--jsn", "--json"),
    (["inspect-config", "a"], "--jsom", "--json"), (["budget", "a"], "--gpu-gb=3", "--gpu-gib"),
    (["tokenize"], "--txt=hello", "--text"), (["validate-weights", "a"], "--dat", "--data"),
    (["discover", "a"], "--outputs=x", "--output"), (["validate-eagle3-drafter", "a"], "--jason", "--json")])
def test_a_wrong_option_is_refused_with_the_near_miss(command, wrong, near, capsys):
    with pytest.raises(SystemExit) as done:
        main([*command, wrong])
    assert done.value.code == 2
    assert f"did you mean {near}?" in capsys.readouterr().err


# ---- inspect

def test_inspect_the_original(capsys):
    facts = json.loads(printed(["inspect", NANO, "--json"], capsys))
    assert facts["packed_version"] is None and facts["source_sha256"] is None
    assert facts["tensors"] == 124 and facts["has_mtp"] and facts["layers"] == 8
    assert facts["parameters"] + facts["mtp_parameters"] == pytest.approx(15.9e6, rel=0.005)
    assert facts["formats"] == {"bf16": {"tensors": 118, "bytes": facts["bytes"] - 144}, "f32": {"tensors": 6, "bytes": 144}}
    assert sum(facts["parts"].values()) == facts["bytes"]


def test_inspect_a_packed_directory(packed, capsys):
    facts = json.loads(printed(["inspect", packed, "--json", "--digests"], capsys))
    assert facts["packed_version"] == "2" and facts["formats"]["fp6"]["tensors"] == 59
    (name, digest), = facts["file_sha256"].items()
    assert digest == hashlib.sha256((packed / name).read_bytes()).hexdigest()
    arrays = random_checkpoint.load(nano.DIRECTORY / "model.safetensors")
    lines = "".join(f"{hashlib.sha256(a.tobytes()).hexdigest()}  {n}\n" for n, a in sorted(arrays.items()))
    assert facts["source_sha256"] == hashlib.sha256(lines.encode()).hexdigest()


def test_inspect_draws_bars(packed, capsys):
    said = printed(["inspect", packed], capsys)
    assert "packed by qwentin, version 2" in said and "MTP head: 2.0 M parameters" in said
    lines = [line for line in said.splitlines() if line.endswith("#")]
    assert max(line.count("#") for line in lines) == 40 and any(line.startswith("fp6 (59)") for line in lines)


def test_inspect_says_loudly_that_there_is_no_head(tmp_path, capsys):
    random_checkpoint.write(RECIPES["tied"], tmp_path)
    assert "NONE: this model will not draft" in printed(["inspect", tmp_path], capsys)


# ---- inspect-config

def test_inspect_config(capsys):
    fields = json.loads(printed(["inspect-config", NANO, "--json"], capsys))
    assert len(fields) == 18
    assert fields["attention_head_dim"] == 256 and fields["partial_rotary_factor"] == 0.25
    assert fields["full_attention_interval"] == 4 and fields["layer_types"].count("full_attention") == 2
    assert "6 linear_attention, 2 full_attention" in printed(["inspect-config", NANO], capsys)


def test_inspect_config_needs_a_config(tmp_path, capsys):
    assert main(["inspect-config", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err


# ---- validate-weights

@pytest.mark.parametrize("data", [[], ["--data"]])
def test_a_whole_checkpoint_is_valid(data, packed, capsys):
    for directory in (NANO, packed):
        result = json.loads(printed(["validate-weights", directory, "--json", *data], capsys))
        assert result["valid"] and result["tensors"] == 124 and result["problems"] == []
    assert "124 tensors (bf16, f32): names, shapes" in printed(["validate-weights", NANO, *data], capsys)


def test_every_fault_is_listed(tmp_path, capsys):
    random_checkpoint.write(RECIPES["plain"], tmp_path)
    drop(tmp_path)
    drop(tmp_path, "mtp.norm.weight")
    change(tmp_path, lambda a: a.update({"model.norm.weight": np.zeros(3, ml_dtypes.bfloat16),
                                         "odd": np.zeros(1, np.float32)}))
    result = json.loads(printed(["validate-weights", tmp_path, "--json"], capsys, code=1))
    assert not result["valid"] and len(result["problems"]) == 4
    for word in (UP, "mtp.norm.weight is missing", "model.norm.weight", "odd in"):
        assert any(word in sentence for sentence in result["problems"]), word
    assert "68 tensors (bf16): 4 problems" in printed(["validate-weights", tmp_path], capsys, code=1)


def test_a_bad_value_is_found_only_by_reading(tmp_path, capsys):
    random_checkpoint.write(RECIPES["plain"], tmp_path)
    poison(tmp_path, np.nan)
    assert json.loads(printed(["validate-weights", tmp_path, "--json"], capsys))["valid"]
    result = json.loads(printed(["validate-weights", tmp_path, "--json", "--data"], capsys, code=1))
    assert len(result["problems"]) == 1 and "holds nan at [3, 5]" in result["problems"][0]


def test_an_unreadable_file_is_a_fault_of_the_weights(tmp_path, capsys):
    random_checkpoint.write(RECIPES["plain"], tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    assert "is truncated" in printed(["validate-weights", tmp_path], capsys, code=1)


# ---- discover

def test_discover_writes_the_inventory(tmp_path, capsys):
    directory = random_checkpoint.write(Recipe(41, WIDE, prefix="model.language_model.", nested=True, vision=True,
                                               shards="three"), tmp_path / "m")
    said = printed(["discover", directory, "--output", tmp_path / "layout.json", "--model-id", "someone/m"], capsys)
    document = json.loads((tmp_path / "layout.json").read_text())
    assert "3 files" in said and document["model_id"] == "someone/m"
    assert [file["path"] for file in document["files"]] == sorted(p.name for p in directory.glob("*.safetensors"))
    assert all(file["size_bytes"] == (directory / file["path"]).stat().st_size for file in document["files"])
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert list(tensors) == sorted(tensors) and len(tensors) == document["derived"]["tensor_count"] == 72
    conv = tensors["model.language_model.layers.2.linear_attn.conv1d.weight"]
    assert conv["role"] == "conv1d_bf16" and conv["layer_index"] == 2 and conv["dtype"] == "bf16"
    assert tensors["mtp.layers.0.mlp.up_proj.weight"]["layer_index"] is None
    assert tensors["mtp.fc.weight"]["role"] == "mtp_bf16" and tensors["lm_head.weight"]["role"] == "lm_head_bf16"
    assert document["layers"][3] == {"layer_index": 3, "tensor_count": 11, "dtype_counts": {"Bf16": 11},
                                     "role_counts": {"Bf16Weight": 11}}
    assert document["derived"]["attention_layers"] == [3] and document["derived"]["turboquant_skip_layers"] == [3, 3]
    assert document["derived"]["warnings"] == [] and document["quantization"]["quant_method"] is None


def test_discover_knows_the_roles_of_nvfp4(tmp_path, capsys):
    directory = random_checkpoint.write(Recipe(42, WIDE), tmp_path)
    stem = UP.removesuffix("weight")

    def edit(arrays):
        arrays |= {UP: np.zeros((256, 64), np.uint8), stem + "weight_scale": np.ones((256, 8), ml_dtypes.float8_e4m3fn),
                   stem + "weight_scale_2": np.array(1, np.float32), stem + "input_scale": np.array(1, np.float32)}
        for name in [name for name in arrays if name.startswith("mtp.") or "conv1d" in name]:
            del arrays[name]
    change(directory, edit)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4",
                                     "producer": {"name": "modelopt", "version": "0.33"}, "ignore": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    document = json.loads(printed(["discover", directory, "--json"], capsys))
    roles = {tensor["name"]: tensor["role"] for tensor in document["tensors"]}
    assert [roles[stem + part] for part in ("weight", "weight_scale", "weight_scale_2", "input_scale")] == \
        ["nvfp4_packed_weight", "nvfp4_block_scale", "nvfp4_tensor_scale", "nvfp4_input_scale"]
    assert document["quantization"] == {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer_name": "modelopt",
                                        "producer_version": "0.33", "ignored_modules": ["lm_head"]}
    derived = document["derived"]
    assert derived["nvfp4_weight_bytes"] == 256 * 64 and derived["fp8_scale_bytes"] == 256 * 8 + 8
    assert len(derived["warnings"]) == 2


def test_discover_refuses(tmp_path, capsys):
    assert main(["discover", NANO, "--output", str(tmp_path / "no" / "where.json")]) == 2
    assert "--output" in capsys.readouterr().err
    shutil.copy(nano.DIRECTORY / "config.json", tmp_path)
    assert main(["discover", str(tmp_path)]) == 2
    assert "holds no *.safetensors file" in capsys.readouterr().err


# ---- tokenize

def test_tokenize(capsys, monkeypatch):
    assert printed(["tokenize", "--text", "hello world"], capsys) == "[562,430,343,289,3673]\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello world"))
    answer = json.loads(printed(["tokenize", "--json"], capsys))
    assert answer["count"] == 5 and "".join(answer["tokens"]) == "hello world"


# ---- validate-eagle3-drafter

DRAFTER = dict(architectures=["LlamaForCausalLMEagle3"], hidden_size=32, intermediate_size=48, num_hidden_layers=1,
               num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=100, draft_vocab_size=40,
               max_position_embeddings=64, rope_theta=1e4, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 9]})


def drafter(directory, change_config=None, change_tensors=None):
    """A small drafter; both arguments edit it before it is written."""
    config = json.loads(json.dumps(DRAFTER))
    if change_config:
        change_config(config)
    shapes = {"layers.0.hidden_norm": (32,), "layers.0.input_layernorm": (32,), "layers.0.post_attention_layernorm": (32,),
              "layers.0.self_attn.q_proj": (64, 64), "layers.0.self_attn.k_proj": (32, 64),
              "layers.0.self_attn.v_proj": (32, 64), "layers.0.self_attn.o_proj": (32, 64),
              "layers.0.mlp.gate_proj": (48, 32), "layers.0.mlp.up_proj": (48, 32), "layers.0.mlp.down_proj": (32, 48),
              "fc": (32, 96), "norm": (32,), "lm_head": (40, 32)}
    arrays = {f"{name}.weight": np.zeros(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    arrays["d2t"] = np.arange(40) // 2
    if change_tensors:
        change_tensors(arrays)
    save_file(arrays, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_drafter_is_valid(tmp_path, capsys):
    facts = json.loads(printed(["validate-eagle3-drafter", drafter(tmp_path), "--json"], capsys))
    assert facts["valid"] and facts["tensors_validated"] == 14 and facts["compressed_vocab"]
    assert facts["d2t_entries"] == 40 and facts["fc_shape"] == [32, 96] and facts["attention_in_features"] == 64
    assert facts["target_layer_ids"] == [1, 5, 9] and facts["target_token_entries"] == 40
    assert "tensors_validated" in printed(["validate-eagle3-drafter", tmp_path], capsys)


def test_a_drafter_with_the_whole_vocabulary_needs_no_map(tmp_path, capsys):
    def whole(arrays):
        del arrays["d2t"]
        arrays["lm_head.weight"] = np.zeros((100, 32), ml_dtypes.bfloat16)
    drafter(tmp_path, lambda c: c.update(draft_vocab_size=100), whole)
    facts = json.loads(printed(["validate-eagle3-drafter", tmp_path, "--json"], capsys))
    assert facts["tensors_validated"] == 13 and not facts["compressed_vocab"] and facts["d2t_entries"] == 0


@pytest.mark.parametrize("config, tensors, sentence", [
    (lambda c: c.update(architectures=["Llama"]), None, "LlamaForCausalLMEagle3 was wanted"),
    (lambda c: c.update(num_hidden_layers=2), None, "num_hidden_layers is 2; 1 was wanted"),
    (lambda c: c.update(num_attention_heads=3), None, "num_attention_heads 3 is not a multiple"),
    (lambda c: c.update(draft_vocab_size=101), None, "draft_vocab_size 101 is larger than vocab_size 100"),
    (lambda c: c.pop("head_dim"), None, "head_dim is None; a positive integer was wanted"),
    (lambda c: c.update(eagle_config={}), None, "eagle_aux_hidden_state_layer_ids is None"),
    (None, lambda a: a.pop("fc.weight"), "fc.weight is missing"),
    (None, lambda a: a.update({"norm.weight": np.zeros(3, ml_dtypes.bfloat16)}), r"norm.weight in .* has shape \[3\]; "),
    (None, lambda a: a.update({"norm.weight": np.zeros(32, np.float32)}), "has dtype F32; BF16 was wanted"),
    (None, lambda a: a.update({"d2t": np.arange(40, dtype=np.int32)}), "d2t in .* has dtype I32; I64 was wanted"),
    (None, lambda a: a["d2t"].__setitem__(7, 93), "d2t in .* maps draft id 7 to 100; ids from 0 to 99 exist"),
    (None, lambda a: a["d2t"].__setitem__(7, -8), "maps draft id 7 to -1"),
])
def test_a_drafter_with_a_fault(config, tensors, sentence, tmp_path, capsys):
    said = printed(["validate-eagle3-drafter", drafter(tmp_path, config, tensors)], capsys, code=1)
    assert re.search(sentence, said), said
    problem = json.loads(printed(["validate-eagle3-drafter", tmp_path, "--json"], capsys, code=1))
    assert problem["valid"] is False and problem["problem"] == said.strip()
