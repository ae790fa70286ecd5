"""From a Python function to machine code: numba makes PTX, nvJitLink a cubin, the disk keeps both.

    @kernel(threads=256)                        u64 addresses, u32 and f32 scalars: nothing else crosses a launch
    def scale(x: u64, out: u64, n: u32, factor: f32): ...

    scale.ptx("sm_90a")                         text, what the emulator runs
    scale.cubin("sm_120a").registers            machine code and what it takes

Nothing here needs a GPU or a driver; `device.Stream.launch` loads and runs the cubin where there is one. numba is the
compiler only. Functions a kernel calls carry `@device` (inlined). CUDA sources can be linked in (`nvrtc.py` says when).
"""
import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import os
import re
import threading
import types as python_types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from cuda.bindings import nvjitlink
from numba import cuda
from numba.cuda import compiler, dispatcher
from numba.cuda import types as numba_types
from numba.cuda.core.compiler_lock import global_compiler_lock

from ..config import cache_directory
from . import nvrtc
from .unroll import unroll

u32, u64, f32 = numba_types.uint32, numba_types.uint64, numba_types.float32
SCALARS = (u32, u64, f32)                             # the kernel ABI
CHIPS = ("sm_90a", "sm_120a")                         # H200 and RTX 5090: what the tests compile for
VERSIONED = ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvrtc")
ONE_COMPILE = threading.Lock()                        # numba's device query is patched while it compiles


class BuildError(RuntimeError):
    """A kernel does not assemble; carries the assembler's own words."""


@dataclass(frozen=True)
class Cubin:
    """Machine code for one chip, and what the assembler reported about it."""
    code: bytes
    registers: int        # a thread
    stack: int            # bytes a thread: local memory, 0 unless something could not stay in registers
    spills: int           # bytes stored and loaded because registers ran out
    shared: int           # static shared memory, bytes a block
    entry: str            # what the kernel is called in it
    log: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """A device program: launched by `device.Stream`, executed by the emulator, disassembled by `lab`."""
    name: str
    function: python_types.FunctionType
    signature: tuple                  # u64, u32 or f32 for each argument
    threads: int                      # a block
    shared: int                       # dynamic shared memory, bytes a block
    min_blocks: int                   # blocks an SM must be able to hold: bounds the registers
    sources: tuple[str, ...]          # CUDA C++ linked in
    whole: bool = False               # assembled as a whole program

    def ptx(self, chip):
        """PTX text for a chip such as "sm_90a"."""
        return ptx_of(self, chip)

    def waits(self, chip):
        """Whether it waits itself for what the kernel before it wrote, and so may be started early."""
        return waits_of(self, chip)

    def cubin(self, chip):
        """Machine code for a chip, with its registers, stack and spills."""
        return cubin_of(self, chip)


def kernel(threads, shared=0, min_blocks=1, sources=(), whole=False):
    """Decorator: an annotated function becomes a `Kernel`, static loops unrolled.

    whole: by link-time optimisation, which knows that nothing else will be linked in. PTX alone might be one unit of
    several, where the assembler ignores setmaxnreg.
    """
    def decorate(function):
        signature = tuple(function.__annotations__.get(name) for name in inspect.signature(function).parameters)
        for name, kind in zip(inspect.signature(function).parameters, signature):
            if kind not in SCALARS:
                raise TypeError(f"{function.__name__}: argument {name} must be annotated u64, u32 or f32, not {kind}")
        return Kernel(function.__name__, unroll(function), signature, threads, shared, min_blocks, tuple(sources),
                      whole)
    return decorate


def device(function, lines=True):
    """Decorator: a function that kernels call; unrolled like one, always inlined."""
    return cuda.jit(device=True, forceinline=True, lineinfo=lines)(unroll(function))


def lineless_device(function):
    """A device function without lines of its own: a fault in it names the line that calls it.

    For large kernels: NVVM gives some that are made of many functions up, with "Symbol name with unsupported characters",
    when it nests their line tables.
    """
    return device(function, lines=False)


