"""Warp matrix instructions: ldmatrix, stmatrix and mma.sync, the block-scaled forms of sm_120a included.

Fragments are tuples of 32-bit registers, as the PTX ISA lays them out. For m16n8k16 (two 16-bit elements a register)
with g = lane / 4 and t = lane % 4, rows and columns counted from 0:

    a0: row g,     k 2t, 2t+1      a1: row g + 8, k 2t, 2t+1      a2, a3: the same with k + 8
    b0: column g,  k 2t, 2t+1      b1: column g,  k 2t + 8, 2t + 9
    c0, c1: row g, columns 2t, 2t+1                               c2, c3: the same in row g + 8

m16n8k32 of 8-bit elements is alike with four elements a register: k 4t .. 4t+3, and k + 16 in a2, a3 and b1.
"""
from .ptx_factory import MEMORY, PURE, f32x4, imm, instruction, tuple_of, u32, u32x2, u32x4


def ldmatrix(shape, kind):
    """Rows of 8x8 matrices, shared memory -> fragments; lane i gives the address of row i % 8 of matrix i / 8."""
    return instruction(f"ldmatrix.sync.aligned.{shape} <d>, [<p>];", dict(d=kind), dict(p=u32), effect=MEMORY)


ldmatrix_x1 = ldmatrix("m8n8.x1.shared.b16", tuple_of(u32, 1))
ldmatrix_x2, ldmatrix_x4 = ldmatrix("m8n8.x2.shared.b16", u32x2), ldmatrix("m8n8.x4.shared.b16", u32x4)
ldmatrix_x2_transposed = ldmatrix("m8n8.x2.trans.shared.b16", u32x2)
ldmatrix_x4_transposed = ldmatrix("m8n8.x4.trans.shared.b16", u32x4)

# sm_120a: rows of 16 six-bit codes (12 bytes, padded to 16 in shared memory) become one code a byte
ldmatrix_fp6_x1 = ldmatrix("m8n16.x1.shared::cta.b8x16.b6x16_p32", tuple_of(u32, 1))
ldmatrix_fp6_x2 = ldmatrix("m8n16.x2.shared::cta.b8x16.b6x16_p32", u32x2)
ldmatrix_fp6_x4 = ldmatrix("m8n16.x4.shared::cta.b8x16.b6x16_p32", u32x4)
ldmatrix_fp4_x4 = ldmatrix("m8n16.x4.shared::cta.b8x16.b4x16_p64", u32x4)

# sm_90: fragments -> shared memory
stmatrix_x2 = instruction("stmatrix.sync.aligned.m8n8.x2.shared.b16 [<p>], <x>;", inputs=dict(p=u32, x=u32x2),
                          effect=MEMORY)
stmatrix_x4 = instruction("stmatrix.sync.aligned.m8n8.x4.shared.b16 [<p>], <x>;", inputs=dict(p=u32, x=u32x4),
                          effect=MEMORY)


def mma(shape_and_types, a=u32x4, b=u32x2, c=f32x4):
    """d = a b + c; four float32 accumulators unless c says otherwise."""
    return instruction(f"mma.sync.aligned.{shape_and_types} <d>, <a>, <b>, <c>;", dict(d=c), dict(a=a, b=b, c=c),
                       effect=PURE)


mma_f16 = mma("m16n8k16.row.col.f32.f16.f16.f32")
mma_bf16 = mma("m16n8k16.row.col.f32.bf16.bf16.f32")
mma_f16_k8 = mma("m16n8k8.row.col.f32.f16.f16.f32", u32x2, tuple_of(u32, 1))
mma_bf16_k8 = mma("m16n8k8.row.col.f32.bf16.bf16.f32", u32x2, tuple_of(u32, 1))
mma_tf32 = mma("m16n8k8.row.col.f32.tf32.tf32.f32")
mma_e4m3 = mma("m16n8k32.row.col.f32.e4m3.e4m3.f32")        # sm_89 and up; on sm_90 ptxas expands it to f16
mma_f16_f16 = mma("m16n8k16.row.col.f16.f16.f16.f16", c=u32x2)      # half-precision sums, two a register


def mma_mxf8f6f4(a_type, b_type):
    """Block-scaled m16n8k32 (sm_120a): one ue8m0 scale for each row of a and column of b over the 32 inputs.

    Every element takes a byte: fp8 as it is, fp6 in the low 6 bits, fp4 in bits 2..5. The scale byte of row m is byte
    `a_byte` of `a_scale` in lane 4 (m % 8) + 2 a_thread + m / 8 (a_thread 0 or 1), that of column n is byte `b_byte`
    of `b_scale` in lane 4 n + b_thread (b_thread 0..3).
    """
    return instruction(
        f"mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.{a_type}.{b_type}.f32.ue8m0 "
        "<d>, <a>, <b>, <c>, {<a_scale>}, {<a_byte>, <a_thread>}, {<b_scale>}, {<b_byte>, <b_thread>};",
        dict(d=f32x4), dict(a=u32x4, b=u32x2, c=f32x4, a_scale=u32, a_byte=imm, a_thread=imm,
                            b_scale=u32, b_byte=imm, b_thread=imm), effect=PURE)


mma_e2m3_e4m3 = mma_mxf8f6f4("e2m3", "e4m3")
mma_e2m1_e4m3 = mma_mxf8f6f4("e2m1", "e4m3")
mma_e5m2_e4m3 = mma_mxf8f6f4("e5m2", "e4m3")
mma_e4m3_e4m3 = mma_mxf8f6f4("e4m3", "e4m3")
mma_e3m2_e4m3 = mma_mxf8f6f4("e3m2", "e4m3")
mma_e2m3_e2m3 = mma_mxf8f6f4("e2m3", "e2m3")
