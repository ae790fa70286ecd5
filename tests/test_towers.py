"""Where the model runs: the choice, the refusals, and what is said of it."""
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qwentin import nano, towers
from qwentin.config import EngineConfig, ModelConfig
from qwentin.device import DeviceError
from qwentin.errors import ConfigError
from qwentin.model.cpu import CpuTower
from qwentin.model.imagined import imagine
from qwentin.model.weights import open_checkpoint

GPU = SimpleNamespace(name="Some GPU", chip="sm_90a", capability=(9, 0), multiprocessors=132, shared_per_block=227 << 10)
SMALL = dict(max_model_len=256, max_seqs=2, cache_mib=8)


@pytest.fixture
def gpu(monkeypatch):
    """Call it to make Device.open give a GPU, or fail."""
    def give(device):
        def opened():
            if device is None:
                raise DeviceError("No GPU: the NVIDIA driver library libcuda.so.1 is not on this machine.")
            return device
        monkeypatch.setattr(towers.Device, "open", staticmethod(opened))
    return give


def test_auto_takes_what_there_is(gpu):
    gpu(None)
    assert towers.choice("auto") == "cpu"
    gpu(GPU)
    assert towers.choice("auto") == "cuda" and towers.choice("cpu") == "cpu"
    gpu(SimpleNamespace(capability=(7, 5)))
    assert towers.choice("auto") == "cpu"


def test_the_numpy_tower_and_what_is_said_of_it(gpu, caplog):
    gpu(None)
    caplog.set_level("INFO")
    placed = towers.place(EngineConfig(**SMALL), open_checkpoint(nano.DIRECTORY), 4000)
    report = placed.report()
    assert isinstance(placed.tower, CpuTower) and report["device"] == "cpu (numpy)" and report["graphs"] == 0
    assert report["memory"]["KV"] == placed.tower.kv.nbytes == 8 * 2 * 3 * 128 * 256 * 4 and report["load_seconds"] > 0
    assert "on cpu (numpy): weights 0.05, KV 0.01, state 0.01 GiB; built in" in caplog.text


def test_options_of_the_draft_head(gpu):
    gpu(None)
    config = EngineConfig(draft_vocabulary=1000, draft_hidden="raw", **SMALL)
    placed = towers.place(config, open_checkpoint(nano.DIRECTORY), 4000)
    assert placed.tower.draft_rows.shape == (1024, 256) and placed.tower.raw_hidden
    tower = towers.place(replace(config, device="emulator"), open_checkpoint(nano.DIRECTORY), 4000).tower
    assert tower.draft_head.matrix.width == tower.draft_head.valid == 1024 and tower.head.raw


def test_no_gpu_and_an_old_one_are_refused(gpu):
    gpu(None)
    with pytest.raises(DeviceError, match="No GPU: the NVIDIA driver library"):
        towers.place(EngineConfig(device="cuda"), None, 0)
    gpu(SimpleNamespace(name="Old GPU", capability=(7, 5)))
    with pytest.raises(DeviceError, match=r"Old GPU has compute capability 7.5; at least 8.0 is needed; --device cpu runs"):
        towers.place(EngineConfig(device="cuda"), None, 0)
    with pytest.raises(ConfigError, match="--device is 'tpu'; auto, cpu, cuda, emulator can be chosen."):
        EngineConfig(device="tpu")


def test_what_does_not_fit_is_refused_before_a_weight_is_read():
    """An imagined 27B would raise at the first byte that is asked of it."""
    shape = ModelConfig.from_dict(dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
        max_position_embeddings=262144, mtp_num_hidden_layers=1))
    backend = SimpleNamespace(name="Some GPU", chip="sm_120a", multiprocessors=170, shared=99 << 10)
    checkpoint = imagine(shape, "model")
    with pytest.raises(ConfigError, match=r"Some GPU has 60.00 GiB free .* a context of \d+ tokens would fit, 262144 were "
                                          "asked for; lower --max-model-len"):
        towers.on_device(EngineConfig(max_seqs=1), checkpoint, None, backend, 60 << 30)
    with pytest.raises(ConfigError, match=r"a context of 0 tokens would fit"):
        towers.on_device(EngineConfig(max_seqs=1), checkpoint, None, backend, 31 << 30)


def test_the_emulator_serves_a_token():
    from qwentin.step import Rows, pack
    import numpy as np
    config = EngineConfig(device="emulator", kv="bf16", **SMALL)
    placed = towers.place(config, open_checkpoint(nano.DIRECTORY), 4000)
    assert placed.device == "emulator (sm_90a)"
    assert placed.pages == 8
    assert set(placed.report()["memory"]) == {"weights", "KV", "state", "rounds", "scratch", "prefill"}
    placed.tower.clear_slot(0)
    step = pack([Rows(np.array([5], np.int32), 0, np.array([0], np.int32), 0, np.array([0], np.int32))])
    assert np.isfinite(placed.tower.forward(step).logits).all()
    assert placed.report()["graphs"] == 1
