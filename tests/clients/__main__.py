"""Run clients against the server, one after the other: python -m tests.clients [NAME ...]

Each is installed from the package registries into a folder of its own, talks to a server on a free port of loopback, and
leaves nothing running. Prints the table's rows, then one JSON line a client; exit code 1 if one failed."""
import argparse
import json
import sys
from pathlib import Path

from .catalogue import CLIENTS
from .report import HEADER


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.clients", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run (default: all): {', '.join(CLIENTS)}")
    parser.add_argument("--kept", type=Path, metavar="DIR", help="install here and find it installed the next time")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in CLIENTS]:
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    reports = []
    print(HEADER, flush=True)
    for name in options.names or CLIENTS:
        reports.append(CLIENTS[name].run(options.kept and options.kept.resolve()))
        print(reports[-1].row(), flush=True)
    for report in reports:
        print(json.dumps(report.as_dict()))
    return int(any(report.result.startswith("FAILED") for report in reports))


if __name__ == "__main__":
    sys.exit(main())
