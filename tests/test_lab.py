"""lab: what a person at the REPL gets, and that wrong kernels are caught, named and not timed."""
import doctest
import types as python_types
from pathlib import Path

import numpy as np
import pytest

from qwentin.device import DeviceError
from qwentin.kernels import __main__, build, emulator, lab, machines, ptx, rmsnorm, swiglu
from qwentin.kernels.build import kernel
from qwentin.kernels.parity import Output
from qwentin.kernels.ptx import u32, u64

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = machines.Emulator()


def doubling(body):
    """A kernel module that should give out = 2 x, its kernel's last lines being `body(x, out, n)`."""
    def make(rng, n=40):
        return dict(x=rng.standard_normal(n).astype(np.float32), out=np.empty(n, np.float32))

    def launch(stream, x, out):
        stream.launch(body, 1, x, out, x.shape[0])
    module = python_types.ModuleType("qwentin.kernels.doubling", "doubling: out = 2 x")
    module.ref = lambda x: dict(out=2 * x.astype(np.float64))
    module.make, module.launch, module.cost = make, launch, lambda n=40: dict(bytes=8 * n, flops=n)
    module.CASES, module.OUTPUTS = (dict(n=40), dict(n=64)), {"out": Output()}
    module.SASS = {"sm_90a": (), "sm_120a": ()}
    return module


@kernel(threads=64)
def right(x: u64, out: u64, n: u32):
    i = ptx.thread_x()
    if i < n:
        ptx.store_f32(out + i * 4, 2.0 * ptx.load_f32(x + i * 4))


@kernel(threads=64)
def off_by_one(x: u64, out: u64, n: u32):
    i = ptx.thread_x()
    if i < n - 1:
        ptx.store_f32(out + i * 4, 2.0 * ptx.load_f32(x + i * 4))


@kernel(threads=64)
def too_far(x: u64, out: u64, n: u32):
    i = ptx.thread_x()
    ptx.store_f32(out + i * 4, 2.0 * ptx.load_f32(x + i % n * 4))


@kernel(threads=64)
def reads_output(x: u64, out: u64, n: u32):
    i = ptx.thread_x()
    if i < n:
        ptx.store_f32(out + i * 4, 2.0 * ptx.load_f32(x + i * 4) + 0.0 * ptx.read_f32(out + i * 4))


def test_the_lines_of_the_documentation_work_as_printed():
    """README, "Play with a kernel", line by line."""
    section = (ROOT / "README.md").read_text().split("## Play with a kernel")[1].split("\n## ")[0]
    lines = section.split("```python\n")[1].split("```")[0]
    example = doctest.DocTestParser().get_doctest(lines, {}, "README", "README.md", 0)
    assert len(example.examples) == 9
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example)
    assert runner.failures == 0


def test_check_reports_every_case():
    report = lab.check(doubling(right), EMULATOR)
    assert report.ok and len(report.cases) == 2
    assert repr(report).splitlines()[0] == "doubling on emulator (sm_90a): ok"
    assert repr(report).splitlines()[1].startswith("  n=40  out 0.00e+00 at [0]")


def test_an_element_nobody_wrote_is_found():
    report = lab.check(doubling(off_by_one), EMULATOR)
    assert not report.ok and report.worst.worst.first_bad == (39,)
    assert "n=40  WRONG; out: 1 of 40 wrong, the first at [39]: got nan" in repr(report)


def test_the_emulator_names_the_line_of_a_write_too_far():
    with pytest.raises(emulator.Fault) as caught:
        lab.check(doubling(too_far), EMULATOR)
    line = too_far.function.__code__.co_firstlineno + 2
    assert Path(__file__).name in str(caught.value) and str(line) in str(caught.value)


def test_an_output_may_not_be_read_before_it_is_written():
    with pytest.raises(emulator.Fault):
        lab.check(doubling(reads_output), EMULATOR)


def test_run_leaves_its_arguments_alone():
    module = doubling(right)
    arguments = module.make(np.random.default_rng(0))
    before = {k: v.copy() for k, v in arguments.items()}
    got = lab.run(module, arguments, EMULATOR)
    assert set(got) == {"out"} and (got["out"] == 2 * arguments["x"]).all()
    assert all((before[k].tobytes() == arguments[k].tobytes()) for k in before)


def test_ref_and_outputs_must_agree():
    module = doubling(right)
    module.OUTPUTS = {"out": Output(), "other": Output()}
    with pytest.raises(ValueError, match=r"doubling: ref gives \['out'\], OUTPUTS says \['other', 'out'\]"):
        lab.check(module, EMULATOR)


def test_reading_a_kernel_runs_nothing(monkeypatch):
    monkeypatch.setattr(emulator, "launch", None)
    assert [k.name for k in lab.kernels(rmsnorm)] == ["rmsnorm"]
    assert ".entry rmsnorm(" in lab.ptx(rmsnorm, chip="sm_120a")
    assert lab.sass(rmsnorm).startswith("// rmsnorm\n") and "LDG.E.128" in lab.sass(rmsnorm)
    (name, registers, shared, spills), = lab.resources(rmsnorm, dict(rows=1, d=5120), "sm_90a")
    assert name == "rmsnorm" and 0 < registers <= rmsnorm.REGISTERS and (shared, spills) == (128, 0)
    assert lab.kernels(rmsnorm, dict(rows=0, d=64)) == []


