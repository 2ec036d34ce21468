"""The command line: python -m torch_qgemv <subcommand>."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__, bench, requantize, selftest

# A subcommand is a module with a docstring (its first line is the help), add_arguments(parser) and run(args), which
# returns the exit status. run may raise SystemExit with a message for the user.
SUBCOMMANDS = {"bench": bench, "quantize": requantize, "selftest": selftest}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_qgemv")
    parser.add_argument("--version", action="version", version=f"torch_qgemv {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="subcommand")
    for name, module in SUBCOMMANDS.items():
        summary, _, details = module.__doc__.partition("\n")
        subparser = subparsers.add_parser(
            name, help=summary, description=summary + details, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
