"""`python -m qwentin COMMAND`: one thin parser; each command lives in a file of qwentin/commands/.

A command module holds HELP (one line), EXAMPLE (one command line), add_arguments(parser) and run(arguments) -> exit code.
Exit codes: 0 done, 1 the answer is no (a validation that failed), 2 wrong use or input that cannot be used.
"""
import argparse
import difflib
import importlib
import pkgutil
import sys

from . import __version__, commands
from .errors import QwentinError


class Parser(argparse.ArgumentParser):
    """Refuses an unknown option by naming the nearest one that exists."""

    def parse_known_args(self, args=None, namespace=None):
        namespace, rest = super().parse_known_args(args, namespace)
        known = list(self._option_string_actions)
        for word in (w.split("=")[0] for w in rest if w.startswith("-")):
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"
            self.error(f"there is no option {word}{hint}")
        return namespace, rest


def command_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


def build_parser(names: list[str]) -> Parser:
    parser = Parser(prog="python -m qwentin", description="Serve Qwen3.5/3.6/3.8 hybrid models from one GPU, or none.",
                    epilog="example: python -m qwentin chat        The HTTP server: python -m qwentin.server",
                    allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"qwentin {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name in names:
        module = importlib.import_module(f"{commands.__name__}.{name}")
        sub = choices.add_parser(name.replace("_", "-"), help=module.HELP, description=module.HELP,
                                 epilog="example: " + module.EXAMPLE, allow_abbrev=False)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; only its own module is imported, so that `chat` does not wait for the converter's imports."""
    argv = sys.argv[1:] if argv is None else argv
    names = command_names()
    wanted = [name for name in names if argv and name.replace("_", "-") == argv[0]]
    if argv and not argv[0].startswith("-") and not wanted:
        near = difflib.get_close_matches(argv[0], [n.replace("_", "-") for n in names], n=1)
        hint = f"did you mean {near[0]}?" if near else "see python -m qwentin --help"
        sys.stderr.write(f"qwentin: there is no command {argv[0]}; {hint}\n")
        return 2
    arguments = build_parser(wanted or names).parse_args(argv)
    try:
        return arguments.run(arguments)
    except QwentinError as error:
        sys.stderr.write(f"qwentin: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
