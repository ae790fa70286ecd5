"""A BF16 checkpoint that is not there: only the headers that a configuration implies, for plans and budgets."""
import math
from pathlib import Path

from ..config import ModelConfig
from . import names
from .encodings import Part
from .safetensor import Entry
from .weights import Checkpoint, assemble


class ImaginedShard:
    """The interface of safetensor.Shard, as far as headers go."""
    metadata = {}

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]):
        self.path, self.entries, self.size = path, {}, 0
        for name, shape in shapes.items():
            start, self.size = self.size, self.size + 2 * math.prod(shape)
            self.entries[name] = Entry("BF16", shape, start, self.size)

    def data(self, name):
        raise AssertionError(f"{name} exists in imagination only")

    def forget(self, name, start, stop):
        pass

    def close(self):
        pass


def imagine(config: ModelConfig, directory, shard=ImaginedShard) -> Checkpoint:
    """The checkpoint of these shapes; `shard` may be a class that makes data up."""
    shapes = names.expected(config)
    one = shard(Path(directory) / "imagined.safetensors", shapes)
    return assemble(config, {name: Part(one, name) for name in shapes}, [one], Path(directory))
