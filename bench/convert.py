"""How fast the converter is, and how much memory it takes, on a checkpoint of the 27B's shape that is never stored.

    python bench/convert.py                       the plan of all of 27B, then two full layers packed for real
    python bench/convert.py --weights fp4 --threads 2
    python bench/convert.py --plan                what `convert --dry-run` prints for it, and no more
    python bench/convert.py --table               the 2.5 GB embedding table alone, from a real (sparse) file: peak memory

The tensors are views of one block of random bf16 numbers, so that making them costs nothing. The bytes written must
equal the plan's prediction. Prints a table, then one JSON line.
"""
import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from qwentin import nano, numerics
from qwentin.commands.convert import print_plan
from qwentin.config import ModelConfig
from qwentin.model.container import cut
from qwentin.model.convert import Job, prepare
from qwentin.model.encodings import Part
from qwentin.model.imagined import ImaginedShard, imagine
from qwentin.model.safetensor import Shard, header_of

CONFIG_27B = dict(
    model_type="qwen3_5", tie_word_embeddings=False, vocab_size=248320, hidden_size=5120, intermediate_size=17408,
    num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
    linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6, max_position_embeddings=262144, mtp_num_hidden_layers=1, eos_token_id=248044)
TABLE = "model.embed_tokens.weight"
LAYERS = ("model.layers.2.", "model.layers.3.")         # one of each kind


class Generator(ImaginedShard):
    """A file that is not there, its tensors views of one block of random numbers."""

    def __init__(self, path, entries):
        super().__init__(path, entries)
        values = 0.02 * np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        self.block = np.tile(numerics.encode_bf16(values), 17408 * 5120 // len(values)).view(np.uint8)

    def data(self, name):
        entry = self.entries[name]
        return self.block[:entry.stop - entry.start]


def sparse(path: Path, name: str, shape) -> Shard:
    """A file with one tensor of zeros that takes no room on the disk."""
    head, entries = header_of({name: ("BF16", shape)}, {})
    path.write_bytes(head)
    os.truncate(path, entries[name].stop)
    return Shard(path)


def generated(directory: Path):
    """The 27B as a checkpoint of generated numbers, its table of zeros; its small files go into `directory`."""
    (directory / "config.json").write_text(json.dumps(CONFIG_27B))
    shutil.copy(nano.DIRECTORY / "tokenizer.json", directory)
    shutil.copy(nano.DIRECTORY / "chat_template.jinja", directory)
    checkpoint = imagine(ModelConfig.from_directory(directory), directory, Generator)
    table = sparse(directory / "table.safetensors", TABLE, checkpoint.tensors[TABLE].shape)
    checkpoint.tensors[TABLE].parts["weight"] = Part(table, TABLE)
    return checkpoint


def timed(job: Job, threads: int) -> dict:
    """Run it; wall and processor seconds, the size on disk against the prediction."""
    start, cpu = time.perf_counter(), time.process_time()
    job.run(threads=threads)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    size = sum(path.stat().st_size for path in job.target.iterdir())
    assert size == job.size, f"{size} bytes were written, {job.size} predicted"
    return {"source_bytes": job.source_bytes, "bytes": size, "wall_s": wall, "cpu_s": cpu,
            "wall_MBps": job.source_bytes / wall / 1e6, "cpu_MBps_per_core": job.source_bytes / cpu / 1e6,
            "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="fp6")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true", help="pack the embedding table instead of two layers")
    parser.add_argument("--plan", action="store_true", help="print the plan, pack nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        checkpoint = generated(directory)
        whole = prepare(directory, directory / "whole", options.weights, opened=checkpoint)
        if options.plan:
            print_plan(whole, every=True)
            return
        chosen = [r for r in whole.recipes if r.name.startswith(TABLE if options.table else LAYERS)]
        warm = prepare(nano.DIRECTORY, directory / "warm", options.weights)
        warm.run()                                      # compiles
        row = timed(Job(checkpoint, directory / "done", cut(chosen), {}), options.threads)
    print(f"27B in {options.weights}: {len(whole.recipes)} tensors, {whole.source_bytes / 1e9:.2f} GB -> "
          f"{whole.size / 1e9:.3f} GB ({whole.size:,} bytes)")
    print(f"{len(chosen)} tensors, {row['source_bytes'] / 1e6:.0f} MB of bf16 -> {row['bytes'] / 1e6:.0f} MB, as predicted")
    print(f"{options.threads} threads: {row['wall_MBps']:.0f} MB/s by the clock, {row['cpu_MBps_per_core']:.0f} MB/s a core "
          f"by processor time; peak {row['peak_MB']:.0f} MB")
    whole_s = whole.source_bytes / row["wall_MBps"] / 1e6
    print(f"all {whole.source_bytes / 1e9:.1f} GB at that rate: {whole_s / 60:.1f} min")
    print(json.dumps({"bench": "convert", "weights": options.weights, "threads": options.threads,
                      "whole_bytes": whole.size, "whole_s": whole_s, **row}))


if __name__ == "__main__":
    main()
