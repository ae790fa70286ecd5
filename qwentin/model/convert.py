"""Turn a checkpoint directory into a packed one that serves by itself.

    job = prepare(source, target, weights="fp6")          # headers only: every refusal happens here or names a tensor
    job.run(progress=print)                               # writes target.partial, then renames it to target

Interrupted, the files already whole stay in target.partial and the same command goes on from them. The same source and
options give the same bytes, whatever the number of threads.
"""
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..config import read_json
from ..errors import CheckpointError, ConfigError
from . import container, pack
from .container import File
from .weights import INDEX, Checkpoint, open_checkpoint

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE")
PLAN = "plan.json"                                      # in target.partial: which conversion the files there belong to

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A conversion that has been checked and can run."""
    checkpoint: Checkpoint
    target: Path
    files: list[File]
    texts: dict[str, bytes] = field(repr=False)         # the small files: name -> content

    @property
    def recipes(self) -> list[pack.Recipe]:
        return [recipe for file in self.files for recipe in file.recipes]

    @property
    def size(self) -> int:
        """Bytes of the finished directory, exact."""
        return sum(file.size for file in self.files) + sum(map(len, self.texts.values()))

    @property
    def source_bytes(self) -> int:
        """Bytes of the source that will be read."""
        return sum(recipe.source.nbytes for recipe in self.recipes)

    @property
    def partial(self) -> Path:
        return self.target.with_name(self.target.name + ".partial")

    @property
    def identity(self) -> str:
        """Of the source's headers and of all that will be written: equal for runs that would give the same files."""
        sha = hashlib.sha256()
        for shard in self.checkpoint.shards:
            sha.update(repr((shard.path.name, shard.size, sorted(shard.entries.items()))).encode())
        for file in self.files:
            sha.update(file.header({})[0])
        for name, content in self.texts.items():
            sha.update(name.encode() + content)
        return sha.hexdigest()

    def run(self, progress: Callable[[int], None] = lambda _: None, threads: int = 0) -> None:
        """Convert; progress(n) is told of n more bytes of the source done. Raises CheckpointError or ConfigError."""
        try:
            self._run(progress, threads or os.cpu_count())
        except OSError as error:
            where = f"{error.filename or self.partial}"
            if error.errno == errno.ENOSPC:
                raise ConfigError(f"the disk of {self.partial} is full; free it and run the same command again, it goes on "
                                  "from what is finished.") from None
            raise ConfigError(f"{where} cannot be written: {error.strerror}.") from None

    def _run(self, progress, threads):
        open_partial(self.partial, self.identity)
        with ThreadPoolExecutor(threads, "pack") as pool:
            try:
                for file in self.files:
                    if container.is_written(file, self.partial):
                        progress(sum(recipe.source.nbytes for recipe in file.recipes))
                    else:
                        container.write(file, self.partial, pool, progress)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for name, content in self.texts.items():
            (self.partial / name).write_bytes(content)
        (self.partial / PLAN).unlink()
        self.partial.rename(self.target)


def prepare(source, target, weights: str = "fp6", embedding: str = "fp6", mtp=None, pack_tiles=None,
            opened: Checkpoint | None = None, file_bytes: int = container.FILE_BYTES) -> Job:
    """Check everything that can be checked without reading data. Raises CheckpointError or ConfigError.

    weights, embedding   keys of pack.WEIGHTS and pack.EMBEDDINGS
    mtp                  directory to take the draft head from
    pack_tiles           another packer than pack_cpu.pack, of the same signature and bytes
    opened               the checkpoint of `source`, if it is open already
    """
    source, target = Path(source), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already; give the name of a new directory.")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target.absolute().parent} is no directory; {target.name} cannot be made in it.")
    checkpoint = opened or open_checkpoint(source, mtp)
    extra = {"pack": pack_tiles} if pack_tiles else {}
    recipes = pack.plan(checkpoint, weights, embedding, **extra)
    files = container.cut(recipes, file_bytes)
    texts = {"config.json": new_config(checkpoint, pack.unties(checkpoint, weights, embedding)),
             INDEX: container.index_of(files).encode(), **side_files(source)}
    job = Job(checkpoint, target, files, texts)
    free = shutil.disk_usage(target.absolute().parent).free + held(job.partial)
    if job.size > free:
        raise ConfigError(f"{target.absolute().parent} has {free / 1e9:.1f} GB free; the packed checkpoint takes "
                          f"{job.size / 1e9:.1f} GB.")
    return job


def held(directory: Path) -> int:
    """Bytes an earlier run already wrote there."""
    return sum(path.stat().st_size for path in directory.iterdir()) if directory.is_dir() else 0


def open_partial(directory: Path, identity: str) -> None:
    """Make the working directory, or take up the one of an interrupted run; one of another conversion is emptied."""
    plan = directory / PLAN
    known = plan.exists() and plan.read_text()
    if directory.exists() and known != identity:
        log.warning("%s is left from another conversion and starts anew.", directory)
        shutil.rmtree(directory)
    directory.mkdir(exist_ok=True)
    plan.write_text(identity)


def new_config(checkpoint: Checkpoint, unties: bool) -> bytes:
    """config.json of the packed directory: the source's, with what has changed."""
    outer = read_json(checkpoint.directory / "config.json")
    text = outer.get("text_config", outer)
    for level in (outer, text):
        level.pop("quantization_config", None)          # each tensor's parts say how it is stored
        if unties and "tie_word_embeddings" in level:
            level["tie_word_embeddings"] = False
    text["mtp_num_hidden_layers"] = int(checkpoint.has_mtp)
    return (json.dumps(outer, indent=2, ensure_ascii=False) + "\n").encode()


def side_files(source: Path) -> dict[str, bytes]:
    """Tokenizer, chat template and generation defaults, as they are."""
    found = {name: (source / name).read_bytes() for name in SIDE_FILES if (source / name).is_file()}
    if "tokenizer.json" not in found:
        raise CheckpointError(f"{source / 'tokenizer.json'} is missing; a packed directory serves by itself and needs it.")
    if "chat_template.jinja" not in found and b'"chat_template"' not in found.get("tokenizer_config.json", b""):
        log.warning("%s has no chat template: the packed directory will serve completions, not chat.", source)
    return found
