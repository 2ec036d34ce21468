"""python tests/metal_cost [FORMAT ...] [--write]: prints the table of operations per weight, or writes table.txt."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from msl_check.opencl import format_names

import metal_cost


def main():
    parser = argparse.ArgumentParser(prog="python tests/metal_cost", description=metal_cost.__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", metavar="FORMAT", default=format_names(), help="Q4_K ...; default: all")
    parser.add_argument("--write", action="store_true", help=f"write {metal_cost.TABLE.name} (of all formats)")
    arguments = parser.parse_args()
    text = metal_cost.table(format_names() if arguments.write else arguments.formats)
    if arguments.write:
        metal_cost.TABLE.write_text(text)
    print(text, end="")


main()
