"""Measure torch_qgemv.linear against ggml, F.linear and the speed of the memory.

Without --shapes: 4096x4096 at every M of --m, and the layers of a 9B model at M = 1. With --shapes: those, at every M.
All contestants of a case run in turn, each on copies of its weight that lie outside the caches. Columns: the minimum
and the median time of torch_qgemv.linear; GB/s of packed weight, x and y; the speed as a percentage of a mere read of
the packed weight; the relative L2 error before y is rounded; then the time of ggml's fastest kernels, how many times as
long that is, and its error; then how many times as long F.linear takes with the dequantized weight.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import torch
from tqdm import tqdm

from .. import ops
from . import report
from .ggml import Ggml
from .measure import Contestant, Dense, Ours, Problem, dense_name, relative_errors, time_in_turn
from .memory import MB, MIN_ROTATE, default_rotate, physical_memory


@dataclass(frozen=True)
class Device:
    """synchronize waits for the device; peers: names in PEERS; dense: dtypes of F.linear."""

    synchronize: Callable[[], None]
    peers: tuple[str, ...]
    dense: tuple[torch.dtype, ...]


DEVICES = {"cpu": Device(lambda: None, ("ggml",), (torch.bfloat16, torch.float32))}
PEERS = {"ggml": Ggml}  # name -> class, made with the folder of `make <name>` and the number of threads
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SQUARE = (4096, 4096)  # K, N
MODEL_SHAPES = ((4096, 12288), (12288, 4096), (4096, 8192), (4096, 1024), (4096, 32), (4096, 248320))
TOKENS = (1, 2, 4, 8, 32, 128, 512)
SETTINGS = ("device", "dtype", "layout", "threads", "seconds", "huge_pages")
BUSY_LOAD = 0.5  # load average before the run from which other work disturbs it
NOISY = 1.3  # median / minimum from which a case is marked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--types", type=_types, default=ops.quant_types(), help="GGUF types: Q4_K,Q6_K (default: all)")
    parser.add_argument("--m", type=_counts, default=TOKENS, help="rows of x: 1,4,128")
    parser.add_argument("--shapes", type=_shapes, help="KxN,... of the weight")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of x and y (default: bf16)")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
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
    parser.add_argument(
        "--rotate",
        type=_megabytes,
        metavar="MB",
        default=default_rotate(),
        help=f"the copies of each weight extend over so much memory (default here: {default_rotate() // MB})",
    )
    parser.add_argument(
        "--huge-pages",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the system for huge pages, for the weights of all contestants (default: yes)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    if args.chart:
        report.check_chart(args.chart)
    isas = torch.ops.torch_qgemv._cpu_isas()
    if args.isa and args.isa not in isas:
        raise SystemExit(f"--isa {args.isa}: only {', '.join(isas)} can run here")
    cases = list_cases(args.types, args.shapes, args.m)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.no_grad():
            result = Bench(args, args.isa or isas[0]).run(cases)
    finally:
        torch.set_num_threads(threads)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.chart:
        report.draw_chart(result, args.chart)
    return 0


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

    def __init__(self, args: argparse.Namespace, isa: str):
        self.args, self.isa, self.device, self.dtype = args, isa, DEVICES[args.device], DTYPES[args.dtype]
        self.warnings: list[str] = []
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
            "machine": report.describe_machine(),
            "settings": {
                **{
                    name: getattr(self.args, name)
                    for name in ("device", "dtype", "layout", "threads", "seconds", "huge_pages")
                },
                "isa": self.isa,
                "rotate_bytes": self.args.rotate,
            },
            "load_average": self.load,
            "peers": {peer.name: peer.describe() for peer in self.peers},
            "refusals": self.refusals,
            "warnings": self.warnings,
            "cases": [],
        }
        print(report.heading(result))
        print(report.table_head())
        with tqdm(total=sum(map(len, cases.values())), unit="case", leave=False, disable=None) as progress:
            for (quant_type, K, N), tokens in cases.items():
                for case in self.measure_all(Problem.random(quant_type, K, N, self.args.device), tokens):
                    result["cases"].append(case)
                    progress.write(report.table_row(case), file=sys.stdout)
                    progress.update()
        if noisy := sum(case["noisy"] for case in result["cases"]):
            self.warn(f"{noisy} cases are marked ~: the median is {NOISY} times the minimum or more; a busy machine?")
        print(report.footnotes(self.warnings))
        return result

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
            if not contestant.takes(M):
                self.warn(f"{contestant.name} is left out where M > 1: it can't share a process with torch there")
        contestants = [contestant for contestant in contestants if contestant.takes(M)]
        ours, K, N = contestants[0], problem.K, problem.N
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(self.args.device, self.dtype)
        calls = {contestant.name: contestant.calls(x) for contestant in contestants}
        calls["read"] = [partial(torch.ops.torch_qgemv._read, weight) for weight in ours.ring]
        times = time_in_turn(calls, self.args.seconds, self.device.synchronize)
        read = times["read"]
        entries = {}
        for contestant, error in zip(contestants, relative_errors(contestants, x, problem.matrix), strict=True):
            us = times[contestant.name]
            nbytes = contestant.weight_bytes + M * (K + N) * contestant.dtype.itemsize
            entries[contestant.name] = {
                "group": contestant.group,
                "us_min": us.minimum,
                "us_median": us.median,
                "bytes": nbytes,
                "gb_per_s": nbytes / us.minimum / 1e3,
                "percent_of_read": 100 * read.minimum / us.minimum,
                "relative_error": error,
            }
        return {
            "quant_type": problem.quant_type.name,
            "K": K,
            "N": N,
            "M": M,
            "packed_bytes": ours.weight_bytes,
            "copies": len(ours.ring),
            "read_us_min": read.minimum,
            "read_us_median": read.median,
            "entries": entries,
            **compare(entries, ours.name, self.refusals),
            "noisy": any(times[name].median > NOISY * times[name].minimum for name in (ours.name, "read")),
        }

    def _find_peers(self) -> Iterator[Ggml]:
        for name in self.device.peers if self.args.peer != "none" else ():
            try:
                yield PEERS[name](Path(self.args.peer) / name, self.args.threads)
            except FileNotFoundError as error:
                self.warn(f"no comparison with {name}: {error}. `make {name}`, in a clone, builds it (minutes)")


def compare(entries: dict[str, dict], ours: str, refusals: dict[str, str]) -> dict[str, dict]:
    """For each group of others, the fastest entry and how many times as long as ours it takes; None where refused."""
    others = {name: entry for name, entry in entries.items() if name != ours}
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
    shapes = tuple(tuple(map(_count, shape.split("x"))) for shape in text.split(","))
    if any(len(shape) != 2 for shape in shapes):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KxN,KxN")
    return shapes


def _types(text: str) -> tuple[str, ...]:
    unknown = [name for name in text.split(",") if name not in ops.quant_types()]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(ops.quant_types())}")
    return tuple(text.split(","))
