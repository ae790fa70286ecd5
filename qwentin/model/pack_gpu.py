"""Pack on the GPU: a function with the signature and the bytes of kernels/pack_cpu.pack, for the converter's threads.

The matrix goes up as it lies in the file (bf16, or float32 once decoded), one kernel packs it, the tiles come down. One
call at a time has the device; the threads meanwhile read, check and write.
"""
import threading

import numpy as np

from ..device import Device
from ..kernels import pack
from ..kernels.pack_cpu import NotFinite
from ..kernels.packed import Packing


def open_packer(index: int = 0):
    """The packer of a GPU. Raises DeviceError where there is none."""
    return packer(Device.open(index))


def packer(device):
    """pack_on_gpu(packing, x, alpha) -> tiles; raises NotFinite as the CPU's does."""
    lock = threading.Lock()

    def pack_on_gpu(packing: Packing, x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
        with lock:
            device.make_current()
            source, flag = device.upload(x), device.zeros(1, np.uint64)
            tiles = device.empty(packing.shape(*x.shape), np.uint8)
            pack.launch(device.stream, source, tiles, flag, packing.name, float(alpha))
            device.stream.synchronize()
            broken, out = flag.download()[0], tiles.download()
        if broken:
            raise NotFinite("the matrix holds a NaN or an infinity")
        return out
    return pack_on_gpu
