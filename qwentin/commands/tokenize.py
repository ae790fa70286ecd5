"""`python -m qwentin tokenize --text TEXT`: the ids of a text, as JSON."""
import json
import sys

from ..config import add_options
from ..tokenizer import Tokenizer

HELP = "print the token ids of a text"
EXAMPLE = "python -m qwentin tokenize --text 'The capital of Italy is'"


def add_arguments(parser):
    add_options(parser, "model")
    parser.add_argument("--text", help="the text (default: standard input)")
    parser.add_argument("--json", action="store_true", help="print ids with the bytes they stand for, as JSON")


def run(arguments) -> int:
    tokenizer = Tokenizer(arguments.model)
    ids = tokenizer.encode(sys.stdin.read() if arguments.text is None else arguments.text).tolist()
    if arguments.json:
        print(json.dumps({"ids": ids, "count": len(ids), "tokens": [tokenizer.token_text(i) for i in ids]}))
    else:
        print(json.dumps(ids, separators=(",", ":")))
    return 0
