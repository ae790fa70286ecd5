"""ModelConfig and EngineConfig: what official files say, what is refused, options generated from the fields."""
import argparse
import json

import pytest

from qwentin import nano
from qwentin.config import (FULL, LINEAR, EngineConfig, ModelConfig, add_options, from_options, read_generation_config,
                            read_json)
from qwentin.errors import ConfigError

TEXT_27B = dict(
    model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
    num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
    max_position_embeddings=262144, full_attention_interval=4, mtp_num_hidden_layers=1, eos_token_id=248044,
    rope_parameters={"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25})


def test_27b():
    c = ModelConfig.from_dict({"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": TEXT_27B})
    assert len(c.full_layers) == 16 and len(c.linear_layers) == 48 and c.full_layers[:2] == (3, 7)
    assert c.conv_channels == 10240 and c.rotary_dim == 64 and c.eos_token_id == (248044,)


def test_tie_is_read_from_the_top_level_first():
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": {**TEXT_27B, "tie_word_embeddings": False}}
    assert ModelConfig.from_dict(outer).tie_word_embeddings
    del outer["tie_word_embeddings"]
    assert not ModelConfig.from_dict(outer).tie_word_embeddings


def test_nano():
    c = ModelConfig.from_directory(nano.DIRECTORY)
    assert c.layer_types == ((LINEAR,) * 3 + (FULL,)) * 2
    assert c.eos_token_id == (4085, 4083), "the stop ids of generation_config.json win"


@pytest.mark.parametrize("change, words", [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ({"hidden_size": None}, "hidden_size is None"), ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": "5120"}, "hidden_size is '5120'"), ({"num_key_value_heads": 5}, "not a multiple"),
    ({"linear_num_key_heads": 7}, "not a multiple"), ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["mamba"] * 64}, "mamba"), ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
    ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "rotary width")])
def test_refused_geometry(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_dict({**TEXT_27B, **change})


def test_missing_key_and_file(tmp_path):
    with pytest.raises(ConfigError, match="head_dim"):
        ModelConfig.from_dict({k: v for k, v in TEXT_27B.items() if k != "head_dim"})
    with pytest.raises(ConfigError, match="config.json is missing"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        read_json(tmp_path / "config.json")
    assert read_generation_config(tmp_path) == {}


def parse(*words):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return from_options(parser.parse_args(words))


def test_options_are_the_fields():
    assert parse() == EngineConfig()
    got = parse("--port", "9", "--max-seqs", "3", "--keepalive-s", "2.5", "--api-key", "k", "--served-model-name", "m")
    assert (got.port, got.max_seqs, got.keepalive_s, got.api_key, got.model_name) == (9, 3, 2.5, "k", "m")
    assert EngineConfig().model_name == "qwentin-nano"


@pytest.mark.parametrize("words, name", [(("--port", "-1"), "--port"), (("--max-seqs", "0"), "--max-seqs"),
                                         (("--model", "/no/such/place"), "/no/such/place")])
def test_refused_options(words, name):
    with pytest.raises(ConfigError, match=name):
        parse(*words)


def test_context_and_cache_size():
    model = ModelConfig.from_directory(nano.DIRECTORY)
    assert EngineConfig().context_window(model) == 8192 and EngineConfig().kv_rows(model) == 4 * 8192
    assert EngineConfig(max_model_len=100, kv_tokens=100).kv_rows(model) == 100
    with pytest.raises(ConfigError, match="goes up to 8192"):
        EngineConfig(max_model_len=8193).context_window(model)
    with pytest.raises(ConfigError, match="at least one context window"):
        EngineConfig(kv_tokens=8191).kv_rows(model)


def test_every_field_has_help():
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert all(action.help for action in parser._actions)
    json.dumps({action.dest: str(action.default) for action in parser._actions})
