"""The device line: one GPU through the CUDA driver API. Memory, streams, launches, graphs, events, the chip's limits.

    device = Device.open()                      # DeviceError, one sentence, where there is none
    x = device.upload(np.ones((4, 5120), np.float32))
    device.stream.launch(kernel, 4, x, out, 5120)
    out.download()

Importing this file starts nothing: the driver is loaded by the first `Device.open`. Work is launched by streams; a
stream that `capture`s turns the launches made meanwhile into a Graph. The kernel launched is any object with `name`,
`signature`, `threads`, `shared`, `cubin(chip)` and `waits(chip)`, as `kernels.build.Kernel`.
"""
import contextlib
import ctypes
import functools
import math
import weakref

import numpy as np

from .driver import DeviceError, call, driver, release

C_TYPES = {"uint64": ctypes.c_uint64, "uint32": ctypes.c_uint32, "float32": ctypes.c_float}
STATIC_SHARED_LIMIT = 48 << 10          # dynamic shared memory beyond this must be asked for, kernel by kernel


def chip_name(capability):
    """The assembler's name of a compute capability: (9, 0) is "sm_90a"; the "a" brings the chip's own instructions."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class DeviceArray:
    """A C-ordered array in device memory; slices of rows and views share it. Freed with the last of them."""

    def __init__(self, address, shape, dtype, owner):
        self.address, self.shape, self.dtype = address, tuple(shape), np.dtype(dtype)
        self.owner = owner                              # keeps the allocation alive

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def ndim(self):
        return len(self.shape)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        """a[i] or a[i:j]: rows of the first axis."""
        row = self.nbytes // max(self.shape[0], 1)
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.shape[0])
            if step != 1:
                raise IndexError(f"a device array is sliced in steps of 1, got {step}")
            shape = max(stop - start, 0), *self.shape[1:]
            return DeviceArray(self.address + start * row, shape, self.dtype, self.owner)
        if not -self.shape[0] <= rows < self.shape[0]:
            raise IndexError(f"row {rows} of an array of {self.shape[0]}")
        return DeviceArray(self.address + rows % self.shape[0] * row, self.shape[1:], self.dtype, self.owner)

    def reshape(self, *shape, dtype=None):
        """The same bytes with another shape (and dtype)."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        if math.prod(shape) * dtype.itemsize != self.nbytes:
            raise ValueError(f"{self.dtype} {self.shape} has {self.nbytes} bytes, "
                             f"{dtype} {shape} wants {math.prod(shape) * dtype.itemsize}")
        return DeviceArray(self.address, shape, dtype, self.owner)

    def upload(self, values, stream=None):
        """Copy a numpy array of the same shape and dtype in; with a stream, in its order, so keep `values` till then."""
        values = np.ascontiguousarray(values)
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(f"a {self.dtype} {self.shape} device array cannot take {values.dtype} {values.shape}")
        if stream is None:
            call("cuMemcpyHtoD", self.address, values.ctypes.data, values.nbytes)
            call("cuStreamSynchronize", 0)              # a pageable copy may return before it has landed
        else:
            call("cuMemcpyHtoDAsync", self.address, values.ctypes.data, values.nbytes, stream.handle)

    def download(self, into=None, stream=None):
        """The values as a numpy array, whatever streams still do; with a stream, queued in its order into `into`."""
        values = np.empty(self.shape, self.dtype) if into is None else into
        if stream is None:
            call("cuMemcpyDtoH", values.ctypes.data, self.address, self.nbytes)
        else:
            call("cuMemcpyDtoHAsync", values.ctypes.data, self.address, self.nbytes, stream.handle)
        return values


