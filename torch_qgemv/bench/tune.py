"""Find the fastest Metal kernels for one row of x on this GPU.

For each type, dtype of x and class of shapes (N and K between the same powers of two) every variant of the gemv kernel
is timed in turn, on copies of the weight that lie outside the caches. The table shows the built-in choice, the variant
that took the least time, that time as a part of the built-in one's (over the shapes of a class, the worst), and the
noise: how far the medians of the two lie above their minimums, 2 % at least. A variant is kept where it saves more than
the noise. What is kept goes into a file for this GPU and this torch; torch_qgemv.load_tuning() and `bench --tuning` use
it, nothing else does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import torch
from tqdm import tqdm

from .. import ops, tuning
from ..testing import linear_error
from . import DTYPES, NAMED_SHAPES, _shapes, _types, add_rotate, list_cases
from .devices import DEVICES, check_device, is_simulated
from .measure import Problem, Times, time_in_turn
from .memory import copies_for, repeat

MIN_NOISE = 0.02  # of the time: what is less is taken for chance
HEAD = f"{'type':8}{'x':10}{'built-in':>10}{'best':>10}{'ratio':>8}{'noise':>8}  {'kept':10}KxN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--types", type=_types, default=ops.quant_types(), help="GGUF types: Q4_K,Q6_K (default: all)")
    parser.add_argument(
        "--shapes", type=_shapes, help=f"KxN,... of the weight (default: {', '.join(NAMED_SHAPES)}, by its name)"
    )
    parser.add_argument("--dtype", type=_dtypes, default=("fp16",), help="of x: fp16,bf16,fp32 (default: fp16)")
    parser.add_argument("--device", choices=DEVICES, default="mps")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape (default: 1)")
    add_rotate(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a file of this GPU and torch in ~/.cache")
    parser.add_argument(
        "--show",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure nothing; print what the file holds and whether it is for this GPU (exit status 1: it isn't)",
    )


def run(args: argparse.Namespace) -> int:
    if args.show is not None:
        if not args.show:
            check_device("mps")
        return show(Path(args.show) if args.show else tuning.default_path())
    if args.device != "mps":
        raise SystemExit(f"--device {args.device}: only mps has several kernels to choose from")
    check_device("mps")
    if args.output and args.output.is_dir():
        raise SystemExit(f"--output {args.output} is a folder; a file is needed")
    cases = list_cases(args.types, args.shapes, (1,))
    print(f"{tuning.gpu_name()}, torch {torch.__version__}")
    dry = is_simulated("mps")
    if dry:
        print("! DRY RUN on a simulated device: every kernel runs, nothing is timed and no file is written")
    with torch.no_grad():
        entries = list(Tuner(args, dry).run(list(cases)))
    if dry:
        return 0
    path = args.output or tuning.default_path()
    tuning.write_table(tuning.measured_here(entries), path)
    argument = repr(str(path)) if args.output else ""
    print(f"written to {path}, entries: {len(entries)}; torch_qgemv.load_tuning({argument}) puts it in use")
    return 0


@dataclass(frozen=True)
class Measured:
    """Times of the variants at one shape; None where nothing is timed."""

    built_in: str
    times: dict[str, Times] | None


@dataclass(frozen=True)
class Verdict:
    """The best variant of a class of shapes: its part of the built-in choice's time, and what may be chance of that."""

    best: str
    ratio: float
    noise: float

    @property
    def kept(self) -> bool:
        return self.ratio < 1 - self.noise


def judge(shapes: list[Measured]) -> Verdict:
    """The variant whose worst ratio to the built-in choice is the best."""
    ratios = {
        variant: max(each.times[variant].minimum / each.times[each.built_in].minimum for each in shapes)
        for variant in shapes[0].times
    }
    best = min(ratios, key=ratios.get)
    involved = [each.times[variant] for each in shapes for variant in (best, each.built_in)]
    return Verdict(best, ratios[best], max(MIN_NOISE, *(times.median / times.minimum - 1 for times in involved)))


