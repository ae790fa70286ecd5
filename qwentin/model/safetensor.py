"""One safetensors file: its header read and checked, its tensors as views of a memory map; and the header of a new one.

    u64 n | n bytes of JSON {name: {dtype, shape, data_offsets: [start, end]}, "__metadata__": {str: str}} | data

The safetensors package cannot give numpy a bf16 or fp8 tensor, nor write a file larger than memory; this reads and
writes the same files (the tests hold it to that package).
"""
import json
import math
import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
              "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
HEADER_LIMIT = 100_000_000                              # the format's own bound on n


class Entry(NamedTuple):
    """Where a tensor lies: bytes [start, stop) of the file."""
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Shard:
    """An open safetensors file. Only the header is read until `data` is first called.

    Raises CheckpointError, naming the file, when the header is damaged or the file is not as long as it says.
    """

    def __init__(self, path):
        self.path = Path(path)
        try:
            self.size = self.path.stat().st_size
            with open(self.path, "rb") as file:
                self.entries, self.metadata = self._parse(file)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from None
        self._map = None

    def data(self, name: str) -> np.ndarray:
        """u8 [bytes of the tensor], a read-only view of the file; it must not outlive close()."""
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        entry = self.entries[name]
        return np.frombuffer(self._map, np.uint8, entry.stop - entry.start, entry.start)

    def forget(self, name: str, start: int, stop: int) -> None:
        """Take bytes [start, stop) of a tensor out of this process's memory: a stream does not come back to them."""
        first = -(-(self.entries[name].start + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self.entries[name].start + stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Close the map. A view somebody still holds keeps it open until that view dies."""
        held, self._map = self._map, None
        if held is not None:
            try:
                held.close()
            except BufferError:
                pass

    def _parse(self, file):
        if self.size < 8:
            raise CheckpointError(f"{self.path} is truncated: {self.size} bytes, less than a safetensors header.")
        n = int.from_bytes(file.read(8), "little")
        if n > min(HEADER_LIMIT, self.size - 8):
            raise CheckpointError(f"{self.path} is truncated or no safetensors file: its header claims {n} bytes, "
                                  f"the file has {self.size}.")
        try:
            header = json.loads(file.read(n))
            metadata = header.pop("__metadata__", {})
            entries = {name: Entry(e["dtype"], tuple(e["shape"]), *(8 + n + o for o in e["data_offsets"]))
                       for name, e in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(f"{self.path} is no safetensors file: its header is not the JSON that "
                                  "the format asks for.") from None
        self._check(entries, 8 + n)
        return entries, metadata

    def _check(self, entries, start):
        """Every byte of the data belongs to exactly one tensor, and the file ends where the last one does."""
        for name, e in sorted(entries.items(), key=lambda item: item[1][2:]):
            whole = all(isinstance(n, int) and n >= 0 for n in (*e.shape, e.start, e.stop))
            if e.dtype not in ITEM_BYTES or not whole:
                raise CheckpointError(f"tensor {name} in {self.path} has dtype {e.dtype!r} and shape {list(e.shape)}, "
                                      "which safetensors does not know.")
            if e.start != start or e.stop - e.start != math.prod(e.shape) * ITEM_BYTES[e.dtype]:
                raise CheckpointError(f"tensor {name} in {self.path} has offsets that do not fit its {e.dtype} shape "
                                      f"{list(e.shape)} or overlap another tensor.")
            start = e.stop
            if start > self.size:
                raise CheckpointError(f"{self.path} is truncated: tensor {name} ends at byte {start}, "
                                      f"the file has {self.size}.")
        if start != self.size:
            raise CheckpointError(f"{self.path} has {self.size - start} bytes after its last tensor.")


def header_of(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, dict[str, Entry]]:
    """The header of a file holding `tensors` (name -> dtype, shape), and where each will lie in it.

    Tensors of whole 64-byte lines come first and the header is padded to one, so that these are aligned; the others
    follow by the size of their elements, which aligns each to its own.
    """
    size = {name: math.prod(shape) * ITEM_BYTES[dtype] for name, (dtype, shape) in tensors.items()}
    order = sorted(tensors, key=lambda name: (size[name] % 64 > 0, size[name] % 64 > 0 and -ITEM_BYTES[tensors[name][0]]))
    header, start = {"__metadata__": metadata}, 0
    for name in order:
        dtype, shape = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size[name]]}
        start += size[name]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    first = 8 + len(text)
    entries = {name: Entry(*tensors[name], *(first + offset for offset in header[name]["data_offsets"])) for name in order}
    return len(text).to_bytes(8, "little") + text, entries
