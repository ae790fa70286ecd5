"""The PTX instructions: every one assembles on the chips that have it, and says what the factory was told."""
import inspect
import re

import pytest
from numba.cuda import types

from qwentin.kernels import build, ptx, ptx_async, ptx_math, ptx_matrix, ptx_memory, ptx_thread, ptx_wgmma
from qwentin.kernels.disassembler import opcodes
from qwentin.kernels.ptx import f32, u32, u64
from qwentin.kernels.ptx_factory import MEMORY, ORDERED, PURE, constraints, imm, instruction, written
from qwentin.kernels.unroll import static_range

FAMILIES = (ptx_async, ptx_math, ptx_matrix, ptx_memory, ptx_thread, ptx_wgmma)
INSTRUCTIONS = {name: thing for family in FAMILIES for name, thing in vars(family).items()
                if hasattr(thing, "instruction")}
CHIPS = {name: ("sm_90a", "sm_120a") for name in INSTRUCTIONS}
CHIPS.update({name: ("sm_90a",) for name in INSTRUCTIONS if name.startswith("wgmma")})
CHIPS.update({name: ("sm_120a",) for name in INSTRUCTIONS if re.match(r"ldmatrix_fp|mma_e\dm\d_e", name)})
# What the portable kernels may use: must assemble for sm_80 too.
NEWER = re.compile(r"mbarrier_(arrive_expect|expect|try)|bulk|fence_(async|mbarrier)|e4m3|ldmatrix_fp|stmatrix|mma_e|"
                   r"launch_dependents|wait_dependencies|wgmma|registers_")


def argument(name, kind):
    """An argument of that type in a kernel (a: u64, b: u32, c: f32)."""
    if kind is imm:
        return "64" if name in ("threads", "registers") else "0"
    if isinstance(kind, types.BaseTuple):
        return "(" + "".join(argument(name, k) + ", " for k in kind) + ")"
    return {"uint64": "a", "uint32": "b", "float32": "c", "uint16": "u16(b)"}[str(kind)]


def stored(kind, value):
    """Statements that keep a result alive."""
    if isinstance(kind, types.BaseTuple):
        return "; ".join(stored(k, f"{value}[{i}]") for i, k in enumerate(kind))
    return f"ptx.store_{ {'uint16': 'u16', 'uint32': 'u32', 'uint64': 'u64', 'float32': 'f32'}[str(kind)] }(a, {value})"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """name -> a kernel that does one instruction and stores what it gives."""
    path = tmp_path_factory.mktemp("ptx") / "single.py"
    text = "from qwentin.kernels import ptx\nfrom qwentin.kernels.build import kernel\n" \
           "from qwentin.kernels.ptx import f32, u16, u32, u64\n"
    for name, thing in INSTRUCTIONS.items():
        _, outputs, inputs, _, _ = thing.instruction
        call = f"ptx.{name}({', '.join(argument(*i) for i in inputs)})"
        body = f"x = {call}; {stored(outputs[0][1], 'x')}" if outputs else call
        text += f"@kernel(threads=128)\ndef {name}(a: u64, b: u32, c: f32):\n    {body}\n"
    path.write_text(text)
    namespace = {"__name__": "single"}
    exec(compile(text, str(path), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_every_instruction_assembles(name, kernels):
    chips = CHIPS[name] + (() if NEWER.search(name) else ("sm_80",))
    for chip in chips:
        cubin = kernels[name].cubin(chip)
        assert cubin.stack == cubin.spills == 0


@pytest.mark.parametrize("name", [n for n in INSTRUCTIONS if len(CHIPS[n]) == 1])
def test_a_chip_refuses_the_other_chips_instruction(name, kernels):
    other = "sm_120a" if CHIPS[name] == ("sm_90a",) else "sm_90a"
    with pytest.raises(build.BuildError, match=r"not supported|cannot be compiled"):
        kernels[name].cubin(other)


def test_no_ptx_text_outside_the_families():
    """A kernel names instructions; InlineAsm and `instruction(` stand in the factory and the families alone."""
    folder = build.Path(build.__file__).parent
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("ptx"):
            assert not re.search(r"InlineAsm|\binstruction\(", path.read_text()), path.name


def test_operands_are_numbered_through():
    outputs, inputs = dict(d=ptx.f32x4), dict(a=ptx.u32x2, n=imm, c=f32, p=u64)
    text = written("op <d>, <a>, <n>, <c>, [<p>], <a.1>, <d.3>;", outputs, inputs, dict(n=7))
    assert text == "op {$0, $1, $2, $3}, {$4, $5}, 7, $6, [$7], $5, $3;"
    assert constraints(outputs, inputs, MEMORY, None) == "=f,=f,=f,=f,r,r,f,l,~{memory}"
    assert constraints(dict(d=ptx.f32x2), dict(acc=ptx.f32x2, a=u64), ORDERED, "acc") == "=f,=f,0,1,l"


def test_a_name_that_is_no_operand_is_refused():
    with pytest.raises(ValueError, match=r"names \['q'\]"):
        instruction("mov.u32 <d>, <q>;", dict(d=u32), effect=PURE)


def test_an_immediate_must_be_known():
    @build.kernel(threads=32)
    def waits(a: u64, b: u32):
        ptx.copy_wait(b)
    with pytest.raises(Exception, match="must be a number known at compile time"):
        waits.ptx("sm_90a")


def test_a_warp_instruction_stays_one():
    """Without `convergent` LLVM makes two loops of this one, one for lane 0: the lanes would never meet in a redux."""
    @build.kernel(threads=32)
    def loop(a: u64, n: u32):
        x = ptx.lane()
        for _ in range(n):
            x = ptx.reduce_max(x)
            if ptx.lane() == 0:
                ptx.store_u32(a, x)
    for chip in build.CHIPS:
        assert loop.ptx(chip).count("redux.sync") == 1


def test_wgmma_keeps_its_accumulators_in_place():
    step = ptx.wgmma(64, "e4m3", "e4m3")

    @build.kernel(threads=128)
    def four(out: u64, a: u64, b: u64):
        acc = (0.0,) * 32
        ptx.wgmma_fence()
        for k in static_range(4):
            acc = step(acc, a + 2 * k, b + 2 * k)
        ptx.wgmma_commit()
        ptx.wgmma_wait(0)
        for j in static_range(32):
            ptx.store_f32(out + (ptx.thread_x() * 32 + j) * 4, acc[j])
    cubin = four.cubin("sm_90a")
    assert cubin.spills == cubin.stack == 0 and cubin.registers <= 64
    assert sum(op.startswith("QGMMA.64x64x32") for op in opcodes(cubin)) == 4


def test_wgmma_refuses_other_widths():
    with pytest.raises(ValueError, match="steps of 8, got 12"):
        ptx.wgmma(12, "f16", "f16")
    with pytest.raises(ValueError, match="only 16-bit operands may be MN-major, got e4m3"):
        ptx.wgmma(16, "e4m3", "e4m3", b_by_k=True)


def test_calls_take_names_in_order():
    assert list(inspect.signature(ptx.mma_f16).parameters) == ["typingctx", "a", "b", "c"]
