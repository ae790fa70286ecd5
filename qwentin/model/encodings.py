"""The ways a checkpoint stores a tensor, and how each becomes float32.

A tensor `x.weight` lies in one or several parts: `x.weight` itself and companions such as `x.weight_scale_inv`. Which
parts are there decides the encoding, tensor by tensor; no list in config.json is consulted.

    encoding             parts                                                   value
    plain                weight: BF16, F16 or F32                                the number itself
    fp8-block            weight: F8_E4M3; weight_scale_inv [N/128, K/128]        code * scale
    nvfp4-tensors        weight_packed, weight_scale, weight_global_scale        code * scale / global
    nvfp4-modelopt       weight: U8, weight_scale, weight_scale_2                code * scale * global
    fp6, fp8             weight_fp6 or weight_fp8: tiles of kernels/packed.py    code * scale
    nvfp4                weight_nvfp4: tiles; weight_alpha                       code * scale * alpha
    fp6-rows, fp8-rows   weight_rows_fp6 [V, 3D/4] or _fp8 [V, D]; weight_rows_scale BF16 [V, D/128]

The last three are what `qwentin convert` writes: tiles for matrices, rows for the embedding table.
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import numerics
from ..errors import CheckpointError
from ..kernels import packed
from ..kernels.packed import FP6, FP8, Packing
from .safetensor import Shard

FP8_BLOCK = 128                                         # rows and columns under one scale of the official FP8 release
FLOATS = ("BF16", "F16", "F32")
VIEWS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}     # the rest is looked at as bytes


class Part(NamedTuple):
    """One stored array: the tensor `key` of the file `shard`."""
    shard: Shard
    key: str

    @property
    def dtype(self) -> str:
        return self.shard.entries[self.key].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shard.entries[self.key].shape

    @property
    def nbytes(self) -> int:
        entry = self.shard.entries[self.key]
        return entry.stop - entry.start

    def array(self) -> np.ndarray:
        """A read-only view of the file: f32 or f16 as they are, BF16 as u16, everything else as u8."""
        return self.shard.data(self.key).view(VIEWS.get(self.dtype, np.uint8)).reshape(self.shape)

    def floats(self, start=0, stop=None) -> np.ndarray:
        """Rows [start, stop) of a BF16, F16 or F32 array as f32."""
        rows = self.array()[start:stop] if self.shape else self.array()
        return numerics.decode_bf16(rows) if self.dtype == "BF16" else rows.astype(np.float32)

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"tensor {self.key} in {self.shard.path} {what}.")

    def demand(self, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise unless the part has one of these dtypes and this shape."""
        if self.dtype not in dtypes:
            raise self.fault(f"has dtype {self.dtype}; {' or '.join(dtypes)} was wanted")
        if self.shape != shape:
            raise self.fault(f"has shape {list(self.shape)}; {list(shape)} was wanted")


class Plain:
    """Floats, one an element."""
    name = "plain"
    needs = frozenset({"weight"})
    ignores = frozenset()
    row_step = 1                                        # `rows` may start at a multiple of this

    def check(self, parts: dict, shape: tuple) -> None:
        """Raise CheckpointError unless `parts` hold a tensor of `shape`; looks at headers only."""
        part = parts["weight"]
        if part.dtype == "F8_E4M3":
            raise part.fault(f"is F8_E4M3 but has no scale: {part.key}_scale_inv is missing")
        part.demand(FLOATS, shape)

    def rows(self, parts: dict, start: int, stop: int) -> np.ndarray:
        """f32 rows [start, stop) along the first axis."""
        return parts["weight"].floats(start, stop)


