"""`python -m qwentin inspect DIR`: what a checkpoint directory holds, in which formats, and where its bytes are."""
import hashlib
import json
from collections import Counter
from pathlib import Path

from ..model import names
from ..model.weights import FORMAT, Checkpoint, open_checkpoint

HELP = "show a checkpoint's formats, sizes, MTP head and digests"
EXAMPLE = "python -m qwentin inspect ~/models/Qwen3.6-27B-fp6"
# part -> a word in the names of its tensors; the first that fits
PARTS = {"MTP head": "mtp.", "embedding": "embed_tokens", "head": "lm_head", "MLP": ".mlp.",
         "linear attention": ".linear_attn.", "full attention": ".self_attn.", "norms": "norm"}
BAR = 40                                                # characters of the longest bar


def add_arguments(parser):
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory, packed or not")
    parser.add_argument("--digests", action="store_true", help="read every file and print its SHA-256")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments) -> int:
    with open_checkpoint(arguments.directory) as checkpoint:
        facts = describe(checkpoint)
        if arguments.digests:
            facts["file_sha256"] = {shard.path.name: file_digest(shard.path) for shard in checkpoint.shards}
    if arguments.json:
        print(json.dumps(facts))
    else:
        print_facts(facts)
    return 0


def part_of(name: str) -> str:
    return next(part for part, word in PARTS.items() if word in name)


def describe(checkpoint: Checkpoint) -> dict:
    """All that is shown, as JSON."""
    config, tensors = checkpoint.config, checkpoint.tensors.values()
    parts, formats, counts = Counter(), Counter(), Counter()
    for tensor in tensors:
        parts[part_of(tensor.name)] += tensor.nbytes
        formats[tensor.format] += tensor.nbytes
        counts[tensor.format] += 1
    packed = [shard.metadata for shard in checkpoint.shards if shard.metadata.get("format") == FORMAT]
    return {
        "directory": str(checkpoint.directory), "packed_version": packed[0]["version"] if packed else None,
        "layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "parameters": sum(count(t.shape) for t in tensors if not names.is_mtp(t.name)),
        "mtp_parameters": sum(count(t.shape) for t in tensors if names.is_mtp(t.name)), "has_mtp": checkpoint.has_mtp,
        "tensors": len(checkpoint.tensors), "bytes": sum(t.nbytes for t in tensors),
        "parts": {part: parts[part] for part in PARTS if parts[part]},
        "formats": {name: {"tensors": counts[name], "bytes": size} for name, size in formats.most_common()},
        "files": {shard.path.name: shard.size for shard in checkpoint.shards},
        "source_sha256": source_digest(packed) if packed else None}


def count(shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def source_digest(packed: list[dict]) -> str:
    """One SHA-256 over the digests of all source tensors, in the order of their names."""
    digests = {name: value for metadata in packed for name, value in json.loads(metadata["source_sha256"]).items()}
    lines = "".join(f"{value}  {name}\n" for name, value in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def print_facts(facts: dict) -> None:
    """The facts, and a picture of the bytes."""
    kind = f"packed by qwentin, version {facts['packed_version']}" if facts["packed_version"] else "not packed"
    print(f"{facts['directory']}: {kind}")
    print(f"{facts['parameters'] / 1e6:,.1f} M parameters, {facts['layers']} layers, hidden {facts['hidden_size']}, "
          f"vocabulary {facts['vocab_size']}; {facts['tensors']} tensors, {size(facts['bytes'])} in "
          f"{len(facts['files'])} file{'s' * (len(facts['files']) > 1)}")
    head = f"{facts['mtp_parameters'] / 1e6:,.1f} M parameters" if facts["has_mtp"] else "NONE: this model will not draft"
    print(f"MTP head: {head}\n")
    print_bars(facts["parts"], facts["bytes"])
    print()
    print_bars({f"{name} ({entry['tensors']})": entry["bytes"] for name, entry in facts["formats"].items()}, facts["bytes"])
    if facts["source_sha256"]:
        print(f"\nsource  sha256 {facts['source_sha256']}")
    for name, value in facts.get("file_sha256", {}).items():
        print(f"{value}  {name}")


def print_bars(rows: dict[str, int], total: int) -> None:
    width, most = max(map(len, rows)), max(rows.values())
    for name, value in rows.items():
        bar = "#" * max(round(BAR * value / most), 1)
        print(f"{name:{width}}  {size(value):>9}  {100 * value / total:5.1f} %  {bar}")


def size(value: int) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.2f} MB"
