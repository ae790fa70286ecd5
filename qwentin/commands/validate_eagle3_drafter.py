"""`python -m qwentin validate-eagle3-drafter DIR`: is this a drafter, whole, with a map into the target's vocabulary?"""
import json

from ..errors import CheckpointError, ConfigError
from ..model.eagle3 import validate

HELP = "check an EAGLE-3 drafter: config, every tensor, the vocabulary map; exit code 1 if anything is wrong"
EXAMPLE = "python -m qwentin validate-eagle3-drafter ~/models/Qwen3.6-27B-EAGLE3"


def add_arguments(parser):
    parser.add_argument("directory", metavar="DIR", help="drafter directory: config.json and *.safetensors")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments) -> int:
    try:
        facts = validate(arguments.directory)
    except (CheckpointError, ConfigError) as fault:
        print(json.dumps({"drafter_dir": arguments.directory, "valid": False, "problem": str(fault)})
              if arguments.json else str(fault))
        return 1
    if arguments.json:
        print(json.dumps({"valid": True, **facts}))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    return 0
