"""rope_append: norm and rotate queries and keys, append keys and values to the paged cache, all in one launch.

    q, k  <- x * rsqrt(mean(x^2) + eps) * (1 + weight)                   over the head's hd elements
    q, k  <- (a cos - b sin, b cos + a sin) for the pairs a = x[j], b = x[j + R/2], j < R/2, at the angle
             positions[t] * inv_freq[j], a float32 product; cos and sin times `magnitude` (1, or YaRN's factor)
    k_pages[page, row] <- k / k_scale,  v_pages[page, row] <- v / v_scale,  page, row = divmod(places[t], 128)

    qkv        f32, f16 or bf16 [T, (2 H + 2 G) hd]    as the fused product leaves it; the gates are not touched:

                   | q 0 | gate 0 | q 1 | gate 1 | ... | q H-1 | gate H-1 | k 0 ... k G-1 | v 0 ... v G-1 |

    q_weight, k_weight    f32 [hd]
    inv_freq   f32 [R / 2]
    positions  i32 or u32 [T]
    places     i32 or u32 [T]                     page * 128 + row; SKIP for a row that is not appended (padding)
    q          bf16, f16 or f32 [T, H, hd]
    k_pages, v_pages      bf16 or e4m3 [P, 128, G, hd]       e4m3 saturates at 448

hd is 256 or less, a multiple of 8; R a multiple of 16, at most hd. A warp takes one head of one token: lane l holds octet
l, and its partner in a pair is R / 16 lanes away. 27B: H + 2 G = 32 warps a token.
"""
import functools

import numpy as np

from . import octet, ptx, reduce
from .build import device, kernel
from .octet import format_of
from .parity import Output, real
from .ptx import f32, u32, u64
from .unroll import static_range

PAGE = 128
WARPS = 4                                             # heads a block takes
SKIP = 0xFFFFFFFF                                     # -1 in int32
REGISTERS = 64
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128", "MUFU.SIN"), "sm_120a": ("LDG.E.128", "STG.E.128", "MUFU.SIN")}
# 2 pi = TURN + TURN_REST; TURN is the nearest float32. angle - n TURN is exact in one fma, the rest costs n 2^-24 of
# 1.7e-7: for angles below 2^18 (a position of 262143, inv_freq 1) the reduced angle is off by less than 2^-22.
TURN, TURN_REST = float(np.float32(2 * np.pi)), 2 * np.pi - float(np.float32(2 * np.pi))
PER_TURN = 1 / (2 * np.pi)
# sin.approx and cos.approx are within 2^-20.5 inside one turn, the angle within 2^-22; a normed element is below
# sqrt(hd) = 16 times 1 + weight < 2, and two of them meet in a rotation: 2 * 32 * 2^-20. The rest as in rmsnorm.
ROTATED = Output(rtol=2.0 ** -19, atol=2.0 ** -14)
OUTPUTS = {"q": ROTATED, "k_pages": ROTATED, "v_pages": Output(rtol=2.0 ** -22)}


def ref(qkv, q_weight, k_weight, inv_freq, positions, places, heads, k_pages, v_pages, k_scale, v_scale, magnitude, eps):
    """The formulas in float64, after the float32 product that gives the angle; nothing is rounded."""
    groups, hd = k_pages.shape[2:]
    rows, half = len(positions), len(inv_freq)
    x = real(qkv)
    q = x[:, :2 * heads * hd].reshape(rows, heads, 2, hd)[:, :, 0]
    k, v = x[:, 2 * heads * hd:].reshape(rows, 2, groups, hd).transpose(1, 0, 2, 3)
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)[:, None]
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude

    def turned(x, weight):
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + real(weight))
        a, b = x[..., :half], x[..., half:2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half:]], -1)
    out = dict(q=turned(q, q_weight), k_pages=real(k_pages), v_pages=real(v_pages))
    for name, new in (("k_pages", turned(k, k_weight) / k_scale), ("v_pages", v / v_scale)):
        limit = 448.0 if k_pages.dtype == np.uint8 else np.inf
        for t, place in enumerate(places):
            if place != -1:
                out[name][divmod(int(place), PAGE)] = np.clip(new[t], -limit, limit)
    return out


