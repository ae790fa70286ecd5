"""PTX type names as numpy dtypes, and the short names under which generated code knows the dtypes."""
import numpy as np

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64

# The type an instruction names -> how its operand is seen. bf16, tf32 and packed pairs have no numpy type: raw bits.
TYPES = dict(b8=u1, u8=u1, s8=i1, b16=u2, u16=u2, s16=i2, b32=u4, u32=u4, s32=i4, b64=u8, u64=u8, s64=i8,
             f16=f2, f32=f4, f64=f8, pred=np.bool_, bf16=u2, f16x2=u4, bf16x2=u4, f32x2=u8, tf32=u4)
# Registers hold unsigned words, float32, float64 or bool; signed and half registers are kept as raw words.
STORED = {np.dtype(i1): u1, np.dtype(i2): u2, np.dtype(f2): u2, np.dtype(i4): u4, np.dtype(i8): u8}
SHORT = {np.dtype(t): name for name, t in dict(u1=u1, u2=u2, u4=u4, u8=u8, i1=i1, i2=i2, i4=i4, i8=i8,
                                               f2=f2, f4=f4, f8=f8).items()} | {np.dtype(bool): "np.bool_"}


def dtype_of(kind):
    """The numpy dtype of a PTX type name (or of anything numpy takes for one)."""
    return np.dtype(TYPES.get(kind, kind) if isinstance(kind, str) else kind)


def name_of(kind):
    """The name of a type in generated code."""
    return SHORT[dtype_of(kind)]


def width_of(kind):
    """Bytes of a value of a PTX type."""
    return dtype_of(kind).itemsize


def word(size):
    """The unsigned dtype of `size` bytes."""
    return np.dtype(f"u{size}")


def unsigned(kind):
    """The unsigned PTX type as wide as `kind`."""
    return f"u{8 * width_of(kind)}"