class BlockFP8:
    """The official FP8 release: e4m3 codes, one scale for each 128x128 block; blocks at the far edges may be short."""
    name = "fp8-block"
    needs = frozenset({"weight", "weight_scale_inv"})
    ignores = frozenset()
    row_step = FP8_BLOCK

    def check(self, parts, shape):
        parts["weight"].demand(("F8_E4M3",), shape)
        if len(shape) != 2:
            raise parts["weight"].fault(f"has shape {list(shape)}; only matrices can be FP8")
        parts["weight_scale_inv"].demand(FLOATS, tuple(-(-n // FP8_BLOCK) for n in shape))

    def rows(self, parts, start, stop):
        scale = parts["weight_scale_inv"].floats(start // FP8_BLOCK, -(-stop // FP8_BLOCK))
        return numerics.decode_fp8_blocks(parts["weight"].array()[start:stop], scale, (FP8_BLOCK, FP8_BLOCK))


@dataclass(frozen=True)
class NVFP4:
    """e2m1 codes two a byte, an e4m3 scale for 16 inputs, a float for the tensor; activations' scales are not used."""
    name: str
    convention: str                                     # of numerics.decode_nvfp4
    codes: str                                          # the part with the codes
    tensor_scale: str                                   # the part with the float
    ignores: frozenset
    row_step = 1

    @property
    def needs(self):
        return frozenset({self.codes, "weight_scale", self.tensor_scale})

    def check(self, parts, shape):
        codes = parts[self.codes]
        if len(shape) != 2 or shape[1] % 16:
            raise codes.fault(f"has shape {list(shape)}; NVFP4 wants a matrix with a multiple of 16 columns")
        codes.demand(("U8",), (shape[0], shape[1] // 2))
        parts["weight_scale"].demand(("F8_E4M3",), (shape[0], shape[1] // 16))
        scale = parts[self.tensor_scale]
        scale.demand(("F32",), () if scale.shape == () else (1,))

    def factor(self, parts) -> np.float32:
        """The tensor's scale; CheckpointError unless it is a positive number."""
        scale = parts[self.tensor_scale]
        factor = scale.floats().reshape(())[()]
        if not (np.isfinite(factor) and factor > 0):
            raise scale.fault(f"is {factor}; a positive number was wanted")
        return factor

    def rows(self, parts, start, stop):
        return numerics.decode_nvfp4(parts[self.codes].array()[start:stop], parts["weight_scale"].array()[start:stop],
                                     self.factor(parts), self.convention)


@dataclass(frozen=True)
class Tiles:
    """A matrix in the kernels' layout."""
    packing: Packing
    ignores = frozenset()
    row_step = packed.STRIP

    @property
    def name(self):
        return self.packing.name

    @property
    def codes(self):
        """The part with the tiles."""
        return "weight_" + self.name

    @property
    def needs(self):
        return frozenset({self.codes} | ({"weight_alpha"} if self.packing == packed.NVFP4 else set()))

    def check(self, parts, shape):
        if len(shape) != 2 or shape[1] % packed.DEPTH:
            raise parts[self.codes].fault(f"stands for shape {list(shape)}; tiles want a matrix with a multiple of "
                                          f"{packed.DEPTH} columns")
        parts[self.codes].demand(("U8",), self.packing.shape(*shape))
        if "weight_alpha" in self.needs:
            parts["weight_alpha"].demand(("F32",), ())

    def rows(self, parts, start, stop):
        tiles = parts[self.codes].array()[start // packed.STRIP:-(-stop // packed.STRIP)]
        out = packed.decode(self.packing, tiles, stop - start)
        return out * parts["weight_alpha"].floats() if "weight_alpha" in parts else out


@dataclass(frozen=True)
class Rows:
    """A table of which single rows are read: each row one bit string of codes, a bf16 scale for 128 columns."""
    packing: Packing
    ignores = frozenset()
    row_step = 1

    @property
    def name(self):
        return self.packing.name + "-rows"

    @property
    def codes(self):
        return "weight_rows_" + self.packing.name

    @property
    def needs(self):
        return frozenset({self.codes, "weight_rows_scale"})

    def shapes(self, n: int, k: int) -> dict:
        """Part -> (dtype, shape) of an n x k table."""
        return {self.codes: ("U8", (n, k * self.packing.codes.bits // 8)),
                "weight_rows_scale": ("BF16", (n, k // packed.DEPTH))}

    def check(self, parts, shape):
        if len(shape) != 2 or shape[1] % packed.DEPTH:
            raise parts[self.codes].fault(f"stands for shape {list(shape)}; a table with a multiple of {packed.DEPTH} "
                                          "columns was wanted")
        for part, (dtype, wanted) in self.shapes(*shape).items():
            parts[part].demand((dtype,), wanted)

    def rows(self, parts, start, stop):
        codes = numerics.unpack_bits(parts[self.codes].array()[start:stop], self.packing.codes.bits)
        scale = np.repeat(parts["weight_rows_scale"].floats(start, stop), packed.DEPTH, axis=1)
        return self.packing.codes.decode(codes) * scale


ENCODINGS = (
    Plain(), BlockFP8(), Tiles(FP6), Tiles(FP8), Tiles(packed.NVFP4), Rows(FP6), Rows(FP8),
    NVFP4("nvfp4-tensors", "compressed-tensors", "weight_packed", "weight_global_scale",
          frozenset({"input_global_scale"})),
    NVFP4("nvfp4-modelopt", "modelopt", "weight", "weight_scale_2", frozenset({"input_scale"})),
)
COMPANIONS = frozenset().union(*(e.needs | e.ignores for e in ENCODINGS)) - {"weight"}


def owner(name: str) -> tuple[str, str]:
    """(tensor, part) that a stored name stands for: x.weight_scale -> (x.weight, weight_scale)."""
    stem, _, last = name.rpartition(".")
    return (f"{stem}.weight", last) if last in COMPANIONS else (name, "weight")


def stored_name(name: str, part: str) -> str:
    """The inverse of owner."""
    return name.removesuffix("weight") + part if name.endswith(".weight") else name


def choose(parts: dict):
    """The encoding whose parts these are; CheckpointError naming what is missing or unknown."""
    have = frozenset(parts)
    for encoding in ENCODINGS:
        if encoding.needs <= have <= encoding.needs | encoding.ignores:
            return encoding
    part = next(iter(parts.values()))
    near = [e for e in ENCODINGS if have & e.needs - {"weight"} and have <= e.needs | e.ignores]
    if near:
        stem = part.key.rpartition(".")[0]
        missing = ", ".join(f"{stem}.{m}" for m in sorted(near[0].needs - have))
        raise part.fault(f"is stored as {near[0].name} but {missing} is missing")
    raise part.fault(f"comes with the parts {', '.join(sorted(have))}, which no known encoding has")
