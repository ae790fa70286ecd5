"""`python -m qwentin.kernels [NAME ...]`: check kernels against their references and print the table."""
import argparse
import sys

from . import ALL, build, lab, machines, module

EXAMPLE = """example:
  python -m qwentin.kernels rmsnorm --chip sm_120a    every case of one kernel, on the emulator with that chip's PTX
"""


def main(argv=None):
    """Exit code 0 if every kernel is within its tolerances, 1 if one is not."""
    parser = argparse.ArgumentParser(prog="python -m qwentin.kernels", epilog=EXAMPLE, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"kernels, all by default: {', '.join(ALL)}")
    parser.add_argument("--chip", choices=build.CHIPS,
                        help="run the emulator on this chip's PTX, also where there is a GPU")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in ALL]
    if unknown:
        parser.error(f"there is no kernel {unknown[0]!r}; there are {', '.join(ALL)}")
    machine = machines.Emulator(options.chip) if options.chip else machines.default()
    modules = [module(name) for name in options.names or ALL]
    if len(modules) == 1:
        return show(modules[0], machine)
    print(f"on {machine.name}")
    wrong = False
    for line in lab.table(modules, machine):
        print(line, flush=True)
        wrong = wrong or "WRONG" in line
    return 1 if wrong else 0


def show(kernel, machine):
    """Every case of one kernel, and what its first case's machine code takes."""
    report = lab.check(kernel, lab.fitting(kernel, machine))
    print(report)
    for chip in kernel.SASS:
        for name, registers, shared, spills in lab.resources(kernel, chip=chip):
            print(f"  {chip}: {name} takes {registers} registers, {shared} shared bytes, {spills} spilled bytes")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