# ------------------------------------------------------------------------------------------------ compiling
def capability(chip):
    """(9, 0, "a") for "sm_90a": numba's way to name a chip."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", chip)
    if not match:
        raise ValueError(f"a chip is named like 'sm_90a', got {chip!r}")
    major, minor, suffix = match.groups()
    return (int(major), int(minor), suffix) if suffix else (int(major), int(minor))


@contextlib.contextmanager
def headless(cc):
    """numba asks the current device what to compile a device function for; answer for it, so no driver is needed."""
    stub = python_types.SimpleNamespace(compute_capability=cc)
    with ONE_COMPILE, mock.patch.object(dispatcher, "get_current_device", lambda: stub):
        yield


def compiled(kernel, chip, output):
    """numba's output for a kernel: "ptx" text or "ltoir" bytes."""
    cc = capability(chip)
    with headless(cc), global_compiler_lock:
        library = lowered(kernel, output)
        return library.get_ltoir(cc=cc) if output == "ltoir" else library.get_asm_str(cc=cc)


@functools.lru_cache(8)                 # for the next chip; some are megabytes
def lowered(kernel, output):
    """A kernel in NVVM's language, which is the same for all chips; by far the longest step of a compilation.

    cuda.compile does this and the next step for one chip. numba has no public name for the half.
    """
    library, _ = compiler._compile_pyfunc_with_fixup(
        kernel.function, numba_types.void(*kernel.signature), device=False, abi="numba", cc=capability(CHIPS[0]),
        lineinfo=output == "ptx",       # NVRTC's LTO-IR has another debug format: no mixing
        launch_bounds=(kernel.threads, kernel.min_blocks), lto=output == "ltoir")
    return library


@functools.cache
def ptx_of(kernel, chip):
    """PTX of a kernel, from the disk if it was made before."""
    def make():
        if kernel.sources or kernel.whole:
            return tidy(link(chip, lto_inputs(kernel, chip), ptx=True)[0].decode(), kernel.name, chip).encode()
        return tidy(compiled(kernel, chip, "ptx"), kernel.name, chip).encode()
    return kept(stem(kernel, chip) + ".ptx", make).decode()


@functools.cache
def waits_of(kernel, chip):
    """Whether the PTX has griddepcontrol.wait."""
    return "griddepcontrol.wait" in ptx_of(kernel, chip)


def tidy(ptx, name, chip):
    """The text with the kernel's own name in place of numba's mangled one, which counts compilations.

    Dynamic shared memory is declared 128-byte aligned: enough for every vector access, bulk copy and ldmatrix. Chips before
    sm_90 start no kernel early: what would say so is dropped.
    """
    ptx = re.sub(r"^\.common \.global [^;]*NumbaEnv[^;]*;\n", "", ptx, flags=re.MULTILINE)
    if capability(chip) < (9,):
        ptx = re.sub(r"griddepcontrol\.\w+;", "", ptx)
    ptx = re.sub(r"(\.extern \.shared \.align) \d+", r"\1 128", ptx)
    return ptx.replace(re.search(r"\.entry\s+([\w$]+)", ptx).group(1), name)


@functools.cache
def cubin_of(kernel, chip):
    """Machine code of a kernel, from the disk if it was made before."""
    def make():
        code, log = link(chip, lto_inputs(kernel, chip) if kernel.whole else [("PTX", ptx_of(kernel, chip).encode())])
        return code + log.encode() + len(log).to_bytes(4, "little")
    blob = kept(stem(kernel, chip) + ".cubin", make)
    size = int.from_bytes(blob[-4:], "little")
    return reported(blob[:-4 - size], blob[-4 - size:-4].decode(), ptx_of(kernel, chip))


@functools.cache
def lto_inputs(kernel, chip):
    """What is linked when CUDA sources take part, or PTX will not do: numba's LTO-IR and NVRTC's."""
    return [("LTOIR", compiled(kernel, chip, "ltoir"))] + [("LTOIR", nvrtc.ltoir(s, chip)) for s in kernel.sources]


def reported(code, log, ptx):
    """A Cubin with the numbers in the assembler's log; shared memory as declared, which the log may add to."""
    def total(pattern, text=log):
        return sum(int(n) for n in re.findall(pattern, text))
    return Cubin(code, total(r"Used (\d+) registers"), total(r"(\d+) bytes stack frame"), total(r"(\d+) bytes spill"),
                 total(r"\.shared .*\[(\d+)\];", ptx), entry_of(code, re.search(r"\.entry\s+([\w$]+)", ptx).group(1)), log)


def entry_of(code, name):
    """What a kernel is called in its machine code: its name, or numba's mangled one around it. Read from the names of the
    sections, where the code of functions that it calls stands too; the assembler's log is sometimes empty."""
    found = [text.decode() for text in re.findall(rb"\.text\.([\w$]+)\0", code)]
    return name if name in found else next(each for each in found if name in each)


