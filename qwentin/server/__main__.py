"""`python -m qwentin.server`: serve a checkpoint over HTTP with OpenAI's routes."""
import argparse
import asyncio
import logging
import sys

from ..config import add_options, from_options
from ..engine import Engine
from ..errors import CheckpointError, ConfigError
from .process import serve

EXAMPLE = """example:
  python -m qwentin.server --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Please add 696 and 336."}]}'
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m qwentin.server", description=__doc__, epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(from_options(options), Engine.load, lambda line: print(line, flush=True)))
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:       # the second signal
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