class Device:
    """One GPU: its limits, its memory, the kernels loaded on it. `open` is the way to get one."""

    def __init__(self, handle):
        self.context = call("cuDevicePrimaryCtxRetain", handle)
        self.make_current()
        limit = functools.partial(self.attribute, handle)
        self.name = call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()
        self.capability = (limit("COMPUTE_CAPABILITY_MAJOR"), limit("COMPUTE_CAPABILITY_MINOR"))
        self.chip = chip_name(self.capability)
        self.multiprocessors = limit("MULTIPROCESSOR_COUNT")
        self.shared_per_block = limit("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.l2_bytes = limit("L2_CACHE_SIZE")
        self.memory_bytes = call("cuDeviceTotalMem", handle)
        # two transfers a memory clock (kHz), bus width in bits
        self.bandwidth = 2 * limit("MEMORY_CLOCK_RATE") * 1e3 * limit("GLOBAL_MEMORY_BUS_WIDTH") / 8
        self.functions = {}                             # Kernel -> (module, function)
        self.stream = Stream(self)

    @classmethod
    def open(cls, index=0):
        """The GPU with this number."""
        count = call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise DeviceError(f"No GPU {index}: this machine has {count}.")
        return cls(call("cuDeviceGet", index))

    @staticmethod
    def attribute(handle, name):
        return call("cuDeviceGetAttribute", getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)

    def make_current(self):
        """Let the calling thread use this device."""
        call("cuCtxSetCurrent", self.context)

    def empty(self, shape, dtype):
        """An uninitialised array."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        owner = Allocation(self.context, max(math.prod(shape) * np.dtype(dtype).itemsize, 1))
        return DeviceArray(owner.address, shape, dtype, owner)

    def zeros(self, shape, dtype):
        """An array of zeros."""
        array = self.empty(shape, dtype)
        call("cuMemsetD8", array.address, 0, array.nbytes)
        call("cuStreamSynchronize", 0)
        return array

    def upload(self, values):
        """A copy of a numpy array on the device."""
        values = np.asarray(values)
        array = self.empty(values.shape, values.dtype)
        array.upload(values)
        return array

    def copy(self, target, source, stream):
        """Queue a copy between device arrays of the same number of bytes."""
        assert target.nbytes == source.nbytes, "a copy fills its target"
        call("cuMemcpyDtoDAsync", target.address, source.address, source.nbytes, stream.handle)

    def clear(self, array, stream):
        """Queue zeros for an array."""
        call("cuMemsetD8Async", array.address, 0, array.nbytes, stream.handle)

    def free_bytes(self):
        """Device memory that nobody has taken."""
        return driver().cuMemGetInfo()[1]

    def function(self, kernel):
        """The loaded machine code of a kernel, its shared-memory limit raised."""
        if kernel not in self.functions:
            if kernel.shared > self.shared_per_block:
                raise DeviceError(f"{kernel.name} wants {kernel.shared} bytes of shared memory a block, "
                                  f"{self.name} has {self.shared_per_block}.")
            module = call("cuModuleLoadData", kernel.cubin(self.chip).code)
            function = call("cuModuleGetFunction", module, kernel.cubin(self.chip).entry.encode())
            if kernel.shared > STATIC_SHARED_LIMIT:
                limit = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuFuncSetAttribute", function, limit, kernel.shared)
            self.functions[kernel] = module, function
        return self.functions[kernel][1]


class Allocation:
    """A block of device memory, freed when the last array that uses it goes, on whatever thread that happens."""

    def __init__(self, context, nbytes):
        self.address = int(call("cuMemAlloc", nbytes))
        weakref.finalize(self, release, context, "cuMemFree", self.address)


class Stream:
    """An ordered queue of launches and copies."""

    def __init__(self, device):
        self.device = device
        self.handle = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        weakref.finalize(self, driver().cuStreamDestroy, self.handle)

    def launch(self, kernel, grid, *args, dependent=None):
        """Queue a kernel: grid as blocks or up to (x, y, z), arrays pass their address, numbers as the signature says.

        dependent: the kernel may start before the previous one has ended; None: if it waits for it by griddepcontrol itself.
        """
        if len(args) != len(kernel.signature):
            raise ValueError(f"{kernel.name} takes {len(kernel.signature)} arguments, got {len(args)}")
        config = driver().CUlaunchConfig()
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        config.gridDimX, config.gridDimY, config.gridDimZ = grid + (1,) * (3 - len(grid))
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes, config.hStream = kernel.shared, self.handle
        if kernel.waits(self.device.chip) if dependent is None else dependent:
            attribute = driver().CUlaunchAttribute()
            attribute.id = driver().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        types = tuple(C_TYPES[str(kind)] for kind in kernel.signature)
        values = tuple(t(getattr(a, "address", a)).value for a, t in zip(args, types))
        call("cuLaunchKernelEx", config, self.device.function(kernel), (values, types), 0)

    def synchronize(self):
        """Wait for all that was queued."""
        call("cuStreamSynchronize", self.handle)

    @contextlib.contextmanager
    def capture(self):
        """Record instead of run: `with stream.capture() as graph: ...launches...`, then `graph.launch(stream)`."""
        graph = Graph()
        call("cuStreamBeginCapture", self.handle, driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield graph
        finally:
            captured = call("cuStreamEndCapture", self.handle)
        graph.instantiate(captured)


class Graph:
    """Captured launches, replayed as one. Empty until its capture has ended."""
    handle = None

    def instantiate(self, captured):
        self.handle = call("cuGraphInstantiate", captured, 0)
        call("cuGraphDestroy", captured)
        weakref.finalize(self, driver().cuGraphExecDestroy, self.handle)

    def upload(self, stream):
        """Bring it to the device, so that its first launch takes no memory."""
        call("cuGraphUpload", self.handle, stream.handle)

    def launch(self, stream):
        call("cuGraphLaunch", self.handle, stream.handle)


class Event:
    """A point in a stream, for timing."""

    def __init__(self):
        self.handle = call("cuEventCreate", driver().CUevent_flags.CU_EVENT_DEFAULT)
        weakref.finalize(self, driver().cuEventDestroy, self.handle)

    def record(self, stream):
        call("cuEventRecord", self.handle, stream.handle)

    def wait(self):
        """Until the stream has come here."""
        call("cuEventSynchronize", self.handle)

    def seconds_since(self, earlier):
        """Seconds from an earlier event to this one; waits for this one."""
        self.wait()
        return call("cuEventElapsedTime", earlier.handle, self.handle) / 1e3
