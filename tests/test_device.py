"""device: what can be known without a GPU. The rest runs wherever there is one: bench/, lab.time."""
import subprocess
import sys

import numpy as np
import pytest

from qwentin import device, driver
from qwentin.device import Device, DeviceArray, DeviceError


def has_gpu():
    try:
        Device.open()
    except DeviceError:
        return False
    return True


def test_importing_starts_nothing():
    code = "import sys, qwentin.device; print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'numba')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_driver_is_one_sentence(monkeypatch):
    from cuda.bindings import driver as bindings

    def missing(flags):
        raise RuntimeError("libcuda.so.1 not found")
    monkeypatch.setattr(bindings, "cuInit", missing)
    driver.driver.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"^No GPU: the NVIDIA driver library libcuda.so.1 is not on this machine.$"):
            Device.open()
    finally:
        driver.driver.cache_clear()


def test_chip_names():
    assert [device.chip_name(c) for c in ((8, 0), (8, 9), (9, 0), (12, 0))] == ["sm_80", "sm_89", "sm_90a", "sm_120a"]


def test_slices_and_views_of_an_array():
    a = DeviceArray(0x1000, (6, 4, 8), np.uint16, owner=None)
    assert (a.nbytes, a.size, a.ndim, len(a)) == (384, 192, 3, 6)
    rows = a[2:4]
    assert (rows.address, rows.shape) == (0x1000 + 2 * 64, (2, 4, 8))
    assert (a[-1].address, a[-1].shape) == (0x1000 + 5 * 64, (4, 8))
    assert a[4:2].shape == (0, 4, 8) and a[3:].shape == (3, 4, 8)
    words = a.reshape(96, dtype=np.uint32)
    assert (words.address, words.shape, words.dtype) == (0x1000, (96,), np.uint32)
    with pytest.raises(ValueError, match=r"uint16 \(6, 4, 8\) has 384 bytes, uint16 \(5, 4\) wants 40"):
        a.reshape(5, 4)
    with pytest.raises(IndexError, match="row 6 of an array of 6"):
        a[6]
    with pytest.raises(IndexError, match="in steps of 1, got 2"):
        a[::2]
    with pytest.raises(ValueError, match="cannot take float32"):
        a.upload(np.zeros((6, 4, 8), np.float32))


@pytest.mark.skipif(not has_gpu(), reason="no GPU on this machine")
def test_on_a_gpu_copies_streams_and_graphs():
    from qwentin.kernels import lab, machines, swiglu
    gpu = Device.open()
    x = np.arange(1000, dtype=np.float32).reshape(10, 100)
    assert (gpu.upload(x).download() == x).all() and (gpu.upload(x)[3:5].download() == x[3:5]).all()
    assert not gpu.zeros((3, 3), np.uint8).download().any()
    machine = machines.Gpu(gpu)
    arguments = swiglu.make(np.random.default_rng(0), rows=2, f=64)
    want = lab.run(swiglu, arguments, machine)["out"]
    gate_up, out = gpu.upload(arguments["gate_up"]), gpu.zeros((2, 64), np.uint16)
    swiglu.launch(gpu.stream, gate_up, out)
    with gpu.stream.capture() as graph:
        swiglu.launch(gpu.stream, gate_up, out)
    gpu.stream.synchronize()
    out.upload(np.zeros((2, 64), np.uint16))
    graph.launch(gpu.stream)
    gpu.stream.synchronize()
    assert (out.download() == want).all()
