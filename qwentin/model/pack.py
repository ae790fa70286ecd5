"""What each tensor of a checkpoint becomes in a packed directory, and how a piece of it is made.

A plan is one Recipe a tensor. A recipe says, before any data is read, which parts it will write and how long they are;
its pieces are independent of each other, so threads make them in any order and the bytes are the same.

    kind               from                      to
    copy               anything                  its parts, byte for byte
    fp6, fp8, nvfp4    BF16, F32, block FP8      tiles (kernels/packed.py); scales and codes by kernels/quantise.py
    fp8                block FP8                 tiles of the same codes and scales
    nvfp4              NVFP4, both conventions   tiles of the same codes and scales, whatever format was asked for
    fp6-rows, fp8-rows the embedding table       rows of codes
    bf16               block FP8                 rounded

Everything that is no matrix is copied, and so are in_proj_a and in_proj_b (0.2 % of the weights, and they steer the
decay of the state) and matrices whose inputs are no multiple of 128.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from .. import numerics
from ..errors import CheckpointError
from ..kernels import pack_cpu, packed, quantise
from ..kernels.packed import DEPTH, FP6, FP8, NVFP4, Packing
from . import encodings
from .encodings import BlockFP8, Plain, Rows, Tiles
from .weights import Checkpoint, Tensor

WEIGHTS = {"fp6": FP6, "fp8": FP8, "fp4": NVFP4, "bf16": None}          # what --weights may say
EMBEDDINGS = {"fp6": FP6, "fp8": FP8, "bf16": None}                     # what --embedding may say
UNPACKED = ("in_proj_a.weight", "in_proj_b.weight", "embed_tokens.weight")

Write = tuple[str, int, np.ndarray]                     # part, byte offset in it, bytes


@dataclass(frozen=True)
class Recipe:
    """How one tensor is stored: `name` in the new checkpoint, made from `source`."""
    name: str
    kind: str
    source: Tensor
    parts: dict[str, tuple[str, tuple[int, ...]]]       # part -> safetensors dtype, shape
    make: Callable[["Recipe", int, int], list[Write]]   # rows [start, stop) -> what to write
    pack: Callable = pack_cpu.pack                      # (packing, x, alpha) -> tiles; the GPU's gives the same bytes
    alpha: float = 1.0                                  # tensor scale of nvfp4; found by `prepared`

    def pieces(self) -> Iterator[tuple[int, int]]:
        return self.source.slices()

    def prepared(self, run: Callable) -> "Recipe":
        """With what must be known of the whole tensor first: for nvfp4, its largest magnitude. `run` maps in threads."""
        if self.make is not make_nvfp4:
            return self
        tops = run(lambda piece: pack_cpu.amax(floats(self.source, *piece)), self.pieces())
        return replace(self, alpha=float(quantise.alpha_of(max(tops))))


def plan(checkpoint: Checkpoint, weights: str = "fp6", embedding: str = "fp6", pack=pack_cpu.pack) -> list[Recipe]:
    """The recipes of a whole checkpoint, in the order of a forward pass.

    A tied head is packed as a matrix of its own beside the table (the new config.json unties it), unless both stay BF16.
    """
    recipes = [recipe_of(tensor, weights, embedding) for tensor in checkpoint.tensors.values()]
    if unties(checkpoint, weights, embedding):
        table = checkpoint.tensors["model.embed_tokens.weight"]
        recipes.append(recipe_of(replace(table, name="lm_head.weight"), weights, embedding))
    return [replace(recipe, pack=pack) for recipe in recipes]


def unties(checkpoint: Checkpoint, weights: str, embedding: str) -> bool:
    """Do the head and the table of a tied checkpoint part ways?"""
    return checkpoint.config.tie_word_embeddings and (weights, embedding) != ("bf16", "bf16")


def recipe_of(tensor: Tensor, weights: str, embedding: str) -> Recipe:
    """The recipe of one tensor."""
    stored, packable = tensor.encoding, len(tensor.shape) == 2 and tensor.shape[1] % DEPTH == 0
    if isinstance(stored, (Tiles, Rows)):
        part = tensor.parts[stored.codes]
        raise CheckpointError(f"tensor {part.key} in {part.shard.path} is packed already; convert the original.")
    if isinstance(stored, encodings.NVFP4) and packable:
        return tiles(tensor, NVFP4, keep_nvfp4)
    table = tensor.name == "model.embed_tokens.weight"
    packing = EMBEDDINGS[embedding] if table else WEIGHTS[weights]
    if not packable or isinstance(stored, encodings.NVFP4) or tensor.name.endswith(UNPACKED) and not table:
        return copy(tensor)
    if packing is None:
        return copy(tensor) if isinstance(stored, Plain) else to_bf16(tensor)
    if table:
        return Recipe(tensor.name, f"{packing.name}-rows", tensor, Rows(packing).shapes(*tensor.shape), make_rows)
    if isinstance(stored, BlockFP8) and packing == FP8:
        return tiles(tensor, FP8, keep_fp8)
    return tiles(tensor, packing, make_nvfp4 if packing == NVFP4 else make_tiles)


def tiles(tensor, packing: Packing, make) -> Recipe:
    encoding = Tiles(packing)
    parts = {encoding.codes: ("U8", packing.shape(*tensor.shape))}
    if packing == NVFP4:
        parts["weight_alpha"] = ("F32", ())
    return Recipe(tensor.name, packing.name, tensor, parts, make)


def copy(tensor) -> Recipe:
    parts = {name: (part.dtype, part.shape) for name, part in tensor.parts.items()}
    return Recipe(tensor.name, "copy", tensor, parts, make_copy)


def to_bf16(tensor) -> Recipe:
    return Recipe(tensor.name, "bf16", tensor, {"weight": ("BF16", tensor.shape)}, make_bf16)


# ---- making a piece: rows [start, stop) of the source, checked for NaN and infinities
def floats(source: Tensor, start: int, stop: int) -> np.ndarray:
    """Rows as the packer takes them: bf16 bits straight from the file, anything else as f32."""
    part = source.parts.get("weight")
    if isinstance(source.encoding, Plain) and part.dtype == "BF16":
        return part.array()[start:stop]
    return source.rows(start, stop)


def refusing(make):
    """Turn the packer's NotFinite into the sentence that names tensor, file and place."""
    def checked(recipe, start, stop):
        try:
            return make(recipe, start, stop)
        except pack_cpu.NotFinite:
            recipe.source.rows(start, stop)
            raise
    return checked