# ---------------------------------------------------------------------------------------------- time
class PretendGpu(machines.Gpu):
    """A Gpu whose kernels run on the emulator: the way to a Timing, without the clock."""

    def __init__(self, l2_bytes=1000):
        self.name, self.chip, self.stream = "pretend", "sm_90a", machines.EmulatorStream("sm_90a")
        self.device = python_types.SimpleNamespace(upload=np.array, l2_bytes=l2_bytes, bandwidth=1e12)

    def output(self, view, whole, fresh):
        return view, lambda: whole


def test_time_needs_a_gpu():
    with pytest.raises(ValueError, match=r"time needs a GPU; this is the emulator \(sm_90a\)"):
        lab.time(rmsnorm, EMULATOR, rows=1, d=64)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(lab, "measured", None)
    with pytest.raises(ValueError, match="a kernel that is wrong is not timed:\ndoubling on pretend: WRONG"):
        lab.time(doubling(off_by_one), PretendGpu(), n=40)


def test_a_timing_says_what_share_of_the_memory_it_reached(monkeypatch):
    launched = []

    def measured(machine, launch, sets):
        launch(0)
        launched.append(sets)
        return 2.0
    monkeypatch.setattr(lab, "measured", measured)
    timing = lab.time(doubling(right), PretendGpu(), n=64)
    assert launched == [5], "4 x 512 bytes are twice the L2 of 1000, and one more set"
    assert repr(timing) == ("doubling n=64 on pretend: 2.00 us, 0 GB/s (0% of the memory's 1000), 0.0 TFLOP/s, "
                            "5 buffer sets")
    timing.bytes, timing.flops = 1e6, 4e8
    assert "500 GB/s (50% of the memory's 1000), 200.0 TFLOP/s" in repr(timing)


def test_buffers_rotate_past_l2():
    device = python_types.SimpleNamespace(upload=np.array, l2_bytes=50 << 20)
    arguments = dict(x=np.zeros(1 << 20, np.uint8), eps=1.0, mask=None)
    sets = lab.rotation(device, arguments)
    assert len(sets) == 101 and sets[0]["x"] is not sets[1]["x"] and sets[7]["eps"] == 1.0
    assert len(lab.rotation(device, dict(x=np.zeros(200 << 20, np.uint8)))) == 2
    assert len(lab.rotation(device, dict(eps=1.0))) == 256


# ---------------------------------------------------------------------------------------------- machines
def test_without_a_gpu_the_emulator_is_the_machine(monkeypatch):
    def none(*_):
        raise DeviceError("No GPU.")
    monkeypatch.setattr(machines.Device, "open", none)
    machines.default.cache_clear()
    try:
        assert machines.default().name == "emulator (sm_90a)"
    finally:
        machines.default.cache_clear()


def test_a_kernel_of_one_chip_is_checked_on_that_chip():
    module = doubling(right)
    module.SASS = {"sm_120a": ()}
    assert lab.fitting(module, EMULATOR).name == "emulator (sm_120a)"
    assert lab.fitting(module, machines.Emulator("sm_120a")).chip == "sm_120a"
    assert lab.fitting(doubling(right), EMULATOR) is EMULATOR
    line = list(lab.table([module], EMULATOR))[2].split()
    assert line[:4] == ["doubling", "-", "-", "-"] and line[4].isdigit()


def test_an_emulator_launch_counts_its_arguments():
    with pytest.raises(ValueError, match="right takes 3 arguments, got 2"):
        machines.Emulator().start().launch(right, 1, np.zeros(4, np.float32), np.zeros(4, np.float32))


# ---------------------------------------------------------------------------------------------- the command
def test_the_command_prints_a_table(capsys):
    assert __main__.main(["rmsnorm", "swiglu", "--chip", "sm_120a"]) == 0
    head, chips, title, first, second = capsys.readouterr().out.splitlines()
    assert head == "on emulator (sm_120a)" and chips.split() == ["sm_90a", "sm_120a"] and title.split()[0] == "kernel"
    for line, module in ((first, rmsnorm), (second, swiglu)):
        words = line.split()
        assert words[0] == lab.name_of(module) and words[7] == str(len(module.CASES)) and "% of its tolerance" in line
        for at, chip in ((1, "sm_90a"), (4, "sm_120a")):
            (_, registers, shared, spills), = lab.resources(module, chip=chip)
            assert words[at:at + 3] == [str(registers), str(shared), str(spills)]


def test_the_command_shows_one_kernel_and_fails_with_it(capsys, monkeypatch):
    monkeypatch.setattr(__main__, "ALL", ("doubling",))
    for body, code, word in ((right, 0, "ok"), (off_by_one, 1, "WRONG")):
        monkeypatch.setattr(__main__, "module", lambda name, body=body: doubling(body))
        assert __main__.main(["doubling", "--chip", "sm_90a"]) == code
        out = capsys.readouterr().out
        assert f"doubling on emulator (sm_90a): {word}" in out and f"sm_120a: {body.name} takes" in out
    monkeypatch.setattr(__main__, "ALL", ("doubling", "doubling"))
    assert __main__.main(["--chip", "sm_90a"]) == 1 and "WRONG" in capsys.readouterr().out


def test_the_command_helps(capsys):
    for argv, code, words in ((["--help"], 0, "example:\n  python -m qwentin.kernels rmsnorm"),
                              (["softmax"], 2, "there is no kernel 'softmax'; there are embed, rmsnorm")):
        with pytest.raises(SystemExit) as caught:
            __main__.main(argv)
        captured = capsys.readouterr()
        assert caught.value.code == code and words in captured.out + captured.err
    assert build.CHIPS == ("sm_90a", "sm_120a")
