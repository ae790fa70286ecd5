"""Try a kernel: run, check, time, read it. numpy in, numpy out, on the GPU if there is one, else on the emulator.

    >>> from qwentin.kernels import lab, rmsnorm
    >>> lab.check(rmsnorm)                               # every case of CASES against the reference
    >>> lab.run(rmsnorm, rmsnorm.make(rng, rows=2))      # the outputs, by name
    >>> print(lab.sass(rmsnorm, dict(rows=1), "sm_120a"))
    >>> lab.time(rmsnorm, rows=1, d=5120)                # on a GPU only

What a kernel module must have (README.md walks through one): `ref`, `launch`, `CASES`, `make`, `cost`, `OUTPUTS`
(name -> parity.Output), perhaps `SCRATCH` (names of workspaces), and for the codegen test `REGISTERS` (the ceiling) and
`SASS` (chip -> opcodes it promises).
`make` gives every argument of `launch`, outputs as empty arrays. An output that `ref` takes too is updated in place:
it goes in with its contents; every other output goes in full of NaN. Both lie between guards.
"""
import inspect
import statistics
from dataclasses import dataclass, field

import numpy as np

from ..device import Event
from . import build, disassembler, machines
from .parity import Error, compare, guarded, guards_kept, unguarded

SEED = 0                              # of a case's random inputs
TIMED_FLOPS = 2e10                    # a reference of more work than this takes minutes: time on the word of CASES
MILLISECONDS = 20                     # length of one measurement: 40,000 steps of the event clock
REPEATS = 7                           # measurements; the median counts


@dataclass
class Checked:
    """One case's comparison: an Error for each output, by name."""
    case: dict
    errors: list[Error]

    @property
    def worst(self):
        """The output that uses most of its tolerance."""
        return max(self.errors, key=lambda e: e.used)

    def __str__(self):
        bad = [str(e) for e in self.errors if e.used > 1]
        return f"{spelled(self.case)}  " + ("; ".join(["WRONG", *bad]) if bad else "; ".join(map(str, self.errors)))


@dataclass
class Report:
    """All cases of a kernel on one machine; prints as a table."""
    kernel: str
    machine: str
    cases: list[Checked] = field(default_factory=list)

    @property
    def ok(self):
        return all(e.used <= 1 for c in self.cases for e in c.errors)

    @property
    def worst(self):
        """The case that uses most of its tolerance."""
        return max(self.cases, key=lambda c: c.worst.used)

    def __repr__(self):
        return "\n".join([f"{self.kernel} on {self.machine}: {'ok' if self.ok else 'WRONG'}"]
                         + [f"  {c}" for c in self.cases])


@dataclass
class Timing:
    """How long one launch takes on a device, of graph replays over rotating buffers."""
    kernel: str
    machine: str
    case: dict
    us: float
    bytes: float
    flops: float
    bandwidth: float                  # of the device, bytes/s
    copies: int                       # sets of buffers rotated through

    def __repr__(self):
        rate = self.bytes / self.us * 1e6
        return (f"{self.kernel} {spelled(self.case)} on {self.machine}: {self.us:.2f} us, {rate / 1e9:.0f} GB/s "
                f"({rate / self.bandwidth:.0%} of the memory's {self.bandwidth / 1e9:.0f}), "
                f"{self.flops / self.us / 1e6:.1f} TFLOP/s, {self.copies} buffer sets")


def spelled(case):
    """A case as a person would write it."""
    return " ".join(f"{k}={v}" for k, v in case.items()) or "default"


def name_of(module):
    """A kernel module's own name."""
    return module.__name__.rpartition(".")[2]


def in_place(module):
    """The outputs whose old contents count: those that the reference takes."""
    return set(module.OUTPUTS) & set(inspect.signature(module.ref).parameters)


def fitting(module, machine):
    """The machine, or an emulator of the module's own chip if the module has no form for the machine's."""
    return machine if portable(module) or machine.chip in module.SASS else machines.Emulator(next(iter(module.SASS)))


def portable(module):
    """Whether a module runs on any chip: it promises code for every one that the tests compile for."""
    return set(build.CHIPS) <= set(module.SASS)


# ------------------------------------------------------------------------------------------------ run and check
def run(module, arguments, machine=None):
    """Launch on numpy arguments (as `make` gives them, outputs included): output name -> numpy array.

    The arguments are left as they are. ValueError if something was written outside an output.
    """
    machine = machine or fitting(module, machines.default())
    kept, scratch, stream, given, fetch = in_place(module), getattr(module, "SCRATCH", ()), machine.start(), {}, {}
    for name, value in arguments.items():
        if name in module.OUTPUTS or name in scratch:
            view, whole = guarded(value, poison=name not in kept)
            given[name], fetch[name] = machine.output(view, whole, fresh=name not in kept)
        else:
            given[name] = machine.input(value) if isinstance(value, np.ndarray) else value
    module.launch(stream, **given)
    out = {}
    for name, get in fetch.items():
        like, whole = arguments[name], get()
        if not guards_kept(whole, like.dtype):
            raise ValueError(f"{name_of(module)} wrote outside {name} {like.shape}")
        if name in module.OUTPUTS:
            out[name] = unguarded(whole, like)
    return out


