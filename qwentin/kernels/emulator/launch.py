"""Launching a program: arguments to parameters, blocks to groups, arrays to device addresses."""
import numpy as np

from .dtypes import i8, u8
from .errors import PtxError
from .group import Group
from .memory import GlobalMemory
from .races import News
from .schedule import Scheduler
from .spaces import WARP, WARPGROUP

TOGETHER = 4096                       # threads run together: enough to make numpy's overhead small, and fit caches
TOGETHER_POLLING = 1 << 17            # if blocks may wait for one another, all must run together
STEPS = 2_000_000
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
                "sm_120": 99 << 10}   # bytes a block


class Launch:
    """What all groups of one launch share. clock: where the next group's time starts; news: see races.py."""

    def __init__(self, program, grid, block, shared_bytes, params, symbols):
        self.grid, self.block, self.shared_bytes, self.params, self.symbols = grid, block, shared_bytes, params, symbols
        threads = block[0] * block[1] * block[2]
        if not 0 < threads <= 1024 or min(grid) < 1:
            raise PtxError(f"grid {grid} of blocks of {block} threads, wanted at least one block of 1 to 1024 threads")
        for name, sizes in program.limits.items():
            allowed = int(np.prod(sizes))
            if threads > allowed or name == "reqntid" and threads != allowed:
                raise PtxError(f"a block of {threads} threads, but the kernel says .{name} {allowed}")
        wanted, target = program.module.shared_bytes + shared_bytes, program.module.target
        allowed = SHARED_LIMIT.get(target.rstrip("af"), wanted)
        if wanted > allowed:
            raise PtxError(f"{program.name} wants {wanted} bytes of shared memory a block, {target} has {allowed}")
        unit = WARPGROUP if program.warpgroups else WARP
        self.per, self.clock = -(-threads // unit) * unit, 0
        self.news = News(self.per)


def three(shape):
    """A grid or block size, given as a number or as up to three."""
    shape = tuple(int(n) for n in shape) if isinstance(shape, (tuple, list)) else (int(shape),)
    return shape + (1,) * (3 - len(shape))


def launch(program, grid, block, args, shared_bytes=0, schedule=None, unwritten=(), memory=None, limit=STEPS):
    """Run a kernel to its end. Fault says what it did wrong; arrays are updated in place.

    args: one for each parameter: a numpy array (the kernel gets its u64 address; it must be C-contiguous), a pair
    (array, byte offset), or a numpy scalar of the parameter's exact width. Where the kernel takes numba array
    structures, arrays are passed as those. shared_bytes: dynamic shared memory. schedule: None, or a seed that
    shuffles blocks and warps. unwritten: the arrays (of args) that hold nothing yet; reading such bytes before the
    kernel wrote them is a fault. memory: a GlobalMemory whose arrays the kernel may reach beside its arguments.
    limit: blocks of code a group may execute before it counts as stuck.
    """
    grid, block, memory = three(grid), three(block), memory or GlobalMemory()
    params = bound(program, args, memory, [id(a) for a in unwritten])
    symbols = {name: memory.add(data, name) for name, data in copies(program.module.data).items()}
    run = Launch(program, grid, block, shared_bytes, params, symbols)
    memory.new_launch()
    ids = np.arange(grid[0] * grid[1] * grid[2])
    if schedule is not None:
        ids = np.random.default_rng(schedule).permutation(ids)
    step = max(1, (TOGETHER_POLLING if program.polls else TOGETHER) // run.per)
    with np.errstate(all="ignore"):
        for start in range(0, len(ids), step):
            group = Group(program, memory, run, ids[start:start + step])
            Scheduler(group, None if schedule is None else schedule + start, limit).run()
            run.clock = group.order.tick()


def copies(variables):
    """Module variables, fresh for this launch."""
    return {name: data.copy() for name, data in variables.items()}


def bound(program, args, memory, unwritten):
    """{parameter name: its bytes}"""
    addresses = []
    for i, a in enumerate(args):
        array, offset = a if isinstance(a, tuple) else (a, 0)
        if isinstance(array, np.ndarray):
            address = memory.add(array, f"argument {i}", id(array) in unwritten)
            addresses.append((u8(address + offset), array))
        elif isinstance(a, np.generic):
            addresses.append((a, None))
        else:
            raise PtxError(f"argument {i} is a {type(a).__name__}, wanted a numpy array or scalar")
    values = [v for v, _ in addresses]
    if len(values) != len(program.params):
        values = [v for value, array in addresses for v in (structure(value, array) if array is not None else (value,))]
    if len(values) != len(program.params):
        raise PtxError(f"{len(args)} arguments for the {len(program.params)} parameters of {program.name}")
    for i, ((name, size), value) in enumerate(zip(program.params, values)):
        if value.dtype.itemsize != size:
            raise PtxError(f"parameter {i} of {program.name} takes {size} bytes, got {value.dtype} {value}")
    return {name: value.tobytes() for (name, _), value in zip(program.params, values)}


def structure(address, array):
    """numba's layout of an array argument: meminfo, parent, nitems, itemsize, data, shape .., strides .."""
    return (u8(0), u8(0), u8(array.size), u8(array.itemsize), address, *map(i8, array.shape), *map(i8, array.strides))
