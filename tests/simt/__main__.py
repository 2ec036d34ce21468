"""python tests/simt build | run | check | sanitize: the Metal kernels on an NVIDIA GPU. See README.md."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(TESTS), str(TESTS.parent)]  # in place of this folder, whose modules are simt's
BUILT = TESTS.parent / "build/simt"
TOOLS = ("memcheck", "racecheck")  # of compute-sanitizer


def build(arguments):
    from metal_sim import toolchain

    from simt import build, cases

    everything = build.format_names()
    types = everything if arguments.types == ["all"] else arguments.types or list(cases.TIMED_TYPES)
    if unknown := set(types) - set(everything):
        raise SystemExit(f"--types {', '.join(sorted(unknown))}: choose from {', '.join(everything)}, or all")
    shapes = arguments.shapes or list(cases.TIMED_SHAPES)
    try:
        return build.build(arguments.folder, arguments.arch, types, shapes)
    except toolchain.Unavailable as error:
        raise SystemExit(str(error)) from None


def run(arguments):
    from simt import cuda, run

    try:
        return run.main(arguments.folder, arguments.json, timed=arguments.command == "run")
    except cuda.Unavailable as error:
        raise SystemExit(f"{error}; `build` works without one") from None


def sanitize(arguments):
    """The small cases under compute-sanitizer, which comes with CUDA."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        raise SystemExit("no compute-sanitizer: it comes with CUDA's toolkit")
    status = 0
    for tool in TOOLS:
        check = [sys.executable, str(TESTS / "simt"), "check", "--folder", str(arguments.folder)]
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *check]
        print(" ".join(command), flush=True)
        status |= subprocess.run(command).returncode
    return status


def shape(text):
    K, _, N = text.partition("x")
    return int(K), int(N)


def main():
    parser = argparse.ArgumentParser(prog="python tests/simt", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function, text in (
        ("build", build, "compile the kernels and write all that the other commands need; needs no GPU"),
        ("run", run, "check and time the large cases on the GPU"),
        ("check", run, "check the small cases on the GPU: every format and type of x, odd sizes and addresses"),
        ("sanitize", sanitize, "check under compute-sanitizer's memcheck and racecheck"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(function=function)
        command.add_argument("--folder", type=Path, default=BUILT, help=f"default: {BUILT.relative_to(TESTS.parent)}")
        if name == "build":
            command.add_argument("--types", type=lambda text: text.split(","), help="Q4_K,Q6_K or all: those timed")
            command.add_argument("--shapes", type=lambda text: [*map(shape, text.split(","))], help="KxN,...")
            command.add_argument("--arch", default="sm_90", help="of the GPU (default: sm_90, H100 and H200)")
        elif name != "sanitize":
            command.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    arguments = parser.parse_args()
    return arguments.function(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
