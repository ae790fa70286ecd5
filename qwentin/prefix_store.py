"""PrefixStore: kept prefixes on disk, so that a restarted server finds its conversations warm.

One safetensors file an entry: the ids, the KV rows of their pages, the recurrent state behind them, and in the metadata the
format, the model's digest and a digest of the data. A file of another model is left alone; a damaged one is reported in the
log and never used. Files are written under another name and renamed, so a crash leaves no half of one.

Who calls: engine.py, on its own thread. Proven by tests/test_prefix_store.py.
"""
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .errors import ConfigError
from .prefix import PrefixCache

log = logging.getLogger("qwentin.prefix")
FORMAT = "qwentin-prefix-1"
ENDS = 1 << 20          # bytes at both ends of a weight file that its digest reads


@dataclass(frozen=True)
class Stored:
    path: Path
    ids: np.ndarray     # i32 [length]
    bytes: int


class PrefixStore:
    """Entries of one model in a directory, at most `budget` bytes of them. Raises ConfigError if it cannot be made."""

    def __init__(self, directory, model: str, budget: int):
        self.directory, self.model, self.budget = Path(directory), model, budget
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--cache-dir: {directory} cannot be made: {error.strerror}.") from None
        files = sorted(self.directory.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        self.entries = [entry for path in files if (entry := self.read(path))]     # oldest first
        self.fresh: set[Path] = set()           # written or used by this process: never deleted to make room

    def read(self, path: Path) -> Stored | None:
        """A file's ids; None, with a line in the log if it is damaged, when it cannot be used here."""
        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT or about.get("model") != self.model:
                    return None
                return Stored(path, file.get_tensor("ids"), path.stat().st_size)
        except (SafetensorError, OSError, ValueError) as error:
            log.warning("ignoring the damaged cache file %s: %s", path, error)
            return None

    def match(self, ids: np.ndarray, longer_than: int) -> Stored | None:
        """The longest stored entry that ids begin with, if it is longer than `longer_than`."""
        fitting = [e for e in self.entries if longer_than < len(e.ids) <= len(ids)
                   and np.array_equal(e.ids, ids[:len(e.ids)])]
        return max(fitting, key=lambda e: len(e.ids), default=None)

    def load(self, entry: Stored) -> dict[str, np.ndarray] | None:
        """An entry's arrays, checked against their digest; None if the file is damaged or gone."""
        try:
            with safe_open(entry.path, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}
                if file.metadata().get("data") == digest(arrays):
                    del arrays["ids"]
                    entry.path.touch()
                    self.fresh.add(entry.path)
                    return arrays
            log.warning("ignoring the damaged cache file %s: its data differ from their digest", entry.path)
        except (SafetensorError, OSError, ValueError) as error:
            log.warning("ignoring the damaged cache file %s: %s", entry.path, error)
        self.entries.remove(entry)
        return None

    def save(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> bool:
        """Write an entry, the oldest of earlier processes making room; False if none can, or the disk will not take it."""
        if any(np.array_equal(e.ids, ids) for e in self.entries):
            return True
        arrays = {"ids": ids, **{name: np.ascontiguousarray(a) for name, a in arrays.items()}}
        size = sum(a.nbytes for a in arrays.values())
        old = [e for e in self.entries if e.path not in self.fresh]
        while size + sum(e.bytes for e in self.entries) > self.budget:
            if not old:
                return False
            self.entries.remove(old[0])
            old.pop(0).path.unlink(missing_ok=True)
        path = self.directory / f"{hashlib.sha256(self.model.encode() + ids.tobytes()).hexdigest()[:32]}.safetensors"
        part = path.with_suffix(".part")
        try:
            save_file(arrays, part, {"format": FORMAT, "model": self.model, "data": digest(arrays)})
            part.replace(path)
        except (OSError, SafetensorError) as error:
            log.warning("a prefix was not kept on disk: %s", error)
            part.unlink(missing_ok=True)
            return False
        self.entries.append(Stored(path, ids, size))
        self.fresh.add(path)
        return True

    def fill(self, cache: PrefixCache, tower, ids: np.ndarray) -> None:
        """Bring the longest stored prefix of ids back into `cache`, if it is longer than what that holds already."""
        known = cache.match(ids)
        entry = self.match(ids, known.length if known else 0)
        place = cache.make_place(len(entry.ids)) if entry else None
        if place is None:
            return
        table, slot = place
        arrays = self.load(entry)
        if arrays and tower.import_state(slot, table.pages, arrays):
            cache.insert(entry.ids, table, slot, first=int(arrays["head_first"][0]) if "head_first" in arrays else 0)
        else:
            cache.give_back(table, slot)

    def keep(self, cache: PrefixCache, tower) -> None:
        """Write what `cache` holds, the dearest first, as far as the budget goes."""
        for entry in sorted(cache.entries, key=lambda e: -e.worth):
            arrays = tower.export_state(entry.slot, entry.table.pages, entry.length)
            if not self.save(cache.ids_of(entry), {**arrays, "head_first": np.array([entry.first])}):
                break


def digest(arrays: dict[str, np.ndarray]) -> str:
    """Of names, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(f"{name} {arrays[name].dtype} {arrays[name].shape};".encode())
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.hexdigest()


def model_digest(directory) -> str:
    """Of a checkpoint: its config and tokenizer whole; size, beginning and end of each weight file."""
    found = hashlib.sha256()
    for path in sorted(Path(directory).iterdir()):
        if path.name in ("config.json", "tokenizer.json"):
            found.update(path.name.encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            with open(path, "rb") as file:
                size = path.stat().st_size
                found.update(f"{path.name} {size};".encode() + file.read(ENDS))
                file.seek(max(0, size - ENDS))
                found.update(file.read(ENDS))
    return found.hexdigest()
