"""`python -m qwentin budget DIR --ctx N`: what serving takes, item by item, and the longest context that fits."""
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ..config import EngineConfig, ModelConfig, add_options
from ..errors import ConfigError
from ..kvpool import PAGE, pages_for
from ..model import pack
from ..model.budget import CARDS, CONTEXT, GIB, KV_HEAD_BYTES, Budget, Card, budget, float32_weights, row_bytes
from ..model.imagined import converted, imagine
from ..model.weights import Checkpoint, open_checkpoint
from ..towers import Plan, described, planned
from .inspect import part_of

HELP = "itemise the memory of serving a model and find the longest context that fits"
EXAMPLE = "python -m qwentin budget ~/models/Qwen3.6-27B --ctx 262144 --kv q4 --gpu-gib 31.4"


def add_arguments(parser):
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory, packed or not; config.json alone will do")
    parser.add_argument("--ctx", type=int, metavar="N",
                        help="context in tokens (default: 32768, or the model's longest if that is less)")
    parser.add_argument("--kv", default="fp8", metavar="KIND",
                        help=f"{', '.join(KV_HEAD_BYTES)} or a number of bits a value (default: fp8); f32 is the tower "
                             "without a GPU")
    parser.add_argument("--gpu-gib", type=float, default=31.4, metavar="G", help="memory there is (default: 31.4 GiB)")
    parser.add_argument("--chip", choices=CARDS, default="sm_120a", help="the GPU's kind (default: sm_120a)")
    add_options(parser, "prefill_format")
    parser.add_argument("--seqs", type=int, default=1, metavar="N",
                        help="sequences with a state of their own (default: 1)")
    parser.add_argument("--weights", choices=pack.WEIGHTS, default="fp6",
                        help="format to reckon with if DIR is not packed (default: fp6)")
    parser.add_argument("--embedding", choices=pack.EMBEDDINGS, default="fp6",
                        help="format to reckon with if DIR is not packed (default: fp6)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments) -> int:
    checkpoint = opened(Path(arguments.directory))
    longest = checkpoint.config.max_position_embeddings
    context = min(32768, longest) if arguments.ctx is None else arguments.ctx
    for name, value in (("--ctx", context), ("--gpu-gib", arguments.gpu_gib), ("--seqs", arguments.seqs)):
        if value <= 0:
            raise ConfigError(f"{name} is {value}; a positive number was wanted.")
    if context > longest:
        raise ConfigError(f"--ctx is {context}; this model's longest context is {longest}.")
    limit, prefill = int(arguments.gpu_gib * GIB), None
    if arguments.kv == "f32":
        weights = float32_weights(checkpoint.config, checkpoint.has_mtp)
        result = budget(checkpoint, weights, context, arguments.kv, limit, arguments.seqs)
    else:
        if not is_packed(checkpoint):
            checkpoint = converted(checkpoint, arguments.weights, arguments.embedding)
        config = EngineConfig(max_seqs=arguments.seqs, prefill_format=arguments.prefill_format)
        result, plan = on_card(config, checkpoint, context, arguments.kv, limit, CARDS[arguments.chip])
        prefill = described(plan.counted)
    if arguments.json:
        print(json.dumps(as_json(result, arguments.kv, prefill)))
    else:
        print_budget(result, prefill)
    return 0


def on_card(config: EngineConfig, checkpoint: Checkpoint, context: int, kind: str, limit: int, card: Card
            ) -> tuple[Budget, Plan]:
    """What a packed checkpoint takes of a GPU that serves one context and keeps no snapshots, and the server's own plan.

    A kind of KV that no tower has is planned for as e4m3, with that much more or less memory.
    """
    from ..model import memory                  # it builds a tower to count it, and so imports the kernels
    config = replace(config, max_model_len=context, kv_tokens=context, cache_mib=0, kv="bf16" if kind == "bf16" else "e4m3")
    more = sum(row_bytes(checkpoint, "bf16" if kind == "bf16" else "fp8")) - sum(row_bytes(checkpoint, kind))
    plan = planned(config, checkpoint, card, limit + pages_for(context) * PAGE * more)
    needed, weights = memory.needed(plan.counted), weight_items(checkpoint)
    weights["weights: wider on the GPU"] = needed["weights"] - sum(weights.values())
    working = {name: needed[name] for name in ("rounds", "scratch", "prefill") if name in needed}
    return budget(checkpoint, weights, context, kind, limit, config.max_seqs, **working, **{"CUDA context": CONTEXT}), plan


def opened(directory: Path) -> Checkpoint:
    """The checkpoint, or the one that a lone config.json would belong to."""
    if any(directory.glob("*.safetensors")):
        return open_checkpoint(directory)
    return imagine(ModelConfig.from_directory(directory), directory)


def is_packed(checkpoint: Checkpoint) -> bool:
    return any(isinstance(t.encoding, (pack.Tiles, pack.Rows)) for t in checkpoint.tensors.values())


def weight_items(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes by part of the model, as they lie in the files."""
    items = Counter()
    for tensor in checkpoint.tensors.values():
        items[f"weights: {part_of(tensor.name)}"] += tensor.nbytes
    return dict(items)


def as_json(result: Budget, kind: str, prefill: str | None) -> dict:
    """Items by name, and the fields that qwen36-fp4's budget prints, by their names."""
    items = result.items
    return {"context_tokens": result.context, "kv_cache_dtype": kind,
            "kv_cache_bytes": items[f"KV, {kind}"], "deltanet_state_bytes": items["state S"],
            "deltanet_conv_history_bytes": items["convolution window"],
            "estimated_activation_workspace_bytes": items.get("scratch", 0), "items": items, "prefill": prefill,
            "total_bytes": result.total, "limit_bytes": result.limit, "fits": result.total <= result.limit,
            "bytes_per_token": result.row, "largest_context": result.largest_context}


def print_budget(result: Budget, prefill: str | None) -> None:
    width = max(map(len, result.items))
    for name, size in result.items.items():
        print(f"{name:{width}}  {size / GIB:8.3f} GiB")
    verdict = "fits" if result.total <= result.limit else "DOES NOT FIT"
    print(f"{'total':{width}}  {result.total / GIB:8.3f} GiB  {verdict} in {result.limit / GIB:.1f} GiB")
    if prefill:
        print(f"prompts are read in {prefill}")
    print(f"one more token takes {result.row:,} bytes; the longest context that fits: {result.largest_context:,} tokens")
