"""Where a kernel module can be launched: the emulator, a GPU, or a recorder that only notes which kernels would run.

The first two make what is launched with from numpy arrays: `start()` gives the stream for `module.launch`, `input` and
`output` the arguments.
"""
import functools

import numpy as np

from ..device import Device, DeviceError
from . import emulator
from .parity import GUARD

NUMPY = {"uint64": np.uint64, "uint32": np.uint32, "float32": np.float32}


class EmulatorStream:
    """Launches run at once, on numpy, every access checked. `fresh`: arrays that may not be read before written.

    schedule: None for blocks and warps in order, or the seed of a shuffle.
    """

    def __init__(self, chip, schedule=None):
        self.chip, self.schedule, self.fresh, self.used = chip, schedule, [], set()

    def launch(self, kernel, grid, *args, dependent=None):
        if len(args) != len(kernel.signature):
            raise ValueError(f"{kernel.name} takes {len(kernel.signature)} arguments, got {len(args)}")
        typed = [a if isinstance(a, np.ndarray) else NUMPY[str(k)](a) for a, k in zip(args, kernel.signature)]
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        unwritten = [a for a in arrays if span(a) not in self.used
                     and any(np.may_share_memory(a, f) for f in self.fresh)]
        emulator.launch(program(kernel, self.chip), grid, kernel.threads, typed, shared_bytes=kernel.shared,
                        schedule=self.schedule, unwritten=unwritten)
        self.used.update(map(span, arrays))


def span(array):
    """Where an array lies: slices of one workspace, written by one launch and read by the next, are told apart."""
    return array.ctypes.data, array.nbytes


@functools.lru_cache(64)                # more than a tower launches; each takes 5 to 30 MB
def program(kernel, chip):
    """A kernel's PTX, parsed for the emulator."""
    return emulator.load(kernel.ptx(chip))


class Emulator:
    """Executes the PTX compiled for `chip`, blocks and warps in order or shuffled by the seed `schedule`."""

    def __init__(self, chip="sm_90a", schedule=None):
        self.name = f"emulator ({chip})" if schedule is None else f"emulator ({chip}, shuffled {schedule})"
        self.chip, self.schedule = chip, schedule

    def start(self):
        """A new stream: what was written in an earlier run does not count."""
        self.stream = EmulatorStream(self.chip, self.schedule)
        return self.stream

    def input(self, array):
        return np.ascontiguousarray(array)

    def output(self, view, whole, fresh):
        """(what to launch with, a function giving `whole` as the launch left it). fresh: `view` holds nothing yet."""
        if fresh:
            self.stream.fresh.append(view)
        return view, lambda: whole


class Gpu:
    """Runs cubins on a device."""

    def __init__(self, device):
        self.name, self.chip, self.device, self.stream = device.name, device.chip, device, device.stream

    def start(self):
        return self.stream

    def input(self, array):
        return self.device.upload(array)

    def output(self, view, whole, fresh):
        buffer = self.device.upload(whole)
        argument = buffer[GUARD:GUARD + view.nbytes].reshape(*view.shape, dtype=view.dtype)
        return argument, lambda: self.stream.synchronize() or buffer.download()


class Recorder:
    """A stream that launches nothing; `kernels` lists what would have run."""

    def __init__(self):
        self.kernels = []

    def launch(self, kernel, grid, *args, dependent=None):
        if kernel not in self.kernels:
            self.kernels.append(kernel)


@functools.cache
def default():
    """The GPU if there is one, else the emulator."""
    try:
        return Gpu(Device.open())
    except DeviceError:
        return Emulator()
