"""The GPU packer's host side, with the emulator in place of a GPU: the converter gets the same bytes and refusals."""
import shutil

import numpy as np
import pytest
import random_checkpoint
from random_checkpoint import Recipe
from test_convert import contents
from test_pack import WIDE
from test_quantise import alpha_for, matrix

from qwentin import nano, numerics
from qwentin.__main__ import main
from qwentin.device import Device, DeviceError
from qwentin.kernels import pack_cpu
from qwentin.kernels.machines import EmulatorStream
from qwentin.kernels.packed import FP6, NVFP4
from qwentin.model.convert import prepare
from qwentin.model.pack_gpu import packer


class Held(np.ndarray):
    """A numpy array that can be downloaded."""

    def download(self):
        return np.array(self)


class EmulatedDevice:
    """As much of device.Device as the packer uses."""

    def __init__(self):
        self.stream = EmulatorStream("sm_90a")
        self.stream.synchronize = lambda: None

    def make_current(self):
        pass

    def empty(self, shape, dtype):
        return np.empty(shape, dtype).view(Held)

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype).view(Held)

    def upload(self, values):
        return np.array(values).view(Held)


@pytest.mark.parametrize("packing", [FP6, NVFP4], ids=lambda p: p.name)
def test_same_bytes_as_the_cpu(packing):
    x = matrix(20, 256)
    alpha = alpha_for(packing, x)
    got = packer(EmulatedDevice())(packing, numerics.encode_bf16(x), alpha)
    np.testing.assert_array_equal(got, pack_cpu.pack(packing, x, alpha))


def test_what_is_not_finite_is_refused():
    x = matrix(16, 128)
    x[3, 7] = np.inf
    with pytest.raises(pack_cpu.NotFinite):
        packer(EmulatedDevice())(FP6, numerics.encode_bf16(x))


def test_the_converter_gives_the_same_directory(tmp_path):
    small = Recipe(51, WIDE | dict(intermediate_size=128, num_hidden_layers=1, full_attention_interval=1, vocab_size=32,
                                   head_dim=32, num_attention_heads=1, num_key_value_heads=1, mtp_num_hidden_layers=0))
    source = random_checkpoint.write(small, tmp_path / "source")
    shutil.copy(nano.DIRECTORY / "tokenizer.json", source)
    prepare(source, tmp_path / "cpu").run()
    prepare(source, tmp_path / "gpu", pack_tiles=packer(EmulatedDevice())).run(threads=1)
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")


def test_without_a_gpu_the_command_says_so(tmp_path, capsys, monkeypatch):
    def no_driver(index=0):
        raise DeviceError("No GPU: the NVIDIA driver library libcuda.so.1 is not on this machine.")
    monkeypatch.setattr(Device, "open", no_driver)
    assert main(["convert", str(nano.DIRECTORY), str(tmp_path / "done"), "--gpu"]) == 2
    assert "No GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
