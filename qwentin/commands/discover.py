"""`python -m qwentin discover DIR`: write model_layout.json, the inventory of a checkpoint directory."""
import json
from pathlib import Path

from ..config import ModelConfig
from ..errors import ConfigError
from ..model.layout import layout
from .inspect_config import topology

HELP = "write model_layout.json: every tensor with its role, dtype, shape and layer"
EXAMPLE = "python -m qwentin discover ~/models/Qwen3.6-27B-NVFP4 --output layout.json"


def add_arguments(parser):
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--output", default="model_layout.json", metavar="FILE", help="default: model_layout.json")
    parser.add_argument("--model-id", metavar="NAME", help="name to write into it (default: the directory's)")
    parser.add_argument("--json", action="store_true", help="print the document instead of writing it")


def run(arguments) -> int:
    directory = Path(arguments.directory)
    name = arguments.model_id or directory.resolve().name
    document = layout(directory, name, topology(ModelConfig.from_directory(directory)))
    text = json.dumps(document, indent=None if arguments.json else 2)
    if arguments.json:
        print(text)
        return 0
    try:
        Path(arguments.output).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--output: {arguments.output} cannot be written: {error.strerror}.") from None
    for warning in document["derived"]["warnings"]:
        print(f"WARNING: {warning}")
    print(f"{document['derived']['tensor_count']} tensors in {len(document['files'])} files: {arguments.output}")
    return 0
