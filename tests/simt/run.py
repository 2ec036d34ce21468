"""Launches what `build` has prepared and checks every result; times the large ones. Needs numpy and NVIDIA's driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from .cuda import Gpu

ROTATE = 512 * 10**6  # the copies of a weight extend over so many bytes: ten times an H200's L2
COPIES = (3, 64)  # at least, at most
LAUNCHES, REPLAYS = 32, 15  # at least so many of a graph, and how often it is timed
ITEM = {"float": np.float32, "half": np.float16, "bfloat": np.uint16}


class Weights:
    """Copies of one packed weight on the GPU, each in memory of its own."""

    def __init__(self, gpu: Gpu, rows: np.ndarray, N: int, offset: int, copies: int):
        packed = np.ascontiguousarray(np.resize(rows, (N, rows.shape[1])))
        self.nbytes, self.copies = packed.nbytes, []
        for _ in range(copies):
            self.copies.append(gpu.allocate(offset + packed.nbytes) + offset)
        gpu.write(self.copies[0], packed)
        for copy in self.copies[1:]:
            gpu.copy(copy, self.copies[0], packed.nbytes)


def run(folder: Path, gpu: Gpu, timed: bool, report: Callable[[str], None]) -> dict:
    """Returns what --json writes. A case has "error" (1: the most allowed) and, if timed, "us", "percent_of_read"."""
    plan = json.loads((folder / "launches.json").read_text())
    for name, kernels in plan["cubins"].items():
        gpu.load(folder / name, list(kernels))
    result = {
        "gpu": {"name": gpu.name, "multiprocessors": gpu.multiprocessors, "l2_bytes": gpu.l2_bytes},
        "compilers": plan["compilers"],
        "reads": {},
        "cases": [],
    }
    registers = {kernel: use for kernels in plan["cubins"].values() for kernel, use in kernels.items()}
    cases = [case for case in plan["cases"] if case["timed"] == timed]
    for (quant_type, K, N, offset), group in groupby(cases, lambda c: (c["quant_type"], c["K"], c["N"], c["offset"])):
        with np.load(folder / f"data_{quant_type}_{K}.npz") as arrays:
            data = dict(arrays)
        nbytes = N * data["rows"].shape[1]
        copies = min(max(-(-ROTATE // nbytes), COPIES[0]), COPIES[1]) if timed else 1
        weights = Weights(gpu, data["rows"], N, offset, copies)
        read = read_us(gpu, weights, plan["reads"][str(nbytes)]) if timed else None
        if timed:
            result["reads"][f"{quant_type} {K}x{N}"] = read
            report(f"{quant_type} {K}x{N}: {nbytes / 1e6:.1f} MB, {copies} copies, pure read {read:.2f} us, "
                   f"{nbytes / read / 1e3:.0f} GB/s")  # fmt: skip
        for case in group:
            done = {**case, **registers[case["kernel"]], **measure(gpu, case, weights, data, read)}
            result["cases"].append(done)
            if timed or done["error"] > 1:
                report(line(done))
        gpu.free_all()
    return result


def measure(gpu: Gpu, case: dict, weights: Weights, data: dict, read: float | None) -> dict:
    """The error of a case and, if it is timed, its time."""
    M, N, dtype = case["M"], case["N"], case["dtype"]
    x = np.ascontiguousarray(data[f"x_{dtype}"][:M])
    y = np.full((M, N), 0x7FC0 if dtype == "bfloat" else np.nan, ITEM[dtype])
    bias = np.linspace(-1, 1, N, dtype=np.float32)
    at = {"x": gpu.allocate(x.nbytes), "y": gpu.allocate(y.nbytes), "bias": 0}
    gpu.write(at["x"], x)
    gpu.write(at["y"], y)
    if case["bias"]:
        at["bias"] = gpu.allocate(bias.nbytes)
        gpu.write(at["bias"], bias)
    parameters = bytes.fromhex(case["params"])

    def launch(i: int) -> None:
        at["weight"] = weights.copies[i % len(weights.copies)]
        gpu.launch(case["kernel"], case["groups"], case["threads"], [at[name] for name in case["buffers"]], parameters)

    launch(0)
    gpu.synchronize()
    gpu.read(at["y"], y)
    repeated = np.arange(N) % len(data["rows"])
    exact = data[f"exact_{dtype}"][:M, repeated] + (bias if case["bias"] else 0)
    scale = np.hypot(data[f"scale_{dtype}"][:M, repeated], bias if case["bias"] else 0)
    found = {"error": error(y, exact, scale, dtype)}
    if read is not None:
        us, fastest = gpu.time(launch, max(LAUNCHES, len(weights.copies)), REPLAYS)
        nbytes = weights.nbytes + x.nbytes + y.nbytes
        found |= {
            "us": us,
            "us_min": fastest,
            "gb_per_s": nbytes / us / 1e3,
            "percent_of_read": 100 * read / us,
            "relative_l2": float(np.linalg.norm(values(y, dtype) - exact) / np.linalg.norm(exact)),
        }
    return found


def read_us(gpu: Gpu, weights: Weights, reads: list[dict]) -> float:
    """Microseconds of the fastest pure read of one copy."""
    most = max(read["groups"][0] * read["threads"][0] for read in reads) // 32
    sums = gpu.allocate(4 * most)

    def time(read: dict) -> float:
        parameters = bytes.fromhex(read["params"])

        def launch(i: int) -> None:
            copy = weights.copies[i % len(weights.copies)]
            gpu.launch(read["kernel"], read["groups"], read["threads"], [copy, sums], parameters)

        return gpu.time(launch, max(LAUNCHES, len(weights.copies)), REPLAYS)[0]

    return min(map(time, reads))


def values(y: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat":
        return (y.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return y.astype(np.float64)


def error(y: np.ndarray, exact: np.ndarray, scale: np.ndarray, dtype: str) -> float:
    """As a multiple of the error allowed: 1 or less is right. The bounds are those of torch_qgemv.testing."""
    difference = np.abs(values(y, dtype) - exact)
    if not np.isfinite(difference).all():
        return float("inf")
    if dtype == "float":
        return float((difference / (2e-6 * scale + 1e-30)).max())
    bits = {"half": 11, "bfloat": 8}[dtype]
    ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) + 1 - bits)
    return float((difference / (0.55 * ulp + 1e-6 * scale)).max())


def line(case: dict) -> str:
    head = (
        f"  {case['kernel']:32} {case['quant_type']:6} {case['K']:>5}x{case['N']:<5} M={case['M']} "
        f"{'+bias' if case['bias'] else '':5} offset {case['offset']}  error {case['error']:.2f}"
        f"{'' if case['error'] <= 1 else ' WRONG'}"
    )
    if "us" not in case:
        return head
    return (
        f"{head}  {case['us']:8.2f} us {case['gb_per_s']:6.0f} GB/s {case['percent_of_read']:5.1f} % of the read  "
        f"{case['registers']} registers"
    )


def summary(result: dict) -> Iterator[str]:
    """Percent of the pure read at M = 1 by type and shape, then how many times as long more rows of x take."""
    cases = {
        (c["operator"], c["quant_type"], c["dtype"], c["K"], c["N"], c["M"]): c
        for c in result["cases"]
        if "us" in c and c["variant"] < 0
    }
    shapes = list(dict.fromkeys(key[3:5] for key in cases))
    counts = sorted({key[5] for key in cases} - {1})
    if not cases:
        return
    yield "\nPercent of a pure read of the packed weight, M = 1; behind it the times of M rows over the time of one"
    yield f"{'':26}" + "".join(f"{f'{K}x{N}':>34}" for K, N in shapes)
    yield f"{'':26}" + ("  M=1 " + "".join(f" M={M:<4}" for M in counts)).rjust(34) * len(shapes)
    for operator, quant_type, dtype in dict.fromkeys(key[:3] for key in cases):
        row = f"{operator:10}{quant_type:8}{dtype:8}"
        for K, N in shapes:
            one = cases.get((operator, quant_type, dtype, K, N, 1))
            more = [cases.get((operator, quant_type, dtype, K, N, M)) for M in counts]
            part = f"{one['percent_of_read']:5.1f}" if one else "    -"
            part += "".join(f" {c['us'] / one['us']:5.2f}x" if c and one else "      -" for c in more)
            row += part.rjust(34)
        yield row
    yield "\nPercent of a pure read by gemv kernel, M = 1; * marks the plan's choice"
    variants = [c for c in result["cases"] if "us" in c and c["variant"] >= 0]
    chosen = {(c["kernel"], c["K"], c["N"]) for c in cases.values()}
    for kernel in dict.fromkeys(c["kernel"] for c in variants):
        row = f"{kernel:34}"
        for c in (c for c in variants if c["kernel"] == kernel):
            mark = "*" if (kernel, c["K"], c["N"]) in chosen else " "
            row += f"{c['K']:>8}x{c['N']:<6}{c['percent_of_read']:5.1f}{mark}"
        yield row


def main(folder: Path, json_path: Path | None, timed: bool) -> int:
    result = run(folder, Gpu(), timed, lambda text: print(text, flush=True))
    print(*summary(result), sep="\n")
    wrong = [case for case in result["cases"] if not case["error"] <= 1]
    worst = max(case["error"] for case in result["cases"])
    print(f"{len(result['cases'])} results, {len(wrong)} wrong; the worst error is {worst:.2f} of the one allowed")
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    return 1 if wrong else 0
