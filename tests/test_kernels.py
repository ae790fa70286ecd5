"""Every kernel of ALL: correct in the emulator on both chips' PTX, and the machine code it promises.

The second chip's PTX runs with blocks and warps shuffled: an order that a kernel forgot to enforce shows as a wrong result
even where no two accesses race within a block.
"""
import inspect

import numpy as np
import pytest

from qwentin import kernels
from qwentin.kernels import build, lab, machines, packed
from qwentin.kernels.disassembler import opcodes

CASES = [pytest.param(name, i, id=f"{name}-{lab.spelled(case).replace(' ', '-')}")
         for name in kernels.ALL for i, case in enumerate(kernels.module(name).CASES)]


def case_of(name, i):
    module = kernels.module(name)
    return module, module.CASES[i]


def chips_of(module):
    """The chips a module promises code for: both, or its own."""
    return [chip for chip in build.CHIPS if chip in module.SASS]


@pytest.mark.parametrize("name, i", CASES)
def test_parity_in_the_emulator(name, i):
    module, case = case_of(name, i)
    for chip in chips_of(module):
        checked = lab.check_case(module, case, machines.Emulator(chip, None if chip == build.CHIPS[0] else i))
        assert all(error.used <= 1 for error in checked.errors), f"{chip}: {checked}"


@pytest.mark.parametrize("name, i", CASES)
def test_machine_code(name, i):
    module, case = case_of(name, i)
    for chip in chips_of(module):
        found = []
        for kernel in lab.kernels(module, case):
            cubin = kernel.cubin(chip)
            found += opcodes(cubin)
            assert cubin.spills == cubin.stack == 0
            assert "Performance Loss" not in cubin.log, cubin.log         # wgmma serialised, setmaxnreg ignored
            assert cubin.registers <= module.REGISTERS, f"{chip}: {cubin.registers} registers"
            assert ".f64" not in kernel.ptx(chip), "a bare Python float?"
            assert not {"LDL", "STL", "DADD", "DMUL", "DFMA"} & {op.split(".")[0] for op in found}
        for promised in module.SASS[chip] if found else ():           # of a case's kernels together
            assert any(op.startswith(promised) for op in found), f"{chip}: no {promised} in {sorted(set(found))}"


@pytest.mark.parametrize("name", kernels.ALL)
def test_the_shape_of_a_module(name):
    """DESIGN: docstring, ref, build, launch, CASES, make, cost; names agree between them."""
    module = kernels.module(name)
    launch, ref = (list(inspect.signature(f).parameters) for f in (module.launch, module.ref))
    assert module.__doc__.startswith(f"{name}: ")
    assert launch[0] == "stream" and set(ref) <= set(launch)
    assert set(module.OUTPUTS) <= set(launch)
    assert hasattr(module.build, "cache_info"), "build is kept by functools.cache"
    assert chips_of(module) and set(module.SASS) <= set(build.CHIPS)
    for case in module.CASES:
        arguments = module.make(np.random.default_rng(0), **case)
        assert set(arguments) <= set(launch[1:])
        cost = module.cost(**case)
        assert set(cost) == {"bytes", "flops"} and all(v >= 0 for v in cost.values())
        again = module.make(np.random.default_rng(0), **case)
        for key in set(arguments) - set(module.OUTPUTS) - set(getattr(module, "SCRATCH", ())):
            assert np.array_equal(arguments[key], again[key]), f"make is not a function of its generator: {key}"


