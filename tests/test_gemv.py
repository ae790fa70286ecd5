"""gemv and gemv_sm120a beyond their CASES: every code, extreme scales, rows that do not depend on their company."""
import numpy as np

from qwentin import numerics
from qwentin.kernels import gemv, gemv_residual, gemv_sm120a, lab, machines, packed, strips


def block_scaled(codes, scales, x, x_scale, packing):
    """(emulated, float64) products of the sm_120a kernel."""
    n, rows = len(codes), len(x)
    arguments = dict(w=packed.pack(packing, codes, scales), x=packed.byte_order(x), x_scale=x_scale,
                     out=np.empty((rows, n), np.float32), work=strips.workspace(rows, 1), n=n, packing=packing, blocks=1)
    got = lab.run(gemv_sm120a, arguments, machines.Emulator("sm_120a"))["out"]
    weights = packing.codes.decode(codes).astype(np.float64) * np.repeat(numerics.decode_ue8m0(scales), 32, axis=1)
    activations = numerics.E4M3.decode(x).astype(np.float64) * np.repeat(numerics.decode_ue8m0(x_scale), 32, axis=1)
    return got, activations @ weights.T


def test_all_64_codes_meet_one_activation_each():
    """Row r holds code r at input r and zeros elsewhere: the product is that value, exactly."""
    packing = gemv_sm120a.PACKINGS["fp6-32"]
    codes = np.zeros((64, 128), np.uint8)
    codes[np.arange(64), np.arange(64)] = np.arange(64)
    x = np.full((1, 128), 0x38, np.uint8)                                # ones
    got, want = block_scaled(codes, np.full((64, 4), 127, np.uint8), x, np.full((1, 4), 127, np.uint8), packing)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got[0], numerics.E2M3.values)


def test_scales_from_end_to_end_and_zero_rows():
    """Weight scales 2^-127 .. 2^127 against activation scales that bring the product back into float32; zeros stay zero."""
    packing, rng = gemv_sm120a.PACKINGS["fp6-32"], np.random.default_rng(0)
    codes = rng.integers(0, 64, (256, 128)).astype(np.uint8)
    codes[7] = 0
    weight = np.minimum(np.arange(256), 254).astype(np.uint8)
    for x_scale in (0, 64, 127, 190, 254):
        x = numerics.E4M3.encode(rng.standard_normal((2, 128)).astype(np.float32))
        x[1] = 0
        scales = np.repeat(weight[:, None], 4, axis=1)
        got, want = block_scaled(codes, scales, x, np.full((2, 4), x_scale, np.uint8), packing)
        inside = (np.abs(want) < 2.0 ** 120) & (np.abs(want) > 2.0 ** -110)
        assert inside[0].sum() > 80
        np.testing.assert_allclose(got[inside], want[inside], rtol=2.0 ** -16)
        assert not got[1].any() and not got[0, 7].any()


def test_a_row_does_not_depend_on_its_company():
    """The same bits for one row alone and among sixteen, with strips that blocks share."""
    arguments = gemv.make(np.random.default_rng(1), n=128, k=512, rows=16, blocks=3)
    together = lab.run(gemv, arguments, machines.Emulator())["out"]
    alone = dict(arguments, x=arguments["x"][5:6].copy(), out=arguments["out"][5:6].copy(), work=strips.workspace(1, 3))
    np.testing.assert_array_equal(lab.run(gemv, alone, machines.Emulator())["out"][0], together[5])


def test_a_row_of_the_stream_does_not_depend_on_its_company():
    """Nor do the squares that its next factor is made of: the last of 29 rows, and the same row alone."""
    a = gemv_residual.make(np.random.default_rng(1), **gemv_residual.CASES[1])
    together = lab.run(gemv_residual, a, machines.Emulator())
    alone = dict(a, work=strips.workspace(1, 3), squares=np.empty((1, 1, 4, 8), np.float32))
    alone.update((name, a[name][28:].copy()) for name in ("x", "hidden", "scaled"))
    got = lab.run(gemv_residual, alone, machines.Emulator())
    for name in ("hidden", "scaled"):
        np.testing.assert_array_equal(got[name][0], together[name][28])
    np.testing.assert_array_equal(got["squares"][:, 0, :, 0], together["squares"][:, 3, :, 4])


def test_the_outputs_of_a_wider_row():
    """Columns beyond N belong to another matrix: the row's stride counts, and they stay as they are."""
    a = gemv.make(np.random.default_rng(2), n=144, k=256, rows=3, blocks=3)
    wide = np.full((3, 150), 7, np.float32)
    for out in (a["out"], wide):
        gemv.launch(machines.Emulator().start(), **{**a, "out": out, "work": a["work"].copy()})
    assert np.array_equal(wide[:, :144], a["out"]) and (wide[:, 144:] == 7).all()


def test_every_scale_of_16_inputs():
    """nvfp4: all 254 numbers an e4m3 scale can be, negative ones too, times weights of every code: exact."""
    rng, n = np.random.default_rng(3), 128
    scales = (np.arange(n * 8) % 256).astype(np.uint8).reshape(n, 8)
    scales[scales & 0x7F == 0x7F] = 1
    w = packed.pack(packed.NVFP4, rng.integers(0, 16, (n, 128)).astype(np.uint8), scales)
    x = np.zeros((32, 128), np.float16)
    x[np.arange(32), np.arange(32) * 4 + np.arange(32) // 2 % 4] = 1          # one input a row, of every block four
    a = dict(w=w, x=x, out=np.empty((32, n), np.float32), work=strips.workspace(32, 1), n=n, packing=packed.NVFP4, blocks=1,
             alpha=np.ones(n // 16, np.float32))
    want = x.astype(np.float32) @ packed.decode(packed.NVFP4, w, n).T
    np.testing.assert_array_equal(lab.run(gemv, a, machines.Emulator())["out"], want)
