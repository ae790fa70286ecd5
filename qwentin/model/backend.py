"""Where the CUDA tower's arrays live and its launches run: a GPU, or numpy under the emulator, behind one set of names.

    empty, zeros, upload      a new array: a DeviceArray, or a numpy array
    write, read, copy         host -> array, array -> host, array -> array of the same bytes; in the stream's order
    view                      bytes of a u8 array as an array of their own
    record                    a function that queues work becomes a Replay; its launch() does that work

Who calls: model/cuda.py and the files of its layers. Proven by tests/test_cuda.py (emulator) and on a GPU bench/parity.py.
"""
import math
from dataclasses import dataclass
from typing import Callable

import numpy as np

from ..device import Device
from ..driver import pinned
from ..kernels import machines
from .conveyor import Conveyor

CARRIED = 1 << 20               # bytes: less is copied as it is
EMULATED_BLOCKS = 4             # multiprocessors that the emulator claims: enough that blocks share strips and keys
EMULATED_SHARED = 227 << 10


class GpuBackend:
    """One GPU. Work is queued on one stream; `record` captures it as a graph."""

    def __init__(self, device: Device):
        self.device, self.stream = device, device.stream
        self.name, self.chip = f"{device.name} ({device.chip})", device.chip
        self.multiprocessors, self.shared = device.multiprocessors, device.shared_per_block
        self.empty, self.zeros = device.empty, device.zeros
        self.conveyor = None

    def attach(self):
        """Let the calling thread use the device."""
        self.device.make_current()

    def free_bytes(self):
        """Device memory that nobody has taken; any thread may ask."""
        self.attach()
        return self.device.free_bytes()

    def staging(self, shape, dtype):
        """A host array that copies read or fill while the host goes on."""
        return pinned(shape, dtype)

    def write(self, array, values):
        """Queue a copy of a staging array; it must stay as it is until synchronize()."""
        if not isinstance(self.stream, machines.Recorder):
            array.upload(values, self.stream)

    def read(self, array, into):
        """Queue a copy into a staging array; it is there after synchronize()."""
        if not isinstance(self.stream, machines.Recorder):
            array.download(into, self.stream)

    def upload(self, values):
        """A copy of a host array, there before whatever is queued next."""
        values = np.asarray(values)
        array = self.empty(values.shape, values.dtype)
        self.fill(array, values)
        return array

    def fill(self, array, values):
        """Copy a host array in, before whatever is queued next."""
        if values.shape != array.shape or values.dtype != array.dtype:
            raise ValueError(f"a {array.dtype} {array.shape} device array cannot take {values.dtype} {values.shape}")
        if array.nbytes < CARRIED:
            array.upload(values)
            return
        self.conveyor = self.conveyor or Conveyor(self.stream)
        self.conveyor.send(array, values)

    def copy(self, target, source):
        """Queue a copy between two arrays of the same bytes."""
        self.device.copy(target, source, self.stream)

    def clear(self, array):
        """Queue zeros."""
        self.device.clear(array, self.stream)

    def view(self, array, offset, shape, dtype):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return array[offset:offset + nbytes].reshape(*shape, dtype=dtype)

    def record(self, queue):
        """A graph of what queue() queues; it is not run. Kernels are loaded first: capture wants nothing else to happen."""
        recorder, stream = machines.Recorder(), self.stream
        self.stream = recorder
        try:
            queue()
        finally:
            self.stream = stream
        for kernel in recorder.kernels:
            self.device.function(kernel)
        with stream.capture() as graph:
            queue()
        graph.upload(stream)
        return Replay(lambda: graph.launch(stream), graph)

    def synchronize(self):
        self.stream.synchronize()


class EmulatorBackend:
    """numpy arrays; every launch executes the chip's PTX at once. Slow, and checked access by access."""

    def __init__(self, chip="sm_90a"):
        self.name, self.chip = f"emulator ({chip})", chip
        self.multiprocessors, self.shared = EMULATED_BLOCKS, EMULATED_SHARED
        self.stream = machines.EmulatorStream(chip)

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)           # the kernels' own tests look for reads of what nobody wrote

    zeros = staging = empty

    def upload(self, values):
        return np.array(values, order="C")

    def write(self, array, values):
        array[...] = values

    def read(self, array, into):
        into[...] = array

    copy = fill = write

    def clear(self, array):
        array[...] = 0

    def view(self, array, offset, shape, dtype):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return array[offset:offset + nbytes].view(dtype).reshape(shape)

    def record(self, queue):
        return Replay(queue)

    def attach(self):
        pass

    synchronize = attach

    def free_bytes(self):
        return None


@dataclass(frozen=True)
class Replay:
    """Recorded work: launch() queues it. `graph` is the device's, None where there is none."""
    launch: Callable[[], None]
    graph: object = None
