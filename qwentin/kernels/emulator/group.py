"""A group of blocks that run together: the state `S` that generated code works on."""
import numpy as np

from .access import Access
from .allotment import Allotment
from .copies import Copies
from .dtypes import u4
from .errors import Fault
from .matrix import Matrix
from .mbarrier import Mbarriers
from .order import Order
from .races import GlobalRaces
from .shared import SharedMemory
from .spaces import SHARED_BASE
from .threads import Threads
from .warp import Warps
from .wgmma import Wgmma

DYNAMIC_ALIGN = 16                    # of dynamic shared memory, which follows the static part, if it asks for no more


class Group:
    """One part for each kind of work; messages name the instruction, the block and the thread."""

    def __init__(self, program, memory, launch, ids):
        self.program, self.params, self.symbols = program, launch.params, launch.symbols
        self.threads = Threads(launch.grid, launch.block, ids, launch.per)
        static, dynamic = program.module.shared_bytes, launch.shared_bytes
        align = max([DYNAMIC_ALIGN, *program.module.dynamic.values()])
        self.dynamic_base = SHARED_BASE + (-(-static // align) * align if dynamic else static)
        size = self.dynamic_base - SHARED_BASE + dynamic
        self.sizes = {"%dynamic_smem_size": dynamic, "%total_smem_size": size}
        self.order = Order(self.threads, program.partial_sync, launch.clock)
        self.shared = SharedMemory(self.threads, self.order, size, program.granule_shift, self.fault)
        self.access = Access(self, memory, GlobalRaces(self.threads, self.order, launch.news, self.fault),
                             program.local_bytes)
        self.warps = Warps(self)
        self.allotment = Allotment(self)
        self.matrix, self.wgmma = Matrix(self), Wgmma(self)
        self.mbarriers = Mbarriers(self) if program.partial_sync else None
        self.copies = Copies(self, self.access, self.mbarriers)
        self.carry = np.zeros(self.threads.count, bool)
        self.loaded_params = {}
        zeros = {t: np.zeros(self.threads.count, t) for t in set(program.register_types)}
        self.registers = [zeros[t] for t in program.register_types]      # arrays are replaced, never written (compile.py)

    # ---- what generated code calls
    def full(self, x):
        """A value as an array over the threads."""
        return x if np.ndim(x) else np.full(self.threads.count, x)

    def both(self, mask, guard):
        return guard if mask is None else mask & guard

    def special(self, name):
        return self.threads.special(name, self.sizes)

    def symbol(self, name, kind):
        module = self.program.module
        if name in module.shared:
            return kind(module.shared[name])
        return kind(self.dynamic_base if name in module.dynamic else self.symbols[name])

    def param(self, name, offset, kind):
        key = name, offset, kind
        if key not in self.loaded_params:
            raw = self.params[name][offset:offset + np.dtype(kind).itemsize]
            self.loaded_params[key] = np.full(self.threads.count, np.frombuffer(raw, kind)[0])
        return self.loaded_params[key]

    def split(self, register, kind, n):
        """mov {a, b, ...}, r: the parts of a register, low first."""
        return list(np.ascontiguousarray(np.ascontiguousarray(register).view(kind).reshape(-1, n).T))

    def join(self, parts, kind):
        """mov r, {a, b, ...}"""
        rows = np.stack([np.broadcast_to(p, (self.threads.count,)) for p in parts], axis=1)
        return np.ascontiguousarray(rows).view(kind).ravel()

    def fault_if_any(self, at, message, mask):
        thread = self.threads.chosen(mask)
        if thread.size:
            self.fault(at, message, thread[0])

    def external(self, name, mask, at):
        """A call out of the PTX: an assertion or exception handler, or a device function that was not linked in."""
        if name != "vprintf":
            self.fault_if_any(at, f"call of {name}, which is not in the PTX", mask)

    def fault(self, at, message, thread):
        ins = self.program.instructions[at]
        raise Fault(f"{message} [{self.threads.name(int(thread))}]", ins.text, ins.place)

    def lane_is(self, lane):
        return self.threads.lane == lane.astype(u4)