class Tuner:
    """One run. dry: every kernel runs once, and nothing is timed."""

    def __init__(self, args: argparse.Namespace, dry: bool):
        self.args, self.dry, self.clock = args, dry, DEVICES["mps"].clock()
        self.variants = torch.ops.torch_qgemv._gemv_variants()

    def run(self, cases: list[tuple[gguf.GGMLQuantizationType, int, int]]) -> Iterator[tuning.Entry]:
        """Prints a line for each class of (quant_type, K, N), and gives the entries to keep."""
        classes = {}
        for quant_type, K, N in cases:
            place = quant_type, tuning.size_class(K), tuning.size_class(N)
            classes.setdefault(place, []).append((K, N))
        print(HEAD)
        with tqdm(total=len(cases) * len(self.args.dtype), unit="shape", leave=False, disable=None) as progress:
            for (quant_type, K, N), shapes in classes.items():
                for dtype in (DTYPES[name] for name in self.args.dtype):
                    measured = []
                    for shape in shapes:
                        measured.append(self.measure(quant_type, *shape, dtype))
                        progress.update()
                    verdict = None if self.dry else judge(measured)
                    name = str(dtype).removeprefix("torch.")
                    progress.write(_row(quant_type.name, name, shapes, measured, verdict), file=sys.stdout)
                    if verdict and verdict.kept:
                        yield tuning.Entry(quant_type.name, name, N, K, verdict.best)

    def measure(self, quant_type: gguf.GGMLQuantizationType, K: int, N: int, dtype: torch.dtype) -> Measured:
        """Runs all variants, each with one row of x and copies of one weight."""
        problem = Problem.random(quant_type, K, N, "mps")
        x = torch.randn(1, K, generator=torch.Generator().manual_seed(1)).to(dtype)
        on_mps, nbytes = x.to("mps"), N * problem.rows.shape[1]
        ring = repeat(problem.rows, N, copies_for(nbytes, self.args.rotate), huge=False)
        linear = torch.ops.torch_qgemv._linear_variant
        calls = {
            variant: [partial(linear, on_mps, weight, int(quant_type), variant) for weight in ring]
            for variant in self.variants
        }
        matrix = ops.dequantize(problem.rows.cpu(), quant_type)
        for variant, (call, *_) in calls.items():
            if linear_error(call()[:, : len(matrix)], x, matrix) > 1:
                raise SystemExit(
                    f"{variant} multiplies {problem} wrongly: `python -m torch_qgemv selftest --device mps` says more"
                )
        built_in = torch.ops.torch_qgemv._gemv_choice(int(quant_type), N, K)
        return Measured(built_in, None if self.dry else time_in_turn(calls, self.args.seconds, self.clock))


def show(path: Path) -> int:
    """Prints what a file holds. 0 if load_tuning would take it here."""
    try:
        table = tuning.read_table(path)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--show: {error}") from None
    print(f"{path}\n{table.chip}, torch {table.torch}, torch_qgemv {table.package}, entries: {len(table.entries)}")
    for entry in table.entries:
        sizes = f"K {entry.K} to {2 * entry.K - 1}, N {entry.N} to {2 * entry.N - 1}"
        print(f"{entry.type:8}{entry.dtype:10}{entry.variant:10}{sizes}")
    problem = tuning.misfit(table)
    print(f"not for this machine: it {problem}" if problem else "for this machine")
    return 1 if problem else 0


def _row(
    type_name: str, dtype: str, shapes: list[tuple[int, int]], measured: list[Measured], verdict: Verdict | None
) -> str:
    built_in = "/".join(dict.fromkeys(each.built_in for each in measured))
    found = f"{'-':>10}{'-':>8}{'-':>8}  {'-':10}"
    if verdict:
        kept = verdict.best if verdict.kept else "built-in"
        found = f"{verdict.best:>10}{verdict.ratio:8.3f}{100 * verdict.noise:7.1f}%  {kept:10}"
    return f"{type_name:8}{dtype:10}{built_in:>10}{found}{','.join(f'{K}x{N}' for K, N in shapes)}"


def _dtypes(text: str) -> tuple[str, ...]:
    if unknown := [name for name in text.split(",") if name not in DTYPES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(DTYPES)}")
    return tuple(dict.fromkeys(text.split(",")))
