"""The files of a packed directory: cut, laid out, written piece by piece by threads.

Plain safetensors, one after the other about 2 GiB, with what they hold in the metadata:

    format          "qwentin"        version   "2"
    recipe          {tensor: kind}   of this file (the kinds of pack.py)
    source_sha256   {tensor: digest} of the bytes each was made from

A file's layout is known before any data: its header is written last, over zeros, once the digests are there, and only
then does the file get its name.
"""
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .encodings import stored_name
from .pack import Recipe
from .safetensor import Entry, Shard, header_of
from .weights import FORMAT, VERSION, Tensor

FILE_BYTES = 2 << 30
HASH_BYTES = 16 << 20                                   # read at a time for a digest
UNKNOWN = "0" * 64                                      # stands for a digest while a file is laid out


@dataclass(frozen=True)
class File:
    """One file to be: what goes in, and its size in bytes."""
    name: str
    recipes: tuple[Recipe, ...]

    def header(self, digests: dict[str, str]) -> tuple[bytes, dict[str, Entry]]:
        """The first bytes of the file, and stored name -> place. Digests change neither length nor places."""
        tensors = {stored_name(r.name, part): spec for r in self.recipes for part, spec in r.parts.items()}
        metadata = {"format": FORMAT, "version": VERSION,
                    "recipe": json.dumps({r.name: r.kind for r in self.recipes}),
                    "source_sha256": json.dumps({r.name: digests.get(r.name, UNKNOWN) for r in self.recipes})}
        return header_of(tensors, metadata)

    @property
    def size(self) -> int:
        head, entries = self.header({})
        return max((e.stop for e in entries.values()), default=len(head))


def part_bytes(recipe: Recipe) -> int:
    """Data bytes of a recipe's parts."""
    _, entries = header_of(recipe.parts, {})
    return sum(e.stop - e.start for e in entries.values())


def cut(recipes: Iterable[Recipe], limit: int = FILE_BYTES) -> list[File]:
    """Files of at most `limit` bytes of data, but for single tensors that are larger."""
    groups, room = [], 0
    for recipe in recipes:
        size = part_bytes(recipe)
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(recipe)
        room -= size
    return [File(f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(group)) for i, group in enumerate(groups, 1)]


def index_of(files: list[File]) -> str:
    """model.safetensors.index.json of the files."""
    places = {stored_name(r.name, part): file.name for file in files for r in file.recipes for part in r.parts}
    return json.dumps({"metadata": {"total_size": sum(part_bytes(r) for f in files for r in f.recipes)},
                       "weight_map": places}, indent=1) + "\n"


def is_written(file: File, directory: Path) -> bool:
    """Does the directory hold this file, whole, from an earlier run?"""
    try:
        return (directory / file.name).exists() and Shard(directory / file.name).entries == file.header({})[1]
    except CheckpointError:
        return False


def write(file: File, directory: Path, pool: Executor, progress: Callable[[int], None]) -> None:
    """Make the file. Raises CheckpointError for what the source holds, OSError for what the disk refuses.

    progress(bytes of the source) is called from the threads as pieces are done.
    """
    growing = directory / (file.name + ".part")
    descriptor = os.open(growing, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        reserve(descriptor, file.size)
        _, places = file.header({})
        recipes = [recipe.prepared(pool.map) for recipe in file.recipes]
        hashes = {r.name: pool.submit(digest, r.source) for r in recipes}
        work = [pool.submit(write_piece, descriptor, places, recipe, *piece, progress)
                for recipe in recipes for piece in recipe.pieces()]
        finish([*work, *hashes.values()])
        os.pwrite(descriptor, file.header({name: done.result() for name, done in hashes.items()})[0], 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    growing.rename(directory / file.name)


def finish(futures) -> None:
    """Wait for all; at the first failure drop those that have not begun, wait for the others, raise it."""
    done, rest = wait(futures, return_when=FIRST_EXCEPTION)
    for future in rest:
        future.cancel()
    wait(rest)
    for future in done:
        future.result()


def reserve(descriptor: int, size: int) -> None:
    """Take the disk space now, so that a full disk is found before the work; not every file system can."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def write_piece(descriptor, places, recipe: Recipe, start: int, stop: int, progress) -> None:
    """Make rows [start, stop) of a tensor and put the bytes where they belong."""
    for part, offset, data in recipe.make(recipe, start, stop):
        at, view = places[stored_name(recipe.name, part)].start + offset, memoryview(data).cast("B")
        while view:
            written = os.pwrite(descriptor, view, at)
            at, view = at + written, view[written:]
    progress(forget(recipe.source, start, stop))


def forget(source: Tensor, start: int, stop: int) -> int:
    """Let go of the source's pages under these rows; returns how many bytes they are."""
    total = 0
    for part in source.parts.values():
        first, last = (part.nbytes * row // max(source.shape[0], 1) for row in (start, stop))
        part.shard.forget(part.key, first, last)
        total += last - first
    return total


def digest(source: Tensor) -> str:
    """SHA-256 of a tensor's bytes in the source, its parts in the order of their names."""
    sha = hashlib.sha256()
    for _, part in sorted(source.parts.items()):
        data = part.shard.data(part.key)
        for start in range(0, len(data), HASH_BYTES):
            sha.update(data[start:start + HASH_BYTES])
            part.shard.forget(part.key, start, min(start + HASH_BYTES, len(data)))
    return sha.hexdigest()
