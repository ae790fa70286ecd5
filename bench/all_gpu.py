"""Everything that only a GPU can show, in one go: what must be right first, side by side, then what is timed, one at a time.

    python bench/all_gpu.py --out FOLDER [--only eval_fp6 decode_fp6 ...] [--seconds 570]
    python bench/all_gpu.py --list

Each item is a command of this folder; its whole output goes to FOLDER/NAME.txt, and a row with its exit status and its last
line of JSON, if it prints one, to the terminal. A failed check does not stop the rest. What would begin after --seconds is
left out and named in the end, ready to be pasted behind --only. Checks whose names begin with `sanitizer` want NVIDIA's
compute-sanitizer on the path. FOLDER/fp6 is the embedded model in FP6, converted first. Exits with 1 if an item failed.
"""
import argparse
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
EVAL = "eval_http.py --concurrent 16"
SANITIZER = "compute-sanitizer --error-exitcode 1 --tool"
SYNTHETIC = "--shape 27b --synthetic"
CHECKS = {                        # name -> command; {fp6}: the converted model. At once: they want cores more than the GPU
    "parity": "parity.py",
    "emulator": "emulator_vs_gpu.py --jobs 8",
    "eval_bf16": f"{EVAL} --kv bf16",
    "eval_fp6": f"{EVAL} --kv bf16 --model {{fp6}}",
    "eval_chunks": f"{EVAL} --kv bf16 --model {{fp6}} --chunks 0 512 100 64 7 1 --formats f16 e4m3",
    "lossless": "lossless.py --device cuda --seconds 400 --from 4",
    "sanitizer_memory": f"{SANITIZER} memcheck parity.py --prompts 1 --tokens 2",
    "sanitizer_races": f"{SANITIZER} racecheck parity.py --prompts 1 --tokens 2",
}
TIMES = {
    "memory": f"memory_cuda.py {SYNTHETIC}",
    "decode_fp6": f"decode_cuda.py {SYNTHETIC}",
    "decode_nvfp4": f"decode_cuda.py {SYNTHETIC} --weights nvfp4 --rounds 1:0 8:0 16:0",
    "prefill": f"prefill_cuda.py {SYNTHETIC} --resident",
    "prefill_f16": f"prefill_cuda.py {SYNTHETIC} --format f16 --tokens 512 4096 --tables 4096",
    "gemm": "gemm.py",
    "gemm_f16": "gemm.py --format f16",
    "turns": "turns.py --synthetic",
    "round": "round_cuda.py --synthetic",
    "host": "host.py --shape 27b",
    "host_speculating": "host.py --shape 27b --draft auto",
    "start": "start.py",
    "gemv": "gemv.py",
}


def command_of(text, fp6):
    """Words to start, each script by this Python."""
    words = []
    for word in text.format(fp6=fp6).split():
        words += [sys.executable, str(HERE / word)] if word.endswith(".py") else [word]
    return words


class Item:
    """A command that runs, its output on its way to a file."""

    def __init__(self, name, text, out):
        self.name, self.path, self.begun = name, out / f"{name}.txt", time.perf_counter()
        with self.path.open("w") as file:
            try:
                self.process = subprocess.Popen(command_of(text, out / "fp6"), stdout=file, stderr=subprocess.STDOUT)
            except FileNotFoundError as error:
                self.process = None
                file.write(f"{error.filename} is not on the path\n")

    def end(self):
        """Wait for it, print its row, say whether it was well."""
        status = self.process.wait() if self.process else "missing"
        last = [line for line in self.path.read_text().splitlines() if line.startswith("{")]
        tqdm.write(f"{self.name:18} {'ok' if status == 0 else f'FAILED ({status})':14} "
                   f"{time.perf_counter() - self.begun:6.1f} s  {last[-1] if last else ''}")
        return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the outputs")
    parser.add_argument("--only", nargs="+", choices=[*CHECKS, *TIMES], metavar="NAME", default=[*CHECKS, *TIMES])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later than this")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options, begun = parser.parse_args(), time.perf_counter()
    if options.list or not options.out:
        for name, text in {**CHECKS, **TIMES}.items():
            print(f"{name:18} {text}")
        sys.exit(None if options.list else "Say --out FOLDER to run them.")
    options.out.mkdir(parents=True, exist_ok=True)
    checks, times = ({n: t for n, t in group.items() if n in options.only} for group in (CHECKS, TIMES))
    if any("{fp6}" in text for text in checks.values()):
        from qwentin import nano
        from qwentin.model.convert import prepare
        prepare(nano.DIRECTORY, options.out / "fp6", weights="fp6").run()
    well, left = [], []
    with tqdm(total=len(checks) + len(times)) as bar:
        running = [Item(name, text, options.out) for name, text in checks.items()]
        for item in running:
            well.append(item.end())
            bar.update()
        for name, text in times.items():
            if time.perf_counter() - begun > options.seconds:
                left.append(name)
                continue
            well.append(Item(name, text, options.out).end())
            bar.update()
    print(f"{sum(well)} of {len(well)} well" + (f"; left out: --only {' '.join(left)}" if left else ""))
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
