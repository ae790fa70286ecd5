"""The second way to an instruction: a device function in CUDA C++, compiled by NVRTC to LTO-IR and linked in.

Inline PTX through `ptx` is the first way and serves everything here. This one is for what PTX text cannot say, such as
a template of a CUDA header; a kernel lists such sources in `@kernel(sources=...)` and calls the function declared by
`external`. The assembler inlines across the two languages, so a call costs nothing. Such a kernel has no line info and
calls no `@device` function: numba's and NVRTC's debug formats cannot be linked.
"""
import functools

from cuda.bindings import nvrtc
from numba import cuda


class SourceError(RuntimeError):
    """CUDA source that NVRTC refuses; carries its log."""


def external(name, returns, *arguments):
    """A function defined in CUDA source as `extern "C" __device__`, callable in a kernel; numba types."""
    return cuda.declare_device(name, returns(*arguments), abi="c")


@functools.cache
def ltoir(source, chip):
    """LTO-IR bytes of CUDA source for a chip such as "sm_120a"."""
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"device.cu", 0, [], []))
    options = [f"--gpu-architecture={chip.replace('sm', 'compute')}".encode(), b"-dlto", b"-rdc=true"]
    try:
        status, = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise SourceError(bytes(log).rstrip(b"\0").decode())
        code = bytearray(checked(nvrtc.nvrtcGetLTOIRSize(program)))
        checked(nvrtc.nvrtcGetLTOIR(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def checked(result):
    """The value of an NVRTC call, or its error."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise SourceError(str(status))
    return values[0] if values else None