@functools.cache
def build(heads, groups, hd, half, in_format, q_format, page_format):
    """The kernel for H query heads, G key heads of hd elements, R = 2 half of them rotated."""
    octets, pair = hd // 8, half // 8                 # lanes at work; lanes between the two of a pair
    columns = (2 * heads + 2 * groups) * octets       # of a row of qkv
    load, store_q, store_page = octet.load(in_format), octet.store(q_format), octet.store(page_format)
    load_weight = octet.load("f32")

    @device
    def normed(x, w, eps):
        scale = ptx.rsqrt(reduce.warp_sum(octet.squares(x)) * (1.0 / hd) + eps)
        return tuple(x[j] * scale * (1.0 + w[j]) for j in static_range(8))

    @device
    def cos_sin(angle, magnitude):
        turns = ptx.round_to_integer(angle * PER_TURN)
        angle = ptx.fma(turns, -TURN_REST, ptx.fma(turns, -TURN, angle))
        return ptx.cosine(angle) * magnitude, ptx.sine(angle) * magnitude

    @device
    def rotated(x, inv_freq, position, lane, magnitude):
        """Lanes below `pair` hold the first of each pair, the next `pair` lanes the second, others are left alone."""
        first = lane < pair
        partner = lane + pair if first else (lane - pair if lane < 2 * pair else lane)
        other = tuple(ptx.shuffle_idx_f32(x[j], u32(partner)) for j in static_range(8))
        if lane < 2 * pair:
            f = load_weight(inv_freq, lane if first else lane - pair)
            turn = tuple(cos_sin(position * f[j], magnitude) for j in static_range(8))
            x = tuple(x[j] * turn[j][0] + other[j] * (-turn[j][1] if first else turn[j][1]) for j in static_range(8))
        return x

    @kernel(threads=32 * WARPS)
    def rope_append(qkv: u64, q_weight: u64, k_weight: u64, inv_freq: u64, positions: u64, places: u64, q: u64,
                    k_pages: u64, v_pages: u64, k_factor: f32, v_factor: f32, magnitude: f32, eps: f32):
        lane, token = ptx.lane(), ptx.block_y()
        head = ptx.block_x() * WARPS + ptx.thread_x() // 32             # q heads, then k, then v
        place = ptx.load_u32(places + token * 4)
        position = f32(ptx.load_u32(positions + token * 4))
        ptx.launch_dependents()
        ptx.wait_dependencies()
        mine = min(lane, octets - 1)                                    # lanes beyond a short head repeat its last octet
        is_q, is_v = head < heads, head >= heads + groups
        column = (2 * head if is_q else head + heads) * octets + mine
        if head < heads + 2 * groups and (is_q or place != SKIP):
            x = load(qkv, token * columns + column)
            if not is_v:
                w = load_weight(q_weight if is_q else k_weight, mine)
                if octets < 32:
                    live = 1.0 if lane < octets else 0.0
                    x = tuple(x[j] * live for j in static_range(8))
                x = rotated(normed(x, w, eps), inv_freq, position, lane, magnitude)
            if lane < octets:
                if is_q:
                    store_q(q, (token * heads + head) * octets + lane, x)
                else:
                    factor = v_factor if is_v else k_factor
                    group = head - heads - groups if is_v else head - heads
                    store_page(v_pages if is_v else k_pages, (place * groups + group) * octets + lane,
                               tuple(x[j] * factor for j in static_range(8)))
    return rope_append