def check_case(module, case, machine=None, seed=SEED):
    """One case against the reference."""
    arguments = module.make(np.random.default_rng(seed), **case)
    takes = inspect.signature(module.ref).parameters
    want = module.ref(**{k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items() if k in takes})
    got, kept = run(module, arguments, machine), in_place(module)
    if set(want) != set(module.OUTPUTS):
        raise ValueError(f"{name_of(module)}: ref gives {sorted(want)}, OUTPUTS says {sorted(module.OUTPUTS)}")
    return Checked(case, [compare(n, o, got[n], want[n], arguments[n] if n in kept else None)
                          for n, o in module.OUTPUTS.items()])


def check(module, machine=None, seed=SEED):
    """Every case of the module against its reference: a Report."""
    machine = machine or fitting(module, machines.default())
    return Report(name_of(module), machine.name, [check_case(module, c, machine, seed) for c in module.CASES])


# ------------------------------------------------------------------------------------------------ read
def kernels(module, case=None):
    """The `build.Kernel`s that a case launches (the first of CASES by default); nothing runs."""
    recorder = machines.Recorder()
    module.launch(recorder, **module.make(np.random.default_rng(SEED), **(module.CASES[0] if case is None else case)))
    return recorder.kernels


def ptx(module, case=None, chip="sm_90a"):
    """The PTX of a case, as text."""
    return "\n".join(k.ptx(chip) for k in kernels(module, case))


def sass(module, case=None, chip="sm_90a"):
    """The chip's instructions of a case, as text."""
    return "\n".join(f"// {k.name}\n{disassembler.sass(k.cubin(chip))}" for k in kernels(module, case))


def resources(module, case=None, chip="sm_90a"):
    """[(kernel name, registers a thread, shared bytes a block, spilled bytes a thread)] of a case."""
    found = []
    for kernel in kernels(module, case):
        cubin = kernel.cubin(chip)
        found.append((kernel.name, cubin.registers, cubin.shared + kernel.shared, cubin.spills + cubin.stack))
    return found


# ------------------------------------------------------------------------------------------------ time
def time(module, machine=None, **case):
    """Median time of a launch on the GPU: a Timing. Refused with ValueError if the kernel is not correct there."""
    machine = machine or fitting(module, machines.default())
    if not isinstance(machine, machines.Gpu):
        raise ValueError(f"time needs a GPU; this is the {machine.name}")
    cost = module.cost(**case)
    report = check(module, machine)
    if cost["flops"] <= TIMED_FLOPS:
        report.cases.append(check_case(module, case, machine))
    if not report.ok:
        raise ValueError(f"a kernel that is wrong is not timed:\n{report}")
    arguments = module.make(np.random.default_rng(SEED), **case)
    sets = rotation(machine.device, arguments)
    us = measured(machine, lambda i: module.launch(machine.stream, **sets[i % len(sets)]), len(sets))
    return Timing(name_of(module), machine.name, case, us, cost["bytes"], cost["flops"], machine.device.bandwidth,
                  len(sets))


def rotation(device, arguments):
    """Copies of the arguments on the device, together more than twice its L2: no launch finds its data there."""
    nbytes = sum(a.nbytes for a in arguments.values() if isinstance(a, np.ndarray))
    count = max(1, min(-(-2 * device.l2_bytes // max(nbytes, 1)) + 1, 256))
    return [{k: device.upload(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
            for _ in range(count)]


def measured(machine, launch, sets):
    """Median microseconds of `launch(i)`, i running over the buffer sets, replayed as one graph."""
    stream, launches = machine.stream, max(sets, 20)
    launch(0)
    stream.synchronize()
    with stream.capture() as graph:
        for i in range(launches):
            launch(i)

    def replay(times):
        start, end = Event(), Event()
        start.record(stream)
        for _ in range(times):
            graph.launch(stream)
        end.record(stream)
        return end.seconds_since(start)
    replay(2)
    times = max(1, round(MILLISECONDS / 1e3 / max(replay(2) / 2, 1e-6)))
    return statistics.median(replay(times) for _ in range(REPEATS)) / times / launches * 1e6


# ------------------------------------------------------------------------------------------------ the table
def table(modules, machine=None):
    """Lines of text: what each chip's machine code takes, how many cases, the worst error and where. One a kernel."""
    yield (f"{'':<14}" + "".join(f"{chip:<24}" for chip in build.CHIPS)).rstrip()
    yield f"{'kernel':<14}" + len(build.CHIPS) * f"{'regs':<6}{'shared':<8}{'spills':<10}" + "cases  worst error"
    for module in modules:
        report, columns = check(module, fitting(module, machine or machines.default())), ""
        for chip in build.CHIPS:
            found = resources(module, chip=chip) if chip in module.SASS else []
            columns += "".join(f"{max((row[i] for row in found), default='-'):<{width}}"
                               for i, width in ((1, 6), (2, 8), (3, 10)))
        case, error = report.worst, report.worst.worst
        worst = f"{error.worst:.1e} in {error.name}{list(error.at)}, {error.used:.0%} of its tolerance: {spelled(case.case)}"
        yield f"{report.kernel:<14}{columns}{len(report.cases):<7}{worst if report.ok else 'WRONG'}"
        if not report.ok:
            yield repr(report)
