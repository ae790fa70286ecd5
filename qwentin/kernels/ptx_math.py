"""Arithmetic that numba has no name for: format conversions, packed halves, byte permutes, approximate functions."""
from numba.cuda.extending import intrinsic

from .ptx_factory import PURE, f32, f32x2, instruction, u16, u32, u32x2, u64


def pure(text, kind, **inputs):
    """An instruction that is a function of its inputs alone."""
    return instruction(text, dict(d=kind), inputs, effect=PURE)


@intrinsic
def select(typingctx, condition, a, b):
    """a if condition else b, both computed, of a's type. A conditional expression makes branches, for numba to work
    through and the assembler to predicate: in an unrolled loop this compiles several times faster."""
    def codegen(context, builder, signature, args):
        return builder.select(*args)
    return a(condition, a, a), codegen


# ---- 32-bit words
permute = pure("prmt.b32 <d>, <a>, <b>, <selector>;", u32, a=u32, b=u32, selector=u32)
shift_right_pair = pure("shf.r.wrap.b32 <d>, <low>, <high>, <by>;", u32, low=u32, high=u32, by=u32)
mask_or = pure("lop3.b32 <d>, <a>, <mask>, <c>, 0xEA;", u32, a=u32, mask=u32, c=u32)          # (a & mask) | c
count_ones = pure("popc.b32 <d>, <a>;", u32, a=u32)
leading_zeros = pure("clz.b32 <d>, <a>;", u32, a=u32)
bits_f32 = pure("mov.b32 <d>, <a>;", u32, a=f32)
f32_bits = pure("mov.b32 <d>, <a>;", f32, a=u32)
pack_u64 = pure("mov.b64 <d>, <halves>;", u64, halves=u32x2)                                  # low word first
unpack_u64 = pure("mov.b64 <d>, <a>;", u32x2, a=u64)

# ---- float32; exp2, rcp, rsqrt, tanh: hardware approximations, about 2 ulp (ftz)
fma = pure("fma.rn.f32 <d>, <a>, <b>, <c>;", f32, a=f32, b=f32, c=f32)
maximum = pure("max.f32 <d>, <a>, <b>;", f32, a=f32, b=f32)
minimum = pure("min.f32 <d>, <a>, <b>;", f32, a=f32, b=f32)
absolute = pure("abs.f32 <d>, <a>;", f32, a=f32)
round_to_integer = pure("cvt.rni.f32.f32 <d>, <a>;", f32, a=f32)
exp2 = pure("ex2.approx.ftz.f32 <d>, <a>;", f32, a=f32)
log2 = pure("lg2.approx.ftz.f32 <d>, <a>;", f32, a=f32)
reciprocal = pure("rcp.approx.ftz.f32 <d>, <a>;", f32, a=f32)
rsqrt = pure("rsqrt.approx.ftz.f32 <d>, <a>;", f32, a=f32)
sine = pure("sin.approx.ftz.f32 <d>, <a>;", f32, a=f32)
cosine = pure("cos.approx.ftz.f32 <d>, <a>;", f32, a=f32)

# ---- bf16 and f16. A packed word holds element 0 in its low half.
bf16x2 = pure("cvt.rn.bf16x2.f32 <d>, <high>, <low>;", u32, low=f32, high=f32)
bf16 = pure("cvt.rn.bf16.f32 <d>, <a>;", u16, a=f32)
f16x2 = pure("cvt.rn.f16x2.f32 <d>, <high>, <low>;", u32, low=f32, high=f32)
f16 = pure("cvt.rn.f16.f32 <d>, <a>;", u16, a=f32)
f32_f16 = pure("cvt.f32.f16 <d>, <a>;", f32, a=u16)
f32x2_f16x2 = pure("{ .reg .b16 l, h; mov.b32 {l, h}, <a>; cvt.f32.f16 <d.0>, l; cvt.f32.f16 <d.1>, h; }", f32x2, a=u32)
mul_f16x2 = pure("mul.rn.f16x2 <d>, <a>, <b>;", u32, a=u32, b=u32)
mul_f16x2_low, mul_f16x2_high = (                       # by one half of b, twice: an operand's modifier, no instruction
    pure("{ .reg .b16 l, h; .reg .b32 two; mov.b32 {l, h}, <b>; mov.b32 two, {" + f"{half}, {half}" + "}; "
         "mul.rn.f16x2 <d>, <a>, two; }", u32, a=u32, b=u32) for half in "lh")
fma_f16x2 = pure("fma.rn.f16x2 <d>, <a>, <b>, <c>;", u32, a=u32, b=u32, c=u32)
fma_bf16x2 = pure("fma.rn.bf16x2 <d>, <a>, <b>, <c>;", u32, a=u32, b=u32, c=u32)

# ---- e4m3, saturating, two a u16 with element 0 in its low byte (sm_89 and up)
e4m3x2 = pure("cvt.rn.satfinite.e4m3x2.f32 <d>, <high>, <low>;", u16, low=f32, high=f32)
f16x2_e4m3x2 = pure("cvt.rn.f16x2.e4m3x2 <d>, <a>;", u32, a=u16)
f16x2_e4m3x2_low, f16x2_e4m3x2_high = (                 # of a word's low or high half: an operand's modifier again
    pure("{ .reg .b16 l, h; mov.b32 {l, h}, <a>; cvt.rn.f16x2.e4m3x2 <d>, " + half + "; }", u32, a=u32) for half in "lh")