def link(chip, inputs, ptx=False):
    """nvJitLink over [(kind, bytes)]: (cubin or PTX bytes, info log). Kinds are PTX and LTOIR."""
    lto = ["-lto"] if any(kind == "LTOIR" for kind, _ in inputs) else []
    options = [f"-arch={chip}", "-O3", "-lineinfo", "-verbose", "-Xptxas=-v", *lto, *(["-ptx"] if ptx else [])]
    handle = nvjitlink.create(len(options), options)
    try:
        for kind, data in inputs:
            nvjitlink.add_data(handle, getattr(nvjitlink.InputType, kind), data, len(data), kind)
        nvjitlink.complete(handle)
        kind = "ptx" if ptx else "cubin"
        code = bytearray(getattr(nvjitlink, f"get_linked_{kind}_size")(handle))
        getattr(nvjitlink, f"get_linked_{kind}")(handle, code)
        return bytes(code).rstrip(b"\0") if ptx else bytes(code), log_of(handle, "info")
    except nvjitlink.nvJitLinkError as error:
        raise BuildError(f"{chip}: {log_of(handle, 'error').strip() or error}") from None
    finally:
        nvjitlink.destroy(handle)


def log_of(handle, kind):
    """The linker's "info" or "error" text."""
    text = bytearray(getattr(nvjitlink, f"get_{kind}_log_size")(handle))
    if text:
        getattr(nvjitlink, f"get_{kind}_log")(handle, text)
    return bytes(text).rstrip(b"\0").decode()


# ------------------------------------------------------------------------------------------------ the disk cache
def kept(name, make):
    """The bytes of a file of the cache folder, made and stored if it is not there.

    The folder may be deleted at any time; one that cannot be written is no error.
    """
    path = cache_directory() / "kernels" / name
    with contextlib.suppress(OSError):
        return path.read_bytes()
    data = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{name}.{os.getpid()}.{threading.get_ident()}")
        draft.write_bytes(data)
        draft.replace(path)
    return data


def on_disk(kernel, chip):
    """Whether its machine code was made before."""
    return (cache_directory() / "kernels" / f"{stem(kernel, chip)}.cubin").exists()


@functools.cache
def stem(kernel, chip):
    """A cache file's name without its ending: kernel, chip and a digest of everything the code depends on."""
    parts = [chip, kernel.signature, kernel.threads, kernel.min_blocks, kernel.sources, kernel.whole, versions(),
             *fingerprint(kernel.function, {})]
    return f"{kernel.name}-{chip}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}"


@functools.cache
def versions():
    """The compilers' versions, and the text of the two files that shape what they are given."""
    found = [f"{d.metadata['Name']} {d.version}" for name in VERSIONED for d in distributions(name)]
    shaped = [Path(__file__).with_name(name).read_text() for name in ("ptx_factory.py", "build.py")]
    return (*found, nvjitlink.version(), *shaped)


def distributions(name):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        yield importlib.metadata.distribution(name)


def fingerprint(thing, seen):
    """Strings that change whenever the code made from `thing` may: a function's text and all it refers to."""
    if hasattr(thing, "instruction"):
        return [repr(thing.instruction)]
    thing = getattr(thing, "py_func", thing)
    if isinstance(thing, python_types.FunctionType) and hasattr(thing, "unrolled_source"):
        if thing in seen:
            return [f"function {seen[thing]}"]            # which one: of two seen, either may be called here
        seen[thing] = len(seen)
        code = thing.__code__                             # file and lines too: the PTX's line info names them
        return [thing.unrolled_source, code.co_filename, str([line for *_, line in code.co_lines()])] + [
            part for used in references(thing) for part in fingerprint(used, seen)]
    if isinstance(thing, (tuple, list)):
        return [part for element in thing for part in fingerprint(element, seen)]
    module = inspect.getmodule(thing)
    ours = module is not None and module.__name__.startswith(__package__) and getattr(module, "__file__", None)
    return [Path(module.__file__).read_text() if ours else repr(thing) if module is None else
            f"{module.__name__}.{getattr(thing, '__qualname__', thing)}"]


def references(function):
    """The values of the outer names and dotted names (`ptx.load_x4`) in an unrolled function's text."""
    seen = function.__globals__
    for name in function.mentions:
        if isinstance(name, tuple):
            if inspect.ismodule(seen.get(name[0])):
                yield getattr(seen[name[0]], name[1])
        elif name in seen and not inspect.ismodule(seen[name]):
            yield seen[name]
