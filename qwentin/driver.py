"""The CUDA driver's calls, their failures, and memory of the host that it reads and writes by itself.

Importing this file starts nothing: the driver is loaded by the first call. Who calls: device.py, model/backend.py.
"""
import ctypes
import functools
import math
import weakref

import numpy as np

from .errors import QwentinError


class DeviceError(QwentinError):
    """There is no usable GPU, or the driver refused a call."""


@functools.cache
def driver():
    """cuda.bindings.driver with libcuda loaded and initialised."""
    from cuda.bindings import driver as bindings
    try:
        status, = bindings.cuInit(0)
    except RuntimeError:
        raise DeviceError("No GPU: the NVIDIA driver library libcuda.so.1 is not on this machine.") from None
    if status != bindings.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"No GPU: the NVIDIA driver answers {status.name}.")
    return bindings


def call(name, *args):
    """One driver call: its value (or None), or DeviceError naming call and status."""
    status, *values = getattr(driver(), name)(*args)
    if status != driver().CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{name} failed: {status.name}.")
    return values[0] if values else None


def release(context, name, handle):
    """Give something back to the driver."""
    driver().cuCtxSetCurrent(context)
    getattr(driver(), name)(handle)


def pinned(shape, dtype):
    """A host array that copies can run beside the CPU from and to."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(shape)
    nbytes = max(count * np.dtype(dtype).itemsize, 1)
    address = int(call("cuMemAllocHost", nbytes))
    block = (ctypes.c_byte * nbytes).from_address(address)
    weakref.finalize(block, driver().cuMemFreeHost, address)
    return np.frombuffer(block, dtype, count).reshape(shape)