# What a launch must refuse: kernel, the case it starts from, what is changed, words of the sentence.
F32, U16, U32 = np.float32, np.uint16, np.uint32
REFUSALS = [
    ("embed", dict(format="bf16"), dict(format="fp4"), "format must be one of bf16, e4m3, e2m3, got 'fp4'"),
    ("embed", dict(format="bf16"), dict(table=np.zeros((50, 64), np.uint8)), "must be uint16 (50, 5120), got uint8"),
    ("embed", dict(format="bf16"), dict(ids=np.zeros(1, np.int64)), "ids must be i32 or u32 (1,), got int64"),
    ("embed", dict(), dict(scale=None), "scale must be f32 or ue8m0 (u8), got None"),
    ("embed", dict(), dict(scale=np.zeros((50, 48), F32)), "a group that divides 64 columns"),
    ("embed", dict(), dict(out=np.zeros((1, 100), F32)), "wants a positive multiple of 64"),
    ("rmsnorm", dict(), dict(weight=np.zeros(5119, F32)), "weight must have shape (5120,), got (5119,)"),
    ("rmsnorm", dict(), dict(hidden=np.zeros((1, 5120), np.float64)), "hidden must be f32 or bf16, got dtype float64"),
    ("rmsnorm", dict(), dict(hidden=np.zeros((1, 12), F32)), "hidden has 12 columns"),
    ("swiglu", dict(), dict(gate_up=np.zeros((1, 17408), F32)), "gate_up must have shape (1, 34816)"),
    ("swiglu", dict(), dict(out=np.zeros((1, 12), F32)), "out has 12 columns"),
    ("gemv_glu", dict(n=128, k=128), dict(n=112), "n a multiple of 128, got 112"),
    ("gemv_glu", dict(n=128, k=128), dict(out=np.zeros((1, 62), np.float16)), "W even and at least 64, got (1, 62)"),
    ("gemv_residual", dict(n=128, k=128), dict(weight=np.zeros(64, F32)), "weight must be float32 (128,), got"),
    ("gemv_residual", dict(n=128, k=128), dict(squares=np.zeros(31, F32)), "squares must be f32 of at least (1, 1, 4, 8)"),
    ("gemm_sm120a", dict(m=1, n=128, k=128), dict(n=16, gated=True), "n a positive multiple of 16, of 128 if gated"),
    ("gemm_sm120a", dict(m=1, n=16, k=128), dict(packing=packed.NVFP4), "takes scales for 32 or 128 inputs, got 16"),
    ("gemm_sm120a", dict(m=1, n=16, k=128), dict(x_scale=np.ones(1, F32)), "x_scale must be float32 (128,), got float32"),
    ("rope_append", dict(), dict(places=np.zeros(2, np.int32)), "places must have shape (1,), got (2,)"),
    ("rope_append", dict(), dict(inv_freq=np.zeros(12, F32)), "inv_freq must have a multiple of 8 elements"),
    ("rope_append", dict(), dict(v_pages=np.zeros((2, 128, 4, 256), np.uint8)), "v_pages must be uint16"),
    ("rope_append", dict(), dict(k_pages=np.zeros((2, 64, 4, 256), U16)), "k_pages must have shape [P, 128, G, hd]"),
    ("topk", dict(vocabulary=64), dict(k=0), "k must be 1 to 128, got 0"),
    ("topk", dict(vocabulary=64), dict(logits=np.zeros((1, 62), F32)), "logits has 62 columns"),
    ("topk", dict(vocabulary=64), dict(allowed=np.zeros((1, 1), U32)), "allowed must be uint32 (1, 2), got uint32 (1, 1)"),
    ("topk", dict(vocabulary=64), dict(ids=np.zeros((1, 20), np.int64)), "ids must be uint32 (1, 20), got int64"),
]


@pytest.mark.parametrize("name, case, change, words", REFUSALS, ids=[f"{r[0]}-{list(r[2])[0]}" for r in REFUSALS])
def test_launch_refuses_in_a_sentence(name, case, change, words):
    module, recorder = kernels.module(name), machines.Recorder()
    arguments = {**module.make(np.random.default_rng(0), **case), **change}
    with pytest.raises(ValueError) as caught:
        module.launch(recorder, **arguments)
    assert words in str(caught.value)
    assert not recorder.kernels, "nothing was launched"


def test_topk_at_the_size_of_27b():
    """248320 ids in three rounds, masked at both ends; the winners are planted in the first and last quads."""
    from qwentin.kernels import topk
    assert topk.rounds(248320, 20) == [243, 5, 1] and topk.rounds(248320, 64) == [243, 16, 1]
    arguments = topk.make(np.random.default_rng(1), k=4, valid=248318)
    arguments["logits"][0, [0, 3, 248316, 248317, 248319]] = [50, 60, 40, 70, 90]
    got = lab.run(topk, arguments, machines.Emulator())
    assert got["ids"].tolist() == [[248317, 3, 0, 248316]] and got["values"].tolist() == [[70, 60, 50, 40]]


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="no kernel 'softmax'; there are embed, rmsnorm"):
        kernels.module("softmax")
