"""Open a checkpoint directory: find its files, match names, refuse what cannot be served, read tensors as float32.

    with open_checkpoint("/models/Qwen3.8-27B-FP8") as checkpoint:
        w = checkpoint.f32("model.layers.0.mlp.up_proj.weight")        # f32 [F, D]

Opening reads headers only and checks every tensor's name, dtype, shape, companions and place in its file. Data comes
through memory maps, so a tensor costs memory only while it is read.
"""
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..config import ModelConfig, read_json
from ..errors import CheckpointError
from . import names
from .encodings import FP8_BLOCK, Part, choose, owner
from .safetensor import Shard

INDEX = "model.safetensors.index.json"
QUANTISATIONS = ("fp8", "compressed-tensors", "modelopt")
FORMAT, VERSION = "qwentin", "2"                        # in the metadata of the files that `qwentin convert` writes
SLICE_BYTES = 64 << 20                                  # float32 bytes decoded at a time

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model as it is stored."""
    name: str                                           # canonical
    shape: tuple[int, ...]                              # once decoded
    encoding: object                                    # an entry of encodings.ENCODINGS
    parts: dict[str, Part]

    @property
    def nbytes(self) -> int:
        """Bytes in the files, companions included."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def format(self) -> str:
        """The encoding's name, or the dtype of plain numbers."""
        return self.encoding.name if self.encoding.name != "plain" else self.parts["weight"].dtype.lower()

    def slices(self) -> Iterator[tuple[int, int]]:
        """Cut the first axis into ranges [start, stop) of about SLICE_BYTES once decoded."""
        size = int(np.prod(self.shape[1:], initial=4))
        step = max(SLICE_BYTES // size // FP8_BLOCK, 1) * FP8_BLOCK
        return ((start, min(start + step, self.shape[0])) for start in range(0, self.shape[0], step))

    def rows(self, start: int, stop: int) -> np.ndarray:
        """f32 rows [start, stop) of the first axis; `start` a multiple of encoding.row_step.

        Raises CheckpointError naming the tensor, its file and the place when a value is NaN or infinite.
        """
        out = self.encoding.rows(self.parts, start, stop)
        if not np.isfinite(out).all():
            place = np.argwhere(~np.isfinite(out))[0]
            value = out[tuple(place)]
            place[0] += start
            main = max(self.parts.values(), key=lambda part: part.nbytes)
            raise main.fault(f"holds {value} at {[int(i) for i in place]}")
        return out

    def f32(self) -> np.ndarray:
        """The whole tensor, f32, C-contiguous."""
        out = np.empty(self.shape, np.float32)
        for start, stop in self.slices():
            out[start:stop] = self.rows(start, stop)
        return out


class Checkpoint:
    """An open checkpoint, as a context manager or until close(). Made by open_checkpoint."""

    def __init__(self, directory: Path, config: ModelConfig, tensors: dict[str, Tensor], shards: list[Shard]):
        self.directory = directory
        self.config = config
        self.tensors = tensors                          # canonical name -> Tensor, in the order of a forward pass
        self.shards = shards

    @property
    def has_mtp(self) -> bool:
        """The draft head is there, whole."""
        return any(map(names.is_mtp, self.tensors))

    def names(self) -> list[str]:
        return list(self.tensors)

    def f32(self, name: str) -> np.ndarray:
        """The tensor decoded: f32, C-contiguous. Raises CheckpointError at a NaN or an infinity."""
        return self.tensors[name].f32()

    def raw(self, name: str) -> dict[str, tuple[np.ndarray, str, tuple[int, ...]]]:
        """Part ("weight", "weight_scale_inv", ...) -> (u8 view of its bytes, safetensors dtype, shape), undecoded."""
        return {part: (p.shard.data(p.key), p.dtype, p.shape) for part, p in self.tensors[name].parts.items()}

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def open_checkpoint(directory, mtp=None) -> Checkpoint:
    """The checkpoint of a directory. Raises ConfigError or CheckpointError: one sentence, before any data is read.

    `mtp` is another directory to take the draft head from, whatever the first says of one.
    """
    directory = Path(directory)
    config = ModelConfig.from_directory(directory)
    check_quantisation(directory)
    shards, stored = read_headers(directory)
    if mtp is not None:
        config = replace(config, mtp_num_hidden_layers=1)
        more, head = read_headers(Path(mtp))
        head = {key: part for key, part in head.items() if names.is_mtp(key)}
        if not head:
            raise CheckpointError(f"{mtp} holds no mtp.* tensor; the files of an MTP head were wanted.")
        shards, stored = shards + more, {k: p for k, p in stored.items() if not names.is_mtp(k)} | head
    return assemble(config, stored, shards, directory)


def assemble(config: ModelConfig, stored: dict[str, Part], shards: list[Shard], directory: Path) -> Checkpoint:
    """The checkpoint that these stored tensors are. Raises CheckpointError at the first that is not as it should be."""
    tensors = {}
    for name, found in match(config, stored, directory):
        if isinstance(found, CheckpointError):
            raise found
        tensors[name] = found
    return Checkpoint(directory, config, tensors, shards)


def problems(directory) -> tuple[list[Tensor], list[str]]:
    """The tensors that are as they should be, and a sentence for each fault of the others, all of them."""
    directory = Path(directory)
    config = ModelConfig.from_directory(directory)
    try:
        check_quantisation(directory)
        _, stored = read_headers(directory)
    except CheckpointError as fault:
        return [], [str(fault)]
    found = [each for _, each in match(config, stored, directory)]
    return [t for t in found if isinstance(t, Tensor)], [str(f) for f in found if isinstance(f, CheckpointError)]


def check_quantisation(directory: Path) -> None:
    """Refuse a quantization_config that names a scheme, or a block, that nothing here decodes."""
    path = directory / "config.json"
    outer = read_json(path)
    quantisation = outer.get("quantization_config") or outer.get("text_config", {}).get("quantization_config") or {}
    method = quantisation.get("quant_method", "fp8")
    if method not in QUANTISATIONS:
        raise CheckpointError(f"{path}: quant_method is {method!r}; {', '.join(QUANTISATIONS)} can be read.")
    block = quantisation.get("weight_block_size") or [FP8_BLOCK, FP8_BLOCK]
    if method == "fp8" and list(block) != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(f"{path}: weight_block_size is {block}; [{FP8_BLOCK}, {FP8_BLOCK}] was wanted.")


def read_headers(directory: Path) -> tuple[list[Shard], dict[str, Part]]:
    """Every safetensors file of the directory, and where each stored name lies. The index, if any, is believed."""
    index = directory / INDEX
    if index.exists():
        return follow_index(index)
    shards = [open_shard(path) for path in sorted(directory.glob("*.safetensors"))]
    if not shards:
        raise CheckpointError(f"{directory} holds no *.safetensors file.")
    stored = {}
    for shard in shards:
        for key in shard.entries:
            if key in stored:
                raise CheckpointError(f"tensor {key} stands both in {stored[key].shard.path} and in {shard.path}.")
            stored[key] = Part(shard, key)
    return shards, stored


def open_shard(path: Path) -> Shard:
    """The file, unless another version of the converter wrote it: the layout of tiles may differ."""
    shard = Shard(path)
    if shard.metadata.get("format") == FORMAT and shard.metadata.get("version") != VERSION:
        raise CheckpointError(f"{path} is in version {shard.metadata.get('version')} of the packed format; this program "
                              f"reads version {VERSION}.")
    return shard


def follow_index(index: Path) -> tuple[list[Shard], dict[str, Part]]:
    """The files and tensors that an index lists."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names.")
    shards = {}
    for key, file in places.items():
        path = index.parent / file
        if not path.is_file():
            raise CheckpointError(f"tensor {key} should be in {path}, says {index.name}, but that file is missing.")
        if file not in shards:
            shards[file] = open_shard(path)
        if key not in shards[file].entries:
            raise CheckpointError(f"tensor {key} should be in {path}, says {index.name}, but is not in it.")
    return list(shards.values()), {key: Part(shards[file], key) for key, file in places.items()}


def match(config: ModelConfig, stored: dict, directory: Path) -> Iterator[tuple[str, Tensor | CheckpointError]]:
    """Each tensor that the configuration asks for with what was found for it, then each stored one nobody asked for."""
    found, double = group(stored)
    yield from double
    wanted = names.expected(config)
    if config.mtp_num_hidden_layers and not any(map(names.is_mtp, found)):
        log.warning("%s: config.json announces an MTP head but there is no mtp.* tensor: it will not draft.", directory)
        wanted = {name: shape for name, shape in wanted.items() if not names.is_mtp(name)}
    for name, shape in wanted.items():
        if name not in found:
            yield name, CheckpointError(f"tensor {name} is missing: {source(stored, directory)} does not hold it.")
            continue
        try:
            encoding = choose(found[name])
            encoding.check(found[name], shape)
            yield name, Tensor(name, shape, encoding, found[name])
        except CheckpointError as fault:
            yield name, fault
    for name in drop_unused([name for name in found if name not in wanted], config, directory):
        yield name, next(iter(found[name].values())).fault("is not part of the model that config.json describes")


def group(stored: dict[str, Part]) -> tuple[dict[str, dict[str, Part]], list]:
    """Canonical tensor -> its parts, vision left out; and a fault for each name that two prefixes claim."""
    found, double = {}, []
    for key, part in stored.items():
        if names.is_vision(key):
            continue
        name, kind = owner(names.canonical(key))
        twin = found.setdefault(name, {}).setdefault(kind, part)
        if twin is not part:
            double.append((name, part.fault(f"is the same tensor as {twin.key} in {twin.shard.path}")))
    return found, double


def drop_unused(extra: list[str], config: ModelConfig, directory: Path) -> list[str]:
    """`extra` without what checkpoints carry though their config.json has no use for it; the log says so."""
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        log.warning("%s: lm_head.weight is ignored: config.json ties the head to the embedding.", directory)
        extra = [name for name in extra if name != "lm_head.weight"]
    if not config.mtp_num_hidden_layers and any(map(names.is_mtp, extra)):
        log.warning("%s: the mtp.* tensors are ignored: config.json has mtp_num_hidden_layers 0.", directory)
        extra = [name for name in extra if not names.is_mtp(name)]
    return extra


def source(stored: dict[str, Part], directory: Path) -> str:
    """What was searched, for a sentence: the file, or the index, or the directory."""
    files = {part.shard.path for part in stored.values()}
    many = directory / INDEX if (directory / INDEX).exists() else directory
    return str(files.pop() if len(files) == 1 else many)
