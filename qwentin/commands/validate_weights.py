"""`python -m qwentin validate-weights DIR`: is every tensor there, with the right shape, dtype and scales?"""
import json

from tqdm import tqdm

from ..errors import CheckpointError
from ..model.weights import problems

HELP = "check every required tensor; exit code 1 and a list if anything is wrong"
EXAMPLE = "python -m qwentin validate-weights ~/models/Qwen3.6-27B-FP8 --data"


def add_arguments(parser):
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory, packed or not")
    parser.add_argument("--data", action="store_true", help="read every tensor too, and look for NaN and infinities")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments) -> int:
    tensors, found = problems(arguments.directory)
    if arguments.data:
        found += [str(fault) for fault in bad_values(tensors)]
    formats = sorted({tensor.format for tensor in tensors})
    if arguments.json:
        print(json.dumps({"directory": arguments.directory, "valid": not found, "tensors": len(tensors),
                          "formats": formats, "data_read": arguments.data, "problems": found}))
    else:
        for sentence in found:
            print(sentence)
        what = "names, shapes, dtypes, scales and values" if arguments.data else "names, shapes, dtypes and scales"
        verdict = f"{len(found)} problem{'s' * (len(found) > 1)}" if found else f"{what} are right"
        print(f"{len(tensors)} tensors ({', '.join(formats)}): {verdict}")
    return 1 if found else 0


def bad_values(tensors):
    """A fault for each tensor that holds a NaN or an infinity."""
    for tensor in tqdm(tensors, desc="reading", unit="tensor", leave=False):
        try:
            for piece in tensor.slices():
                tensor.rows(*piece)
        except CheckpointError as fault:
            yield fault
