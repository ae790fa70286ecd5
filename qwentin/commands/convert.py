"""`python -m qwentin convert SRC DST`: pack a Hugging Face checkpoint into a directory that serves by memory map."""
import json
import sys
from collections import Counter

from tqdm import tqdm

from ..model.container import part_bytes
from ..model.convert import Job, prepare
from ..model.pack import EMBEDDINGS, WEIGHTS

HELP = "pack a Hugging Face checkpoint (bf16, FP8 or NVFP4) into a directory that the server loads by memory map"
EXAMPLE = "python -m qwentin convert ~/models/Qwen3.6-27B ~/models/Qwen3.6-27B-fp6"


def add_arguments(parser):
    parser.add_argument("source", metavar="SRC", help="checkpoint directory: config.json, tokenizer.json, *.safetensors")
    parser.add_argument("target", metavar="DST", help="directory to make; it must not exist, or be empty")
    parser.add_argument("--weights", choices=WEIGHTS, default="fp6",
                        help="format of the matrices (default: fp6); NVFP4 ones always stay as they are")
    parser.add_argument("--embedding", choices=EMBEDDINGS, default="fp6",
                        help="format of the embedding table (default: fp6)")
    parser.add_argument("--mtp", metavar="DIR", help="take the MTP head from the safetensors of this directory")
    parser.add_argument("--gpu", action="store_true", help="pack on the GPU; the same bytes")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--dry-run", action="store_true",
                        help="print what every tensor becomes and the exact size of the result; write nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments) -> int:
    packer = gpu_packer() if arguments.gpu else None
    job = prepare(arguments.source, arguments.target, arguments.weights, arguments.embedding, arguments.mtp, packer)
    if not arguments.json:
        print_plan(job, every=arguments.dry_run)
    if not arguments.dry_run:
        bar = tqdm(total=job.source_bytes, unit="B", unit_scale=True, desc="packing", file=sys.stderr,
                   disable=arguments.json)
        with bar:
            job.run(bar.update, arguments.threads)
        if not arguments.json:
            print(f"{job.target} is ready: python -m qwentin.server --model {job.target}")
    if arguments.json:
        print(json.dumps(as_json(job, arguments.dry_run)))
    return 0


def gpu_packer():
    """The packer that runs on the GPU; only here is a device touched."""
    from ..model import pack_gpu
    return pack_gpu.open_packer()


def print_plan(job: Job, every: bool) -> None:
    """What becomes of the tensors: each of them, or a line for each kind."""
    if every:
        width = max(len(recipe.name) for recipe in job.recipes)
        for recipe in job.recipes:
            print(f"{recipe.name:{width}}  {str(list(recipe.source.shape)):16} {recipe.source.format:>14} -> "
                  f"{recipe.kind:9} {part_bytes(recipe):>14,} B")
    kinds = Counter(recipe.kind for recipe in job.recipes)
    sizes = Counter()
    for recipe in job.recipes:
        sizes[recipe.kind] += part_bytes(recipe)
    for kind, count in kinds.most_common():
        print(f"{kind:10} {count:5} tensors  {sizes[kind] / 1e9:9.3f} GB")
    print(f"{'total':10} {len(job.recipes):5} tensors  {job.size / 1e9:9.3f} GB in {len(job.files)} weight files "
          f"({job.size:,} bytes), from {job.source_bytes / 1e9:.3f} GB")
    if not job.checkpoint.has_mtp:
        print("WARNING: there is no MTP head: this model will not draft. Give --mtp DIR if the head lies elsewhere.")


def as_json(job: Job, dry_run: bool) -> dict:
    return {"source": str(job.checkpoint.directory), "target": str(job.target), "dry_run": dry_run,
            "total_bytes": job.size, "source_bytes": job.source_bytes, "has_mtp": job.checkpoint.has_mtp,
            "files": {file.name: file.size for file in job.files},
            "tensors": [{"name": r.name, "shape": list(r.source.shape), "from": r.source.format, "to": r.kind,
                         "bytes": part_bytes(r)} for r in job.recipes]}
