"""A checkpoint that is not there, for plans and budgets: the headers of the BF16 one that a configuration implies, or of
the packed one that convert would make."""
import math
from dataclasses import replace
from pathlib import Path

from ..config import ModelConfig
from . import names, pack
from .container import File
from .encodings import Part
from .safetensor import Entry
from .weights import Checkpoint, assemble


class ImaginedShard:
    """The interface of safetensor.Shard, as far as headers go."""
    metadata = {}

    def __init__(self, path: Path, entries: dict[str, Entry]):
        self.path, self.entries, self.size = path, entries, max(entry.stop for entry in entries.values())

    def data(self, name):
        raise AssertionError(f"{name} exists in imagination only")

    def forget(self, name, start, stop):
        pass

    def close(self):
        pass


def imagine(config: ModelConfig, directory, shard=ImaginedShard) -> Checkpoint:
    """The checkpoint of these shapes; `shard` may be a class that makes data up."""
    entries, size = {}, 0
    for name, shape in names.expected(config).items():
        start, size = size, size + 2 * math.prod(shape)
        entries[name] = Entry("BF16", shape, start, size)
    return of_entries(config, entries, directory, shard)


def converted(checkpoint: Checkpoint, weights: str, embedding: str) -> Checkpoint:
    """What convert would make of a checkpoint that is not packed."""
    unties = pack.unties(checkpoint, weights, embedding)
    config = replace(checkpoint.config, mtp_num_hidden_layers=int(checkpoint.has_mtp),
                     tie_word_embeddings=checkpoint.config.tie_word_embeddings and not unties)
    _, entries = File("", tuple(pack.plan(checkpoint, weights, embedding))).header({})
    return of_entries(config, entries, checkpoint.directory)


def of_entries(config, entries, directory, shard=ImaginedShard) -> Checkpoint:
    """The checkpoint of one file that holds these."""
    one = shard(Path(directory) / "imagined.safetensors", entries)
    return assemble(config, {name: Part(one, name) for name in entries}, [one], Path(directory))
