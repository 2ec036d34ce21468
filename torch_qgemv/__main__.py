"""The command line: python -m torch_qgemv <subcommand>."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__, bench, inspection, requantize, selftest
from . import run as run_model
from .bench import tune

# A subcommand is a module with a docstring (its first line is the help), add_arguments(parser) and run(args), which
# returns the exit status. run may raise SystemExit with a message for the user.
SUBCOMMANDS = {
    "inspect": inspection,
    "run": run_model,
    "quantize": requantize,
    "selftest": selftest,
    "bench": bench,
    "tune": tune,
}
DESCRIPTION = "GGUF files: look into them, run them with the weights packed, make them smaller; and check the kernels."
EPILOG = "python -m torch_qgemv SUBCOMMAND --help says more of each."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_qgemv", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"torch_qgemv {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND", title="subcommands")
    for name, module in SUBCOMMANDS.items():
        summary = module.__doc__.partition("\n")[0]
        subparser = subparsers.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