def launch(stream, qkv, q_weight, k_weight, inv_freq, positions, places, heads, q, k_pages, v_pages,
           k_scale=1.0, v_scale=1.0, magnitude=1.0, eps=1e-6):
    """Queue it on a stream; shapes and dtypes as in the module's docstring, heads is H."""
    rows, (pages, page, groups, hd), half = qkv.shape[0], k_pages.shape, inv_freq.shape[0]
    if page != PAGE or hd % 8 or not 8 <= hd <= 256:
        raise ValueError(f"k_pages must have shape [P, {PAGE}, G, hd] with hd a multiple of 8 up to 256, "
                         f"got {tuple(k_pages.shape)}")
    if half % 8 or not half or 2 * half > hd:
        raise ValueError(f"inv_freq must have a multiple of 8 elements, at most {hd // 2}, got {half}")
    if v_pages.dtype != k_pages.dtype:
        raise ValueError(f"v_pages must be {k_pages.dtype} as k_pages is, got {v_pages.dtype}")
    for name, array, shape in (("qkv", qkv, (rows, (2 * heads + 2 * groups) * hd)), ("q_weight", q_weight, (hd,)),
                               ("k_weight", k_weight, (hd,)), ("positions", positions, (rows,)),
                               ("places", places, (rows,)), ("q", q, (rows, heads, hd)),
                               ("v_pages", v_pages, (pages, PAGE, groups, hd))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
    made = build(heads, groups, hd, half, format_of("qkv", qkv, "f32", "f16", "bf16"),
                 format_of("q", q, "bf16", "f16", "f32"), format_of("k_pages", k_pages, "bf16", "e4m3"))
    if rows:
        stream.launch(made, (-(-(heads + 2 * groups) // WARPS), rows, 1), qkv, q_weight, k_weight, inv_freq, positions,
                      places, q, k_pages, v_pages, 1 / k_scale, 1 / v_scale, magnitude, eps)


CASES = (
    dict(rows=3),                                                      # 27B
    dict(rows=2, pages="e4m3", qkv="bf16", q="f16", k_scale=0.25, v_scale=0.01),
    dict(rows=2, heads=2, groups=1, qkv="f16", q="f16", pages="e4m3"),
    dict(rows=3, heads=3, groups=1, hd=64, rotary=32, skip=1),         # ragged: five heads in blocks of four; short heads
    dict(rows=1, heads=1, groups=1, hd=128, rotary=128, magnitude=1.1386),
    dict(rows=0, heads=2, groups=1),
)


def make(rng, rows=1, heads=24, groups=4, hd=256, rotary=64, qkv="f32", q="bf16", pages="bf16", k_scale=1.0, v_scale=1.0,
         magnitude=1.0, skip=0, total=2):
    """Named random arguments; the first `skip` rows are not appended, the last stands at position 262143."""
    x = rng.standard_normal((rows, (2 * heads + 2 * groups) * hd)).astype(np.float16 if qkv == "f16" else np.float32)
    shape = (total, PAGE, groups, hd)
    cache = [rng.integers(0, 0x7E, shape).astype(np.uint8) if pages == "e4m3" else
             (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(2)]
    positions = rng.integers(0, 262144, rows).astype(np.int32)
    positions[-1:] = 262143
    places = rng.permutation(total * PAGE)[:rows].astype(np.int32)
    places[-1:], places[:skip] = total * PAGE - 1, -1
    return dict(
        qkv=(x.view(np.uint32) >> 16).astype(np.uint16) if qkv == "bf16" else x,
        q_weight=(rng.standard_normal(hd) * 0.1).astype(np.float32),
        k_weight=(rng.standard_normal(hd) * 0.1).astype(np.float32),
        inv_freq=(1e7 ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32), positions=positions, places=places,
        heads=heads, q=np.empty((rows, heads, hd), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[q]),
        k_pages=cache[0], v_pages=cache[1], k_scale=k_scale, v_scale=v_scale, magnitude=magnitude, eps=1e-6)


def cost(rows=1, heads=24, groups=4, hd=256, rotary=64, qkv="f32", q="bf16", pages="bf16", **_):
    """Bytes that must move, and float operations."""
    size = {"bf16": 2, "f16": 2, "f32": 4, "e4m3": 1}
    return dict(bytes=rows * hd * ((heads + 2 * groups) * size[qkv] + heads * size[q] + 2 * groups * size[pages]),
                flops=rows * hd * (heads + groups) * 8)
