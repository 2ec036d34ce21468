"""Measure torch_qgemv.linear against the speed of the memory, ggml and F.linear.

Without --shapes: 4096x4096 at every M of --m, and the layers of a 9B model at M = 1. With --shapes: those, at every M.
All contestants of a case run in turn, each on copies of its weight that lie outside the caches. Columns: the minimum
and the median time of torch_qgemv.linear; GB/s of packed weight, x and y; the speed as a percentage of a mere read of
the packed weight, and of the nominal bandwidth where that is known; floating-point operations per byte; the relative L2
error before y is rounded; then the time of the peer (ggml's fastest kernels on the CPU, the published kernel on MPS),
how many times as long that is, and its error; then how many times as long F.linear takes with the dequantized weight.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gguf
import torch
from tqdm import tqdm

from .. import ops, tuning
from . import report, roofline
from .devices import DEVICES, check_device, chip_name, is_simulated
from .ggml import Ggml
from .measure import Contestant, Dense, Ours, Problem, Published, dense_name, relative_errors, time_in_turn
from .memory import MB, MIN_ROTATE, default_rotate, physical_memory

PEERS = {"ggml": Ggml}  # name -> class, made with the folder of `make <name>` and the number of threads
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SQUARE = (4096, 4096)  # K, N
MODEL_SHAPES = ((4096, 12288), (12288, 4096), (4096, 8192), (4096, 1024), (4096, 32), (4096, 248320))
NAMED_SHAPES = {"qwen3.5-9b": (MODEL_SHAPES[0], MODEL_SHAPES[1], MODEL_SHAPES[2], SQUARE, *MODEL_SHAPES[3:])}
TOKENS = (1, 2, 4, 8, 32, 128, 512)
SETTINGS = ("device", "dtype", "layout", "threads", "seconds", "huge_pages", "tuning")
BUSY_LOAD = 0.5  # load average before the run from which other work disturbs it
NOISY = 1.3  # median / minimum from which a case is marked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--types", type=_types, default=ops.quant_types(), help="GGUF types: Q4_K,Q6_K (default: all)")
    parser.add_argument("--m", type=_counts, default=TOKENS, help="rows of x: 1,4,128")
    parser.add_argument("--shapes", type=_shapes, help=f"KxN,... of the weight, or {', '.join(NAMED_SHAPES)}")
    parser.add_argument("--dtype", choices=DTYPES, help="of x and y (default: bf16 on the CPU, fp16 on mps)")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument(
        "--baseline", choices=("published",), help="the published mapping for Q4_K and one row of x as a peer (mps)"
    )
    parser.add_argument(
        "--tuning",
        nargs="?",
        const="",
        metavar="FILE",
        help="kernels by the file that `tune` has written for this GPU, or by FILE (mps)",
    )
    parser.add_argument("--threads", type=_count, default=1, help="for every contestant (default: 1)")
    parser.add_argument("--isa", help="instruction set of torch_qgemv (default: the best one here)")
    parser.add_argument(
        "--layout",
        choices=("interleaved", "plain"),
        default="interleaved",
        help="of torch_qgemv's weights: as torch_qgemv.prepare makes them (default), or as they lie in a GGUF file",
    )
    parser.add_argument(
        "--peer",
        metavar="FOLDER",
        default="build",
        help="where `make ggml` has put its folder ggml (default: build); `none`: leave the peer out",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case (default: 1)")
    add_rotate(parser)
    parser.add_argument(
        "--huge-pages",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the system for huge pages, for the weights of all contestants (default: yes)",
    )
    parser.add_argument("--peak-bandwidth", type=float, metavar="GB/s", help="nominal, for a chip not known here")
    parser.add_argument("--peak-flops", type=float, metavar="TFLOP/s", help="nominal, of float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")
    parser.add_argument("--roofline", type=Path, metavar="FILE.png", help="draw the roofline (needs matplotlib)")


def add_rotate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rotate",
        type=_megabytes,
        metavar="MB",
        default=default_rotate(),
        help=f"the copies of each weight extend over so much memory (default here: {default_rotate() // MB})",
    )


def run(args: argparse.Namespace) -> int:
    for option, path in (("--chart", args.chart), ("--roofline", args.roofline)):
        if path:
            report.check_chart(option, path)
    check_device(args.device)
    dry = is_simulated(args.device)
    if dry and (args.chart or args.roofline):
        raise SystemExit("a simulated device has no times to draw")
    if args.baseline and args.device != "mps":
        raise SystemExit(f"--baseline {args.baseline} is a Metal kernel: it needs --device mps")
    if args.tuning is not None and args.device != "mps":
        raise SystemExit("--tuning is a choice of Metal kernels: it needs --device mps")
    args.dtype = args.dtype or DEVICES[args.device].dtype
    isas = torch.ops.torch_qgemv._cpu_isas()
    if args.isa and args.isa not in isas:
        raise SystemExit(f"--isa {args.isa}: only {', '.join(isas)} can run here")
    cases = list_cases(args.types, args.shapes, args.m)
    args.tuning = None if args.tuning is None else load_table(args.tuning)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.no_grad():
            result = Bench(args, args.isa or isas[0], dry).run(cases)
    finally:
        torch.set_num_threads(threads)
        if args.tuning:
            tuning.unload_tuning()
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.chart:
        report.draw_chart(result, args.chart)
    if args.roofline:
        roofline.draw(result, args.roofline)
    return 0


def load_table(file: str) -> dict:
    """Puts a table of kernels in use; "" is the one that `tune` has written for this GPU."""
    path = Path(file) if file else tuning.default_path()
    try:
        return {"file": str(path), "entries": tuning.load_tuning(path)}
    except (OSError, ValueError) as error:
        raise SystemExit(f"--tuning: {error}") from None


def list_cases(types, shapes, tokens) -> dict[tuple[gguf.GGMLQuantizationType, int, int], tuple[int, ...]]:
    """(quant_type, K, N) -> the values of M to measure."""
    chosen = dict.fromkeys(shapes, tokens) if shapes else {SQUARE: tokens} | dict.fromkeys(MODEL_SHAPES, (1,))
    cases = {(ops.resolve_quant_type(name), K, N): ms for name in types for (K, N), ms in chosen.items()}
    for quant_type, K, N in cases:
        block_size, _ = gguf.GGML_QUANT_SIZES[quant_type]
        if K % block_size:
            raise SystemExit(
                f"--shapes {K}x{N}: K is no multiple of the {block_size} weights of a {quant_type.name} block"
            )
    return cases


class Bench:
    """One run: what takes part in it, and what its reader must be warned of."""

    def __init__(self, args: argparse.Namespace, isa: str, dry: bool = False):
        self.args, self.device, self.dtype = args, DEVICES[args.device], DTYPES[args.dtype]
        self.isa = isa if args.device == "cpu" else "Metal"
        self.dry = dry  # everything runs once, and nothing is timed
        self.clock = self.device.clock()
        self.chip = chip_name(args.device)
        self.nominal = roofline.nominal(self.chip, args.peak_bandwidth, args.peak_flops)
        self.warnings: list[str] = []
        if dry:
            self.warn("DRY RUN on a simulated device: every kernel runs, nothing is timed")
        self.load = os.getloadavg()[0]
        if self.load > BUSY_LOAD:
            self.warn(f"the machine is busy (load average {self.load:.1f}): all times are too long, ratios may be off")
        self.peers = list(self._find_peers())
        self.refusals = {peer.name: reason for peer in self.peers if (reason := peer.refusal(isa))}
        for name, reason in self.refusals.items():
            self.warn(f"no ratio to {name}: {reason}")

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def run(self, cases: dict[tuple[gguf.GGMLQuantizationType, int, int], tuple[int, ...]]) -> dict:
        """Measures all cases and prints a table; returns what --json writes."""
        result = {
            "machine": {**report.describe_machine(), "gpu": self.chip},
            "dry_run": self.dry,
            "settings": {
                **{name: getattr(self.args, name) for name in SETTINGS},
                "isa": self.isa,
                "dense": [dense_name(dtype) for dtype in self.device.dense],
                "rotate_bytes": self.args.rotate,
            },
            "load_average": self.load,
            "peers": {peer.name: peer.describe() for peer in self.peers},
            "refusals": self.refusals,
            "warnings": self.warnings,
            "cases": [],
        }
        print(report.heading(result))
        fma = self.measure_fma()
        print(report.table_head(result))
        with tqdm(total=sum(map(len, cases.values())), unit="case", leave=False, disable=None) as progress:
            for (quant_type, K, N), tokens in cases.items():
                for case in self.measure_all(Problem.random(quant_type, K, N, self.args.device), tokens):
                    result["cases"].append(case)
                    progress.write(report.table_row(case, result["settings"]["dense"]), file=sys.stdout)
                    progress.update()
        if noisy := sum(case["noisy"] for case in result["cases"]):
            self.warn(f"{noisy} cases are marked ~: the median is {NOISY} times the minimum or more; a busy machine?")
        print(report.footnotes(self.warnings))
        roofline.complete(result, self.nominal, fma)
        print(*roofline.summary(result), sep="\n")
        return result

    def measure_fma(self) -> float | None:
        """GFLOP/s of multiply-adds."""
        threads = self.device.fma_threads(self.args.threads)
        if self.dry:
            torch.ops.torch_qgemv._fma_rate(torch.empty(64, device=self.args.device), 1)
            return None
        return roofline.measure_fma(self.args.device, threads, self.device.fma_passes, self.clock)

    def measure_all(self, problem: Problem, tokens: tuple[int, ...]) -> Iterator[dict]:
        """The lines of the table for one weight. Its copies, gigabytes perhaps, are gone afterwards."""
        contestants = self.enter(problem)
        for M in tokens:
            yield self.measure(problem, contestants, M)

    def enter(self, problem: Problem) -> list[Contestant]:
        """Everyone's copies of one weight, ours first."""
        args = self.args
        ours = Ours(problem, self.dtype, args.isa, args.rotate, args.huge_pages, self.interleaves(problem))
        contestants = [ours]
        if args.baseline and problem.quant_type is gguf.GGMLQuantizationType.Q4_K:
            contestants.append(Published(problem, self.dtype, ours.ring))
        for peer in self.peers:
            contestants += peer.contestants(problem, len(ours.ring), args.huge_pages)
        for dtype in self.device.dense:
            if (nbytes := problem.N * problem.K * dtype.itemsize) <= physical_memory() // 4:
                contestants.append(Dense(problem, dtype, args.rotate, args.huge_pages))
            else:
                self.warn(f"no {dense_name(dtype)} at {problem.K}x{problem.N}: {nbytes / MB:.0f} MB is too much here")
        return contestants

    def interleaves(self, problem: Problem) -> bool:
        """Whether our weights are interleaved: what has no two blocks in a row can't be."""
        block_size, _ = gguf.GGML_QUANT_SIZES[problem.quant_type]
        return self.args.layout == "interleaved" and self.args.device == "cpu" and block_size < problem.K

    def measure(self, problem: Problem, contestants: list[Contestant], M: int) -> dict:
        """One line of the table: times, speeds, errors, ratios."""
        for contestant in contestants:
            if not contestant.takes(M) and contestant.group != Published.group:
                self.warn(f"{contestant.name} is left out where M > 1: it can't share a process with torch there")
        contestants = [contestant for contestant in contestants if contestant.takes(M)]
        ours, K, N = contestants[0], problem.K, problem.N
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(self.args.device, self.dtype)
        calls = {contestant.name: contestant.calls(x) for contestant in contestants}
        for width in self.device.read_widths:
            calls[f"read {width}"] = [partial(torch.ops.torch_qgemv._read, weight, width) for weight in ours.ring]
        times = self.time(calls)
        reads = [times[f"read {width}"] for width in self.device.read_widths]
        read = None if self.dry else min(reads, key=lambda each: each.minimum)
        entries = {}
        for contestant, error in zip(contestants, relative_errors(contestants, x, problem.matrix), strict=True):
            us = times[contestant.name]
            nbytes = contestant.weight_bytes + M * (K + N) * contestant.dtype.itemsize
            entries[contestant.name] = {
                "group": contestant.group,
                "us_min": us and us.minimum,
                "us_median": us and us.median,
                "bytes": nbytes,
                "intensity": roofline.intensity(M, N, K, nbytes),
                "gb_per_s": us and nbytes / us.minimum / 1e3,
                "percent_of_read": us and 100 * read.minimum / us.minimum,
                "percent_of_nominal": us and self.nominal.gb_per_s and nbytes / us.minimum / 10 / self.nominal.gb_per_s,
                "relative_error": error,
            }
        return {
            "quant_type": problem.quant_type.name,
            "K": K,
            "N": N,
            "M": M,
            "packed_bytes": ours.weight_bytes,
            "copies": len(ours.ring),
            "read_us_min": read and read.minimum,
            "read_us_median": read and read.median,
            "entries": entries,
            **compare(entries, ours.name, self.refusals),
            "noisy": not self.dry and any(each.median > NOISY * each.minimum for each in (times[ours.name], read)),
        }

    def time(self, calls: dict[str, list]) -> dict:
        """Times by name; where nothing is timed, None, after one call of each."""
        if not self.dry:
            return time_in_turn(calls, self.args.seconds, self.clock)
        for ring in calls.values():
            ring[0]()
        return dict.fromkeys(calls)

    def _find_peers(self) -> Iterator[Ggml]:
        for name in self.device.peers if self.args.peer != "none" else ():
            try:
                yield PEERS[name](Path(self.args.peer) / name, self.args.threads)
            except FileNotFoundError as error:
                self.warn(f"no comparison with {name}: {error}. `make {name}`, in a clone, builds it (minutes)")


def compare(entries: dict[str, dict], ours: str, refusals: dict[str, str]) -> dict[str, dict]:
    """For each group of others, the fastest entry and how many times as long as ours it takes; None where refused."""
    others = {name: entry for name, entry in entries.items() if name != ours and entry["us_min"] is not None}
    best = {}
    for name in sorted(others, key=lambda name: others[name]["us_min"]):
        best.setdefault(others[name]["group"], name)
    ratios = {
        group: None if group in refusals else entries[name]["us_min"] / entries[ours]["us_min"]
        for group, name in best.items()
    }
    return {"best": best, "ratios": ratios}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _megabytes(text: str) -> int:
    return max(MIN_ROTATE, _count(text) * MB)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split(",")))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    if text in NAMED_SHAPES:
        return NAMED_SHAPES[text]
    shapes = tuple(tuple(map(_count, shape.split("x"))) for shape in text.split(","))
    if any(len(shape) != 2 for shape in shapes):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KxN,KxN")
    return shapes


def _types(text: str) -> tuple[str, ...]:
    unknown = [name for name in text.split(",") if name not in ops.quant_types()]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(ops.quant_types())}")
    return tuple(text.split(","))
