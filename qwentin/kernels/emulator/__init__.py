"""Executes the PTX that numba or NVRTC produced, on numpy, checking every access: parity on a machine with no GPU.

    program = load(ptx_text)                          # once; Unsupported names what it does not know
    launch(program, grid=(8, 1, 1), block=(128, 1, 1), args=[x, out, np.uint32(3)], unwritten=[out])

The way of a kernel, one module a step:
    parse, lower         text -> functions -> one flat list of instructions, names resolved, calls inlined
    blocks, asyncregs    -> basic blocks, numbered so that diverged threads meet again; wgmma's registers checked
    compile, emit_*      -> Python source over arrays of shape [threads], which calls
    arithmetic, formats  what single instructions compute, and number formats
    group                the state of the blocks that run together, made of
                         threads, access, shared, memory, warp, matrix, wgmma, copies, mbarrier
    order, races         who has synchronised with whom, and which accesses therefore race
    schedule, launch     which threads run next; from arguments to groups of blocks

It is a sanitizer. A Fault names the instruction, its Python line (where the PTX has line info), block and thread:
out of bounds, misaligned, a read of what nothing wrote, a race, a divergent barrier, a deadlock, a wait that is too
short, a missing fence. Not modelled: clusters of several blocks, tensor maps, textures, clocks, and the rounding
inside tensor cores (sums are float64, rounded once: layouts are exact, tolerances come from the chip).
"""
from .errors import Fault, PtxError, Unsupported
from .launch import launch
from .memory import GlobalMemory
from .program import Program

__all__ = ["load", "launch", "GlobalMemory", "Program", "PtxError", "Unsupported", "Fault"]


def load(ptx_text, entry=None):
    """A kernel, parsed and compiled, to be launched any number of times.

    ptx_text: one PTX text, or a list of texts that call one another. entry: the kernel's name, where there are
    several. Raises Unsupported for anything that the emulator does not know."""
    return Program(ptx_text, entry)
