"""One file a command of `python -m qwentin`: HELP, EXAMPLE, add_arguments(parser), run(arguments) -> exit code."""