def look(source: Tensor, start: int, stop: int, *arrays: tuple[np.ndarray, str]) -> None:
    """Refuse NaN and infinities among the stored numbers (array, dtype) of these rows, without decoding what is fine."""
    for array, dtype in arrays:
        mask = {"BF16": 0x7F80, "F8_E4M3": 0x7F}.get(dtype)         # all bits of the exponent; all but the sign
        bad = ~np.isfinite(array) if mask is None else array & mask == mask
        if bad.any():
            source.rows(start, stop)                                # says which, and where


def tile_write(recipe, packing, start, array) -> Write:
    deep = recipe.source.shape[1] // DEPTH
    return Tiles(packing).codes, start // packed.STRIP * deep * packed.TILES * packing.tile_bytes, array


@refusing
def make_tiles(recipe, start, stop):
    packing = {"fp6": FP6, "fp8": FP8}[recipe.kind]
    return [tile_write(recipe, packing, start, recipe.pack(packing, floats(recipe.source, start, stop), 1.0))]


@refusing
def make_nvfp4(recipe, start, stop):
    packed_rows = recipe.pack(NVFP4, floats(recipe.source, start, stop), recipe.alpha)
    return [tile_write(recipe, NVFP4, start, packed_rows), *alpha_write(start, recipe.alpha)]


def alpha_write(start, alpha) -> list[Write]:
    """The tensor scale goes out with the first piece."""
    return [("weight_alpha", 0, np.array([alpha], np.float32))] if start == 0 else []


def keep_nvfp4(recipe, start, stop):
    source = recipe.source
    stored, parts = source.encoding, source.parts
    scale = parts["weight_scale"].array()[start:stop]
    look(source, start, stop, (scale, "F8_E4M3"))
    factor = stored.factor(parts)
    alpha = np.float32(1) / factor if stored.convention == "compressed-tensors" else factor
    array = packed.pack(NVFP4, numerics.unpack_bits(parts[stored.codes].array()[start:stop], 4), scale)
    return [tile_write(recipe, NVFP4, start, array), *alpha_write(start, alpha)]


def keep_fp8(recipe, start, stop):
    source, block = recipe.source, BlockFP8.row_step
    codes = source.parts["weight"].array()[start:stop]
    scale = source.parts["weight_scale_inv"].floats(start // block, -(-stop // block))
    look(source, start, stop, (codes, "F8_E4M3"), (scale, "F32"))
    scale = np.repeat(numerics.encode_bf16(scale), block, axis=0)[:stop - start]
    return [tile_write(recipe, FP8, start, packed.pack(FP8, codes, np.ascontiguousarray(scale)))]


@refusing
def make_rows(recipe, start, stop):
    packing = {"fp6-rows": FP6, "fp8-rows": FP8}[recipe.kind]
    codes, scales = pack_cpu.pack_rows(packing, floats(recipe.source, start, stop))
    return [(Rows(packing).codes, start * codes.shape[1], codes),
            ("weight_rows_scale", start * scales.shape[1] * 2, scales)]


def make_bf16(recipe, start, stop):
    out = numerics.encode_bf16(recipe.source.rows(start, stop))
    return [("weight", start * recipe.source.shape[1] * 2, out)]


def make_copy(recipe, start, stop):
    """Every part's share of the rows: a part has as many bytes before row `start` as its rows up to there hold."""
    source = recipe.source
    if isinstance(source.encoding, Plain):
        look(source, start, stop, (source.parts["weight"].array()[start:stop], source.parts["weight"].dtype))
    else:
        source.rows(start, stop)
    return [(name, *share(part, start, stop, source.shape[0])) for name, part in source.parts.items()]


def share(part, start, stop, rows):
    """(offset, bytes) of a part that belongs to rows [start, stop) of `rows`; all of them together cover the part."""
    data = part.shard.data(part.key)
    cut = [len(data) if at == rows else len(data) * at // rows for at in (start, stop)]
    return cut[0], data[cut[0]:cut[1]]
