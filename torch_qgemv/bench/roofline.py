"""The roofline: how fast memory and arithmetic could go, and how near the products come to that.

A product of M rows of x makes 2 M N K floating-point operations and moves the packed weight, x and y once; the ratio is
its arithmetic intensity. Below the ridge point (arithmetic per second over bytes per second) memory is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from .measure import Clock, time_in_turn

FMA_SECONDS = 0.3


@dataclass(frozen=True)
class Nominal:
    """What a chip's maker promises; None: not known for sure."""

    gb_per_s: float | None
    tflop_per_s: float | None
    source: str


# Apple's own figures, for chips of which all models have the same memory (M3 Max and M4 Max come with two). Apple has
# hardly published arithmetic rates: --peak-flops gives one.
CHIPS = {
    "Apple M1": Nominal(None, 2.6, "Apple's press release of 2020-11-10, 8 GPU cores"),
    "Apple M1 Pro": Nominal(200, None, "Apple's press release of 2021-10-18"),
    "Apple M1 Max": Nominal(400, None, "Apple's press release of 2021-10-18"),
    "Apple M1 Ultra": Nominal(800, None, "Apple's press release of 2022-03-08"),
    "Apple M2": Nominal(100, None, "Apple's press release of 2022-06-06"),
    "Apple M2 Pro": Nominal(200, None, "Apple's press release of 2023-01-17"),
    "Apple M2 Max": Nominal(400, None, "Apple's press release of 2023-01-17"),
    "Apple M2 Ultra": Nominal(800, None, "Apple's press release of 2023-06-05"),
    "Apple M3": Nominal(100, None, "Apple's technical specifications of the MacBook Pro, 2023"),
    "Apple M3 Pro": Nominal(150, None, "Apple's technical specifications of the MacBook Pro, 2023"),
    "Apple M3 Ultra": Nominal(819, None, "Apple's technical specifications of the Mac Studio, 2025"),
    "Apple M4": Nominal(120, None, "Apple's press release of 2024-05-07"),
    "Apple M4 Pro": Nominal(273, None, "Apple's press release of 2024-10-30"),
    "Apple M5": Nominal(153, None, "Apple's press release of 2025-10-15"),
}

# The note that this project starts from: Q4_K, K = N = 4096, fp16, one row of x, on an M2 Pro.
NOTE = {"quant_type": "Q4_K", "K": 4096, "N": 4096, "M": 1, "dtype": "fp16"}
NOTE_US, NOTE_GB_PER_S, NOTE_PERCENT, NOTE_ROWS, AIM_PERCENT = 63.0, 152.3, 76.0, 2, 90.0


def nominal(chip: str | None, gb_per_s: float | None, tflop_per_s: float | None) -> Nominal:
    """The figures of a chip by name, or those given instead."""
    known = CHIPS.get(chip, Nominal(None, None, "unknown chip"))
    if gb_per_s is None and tflop_per_s is None:
        return known
    return Nominal(gb_per_s or known.gb_per_s, tflop_per_s or known.tflop_per_s, "the command line")


def measure_fma(device: str, threads: int, passes: int, clock: Clock) -> float:
    """GFLOP/s of nothing but multiply-adds of float32."""
    sums = torch.empty(threads, device=device)
    call = partial(torch.ops.torch_qgemv._fma_rate, sums, passes)
    times = time_in_turn({"fma": [call]}, FMA_SECONDS, clock)["fma"]
    return call() / times.minimum / 1e3


def intensity(M: int, N: int, K: int, nbytes: float) -> float:
    """Floating-point operations per byte."""
    return 2 * M * N * K / nbytes


def note_intensity(K: int, N: int, packed_bytes: int, rows: int) -> float:
    """As the note counts it: each SIMD-group, of so many outputs, reads the fp16 x anew."""
    return intensity(1, N, K, packed_bytes + 2 * K * N / rows + 2 * N)


def complete(result: dict, promised: Nominal, fma_gflop_per_s: float | None) -> None:
    """Adds result["roofline"], and to each entry its part of the roof that was measured and of what was promised."""
    cases = result["cases"]
    reads = [case["packed_bytes"] / case["read_us_min"] / 1e3 for case in cases if case["read_us_min"]]
    measured = max(reads, default=None)
    result["roofline"] = {
        "read_gb_per_s": measured,
        "fma_gflop_per_s": fma_gflop_per_s,
        "ridge_flop_per_byte": fma_gflop_per_s / measured if fma_gflop_per_s and measured else None,
        "nominal": asdict(promised),
    }
    for case in cases:
        for entry in case["entries"].values():
            if entry["us_min"] is None:
                continue
            gflop_per_s = 2 * case["M"] * case["N"] * case["K"] / entry["us_min"] / 1e3
            roof = min(fma_gflop_per_s, entry["intensity"] * measured)
            entry |= {"gflop_per_s": gflop_per_s, "percent_of_roof": 100 * gflop_per_s / roof}


def summary(result: dict) -> Iterator[str]:
    """The ceilings in words; then, where it was measured, the case of the note."""
    roof = result["roofline"]
    if roof["read_gb_per_s"]:
        yield (
            f"measured: read {roof['read_gb_per_s']:.1f} GB/s, multiply-adds {roof['fma_gflop_per_s']:.0f} GFLOP/s; "
            f"ridge at {roof['ridge_flop_per_byte']:.1f} FLOP/byte"
        )
    promised = roof["nominal"]
    gb, tflop = promised["gb_per_s"], promised["tflop_per_s"]
    if gb or tflop:
        parts = [f"{value:g} {unit}" for value, unit in ((gb, "GB/s"), (tflop, "TFLOP/s")) if value]
        ridge = f"; ridge at {1e3 * tflop / gb:.1f} FLOP/byte" if gb and tflop else ""
        yield f"nominal: {', '.join(parts)} ({promised['source']}){ridge}"
    if result["settings"]["dtype"] == NOTE["dtype"] and result["settings"]["device"] == "mps":
        for case in result["cases"]:
            if all(case[key] == NOTE[key] for key in ("quant_type", "K", "N", "M")):
                yield from note_report(case, gb)


def note_report(case: dict, nominal_gb_per_s: float | None) -> Iterator[str]:
    """The published kernel and ours beside the note's own figures."""
    K, N, packed = case["K"], case["N"], case["packed_bytes"]
    head = f"{'us':>8}{'GB/s':>8}{'% nominal':>11}{'% read':>8}{'FLOP/byte':>11}"
    yield f"\n{'Q4_K, K = N = 4096, fp16, one row of x':40}{head}"
    theirs = note_intensity(K, N, packed, NOTE_ROWS)
    yield f"{'the note (M2 Pro)':40}{NOTE_US:8.1f}{NOTE_GB_PER_S:8.1f}{NOTE_PERCENT:10.0f}%{'':8}{theirs:11.2f}"
    for name, title in (("published", "the published mapping, here"), ("torch_qgemv", "torch_qgemv, here")):
        entry = case["entries"].get(name)
        if entry is None:
            yield f"{title:40}  not measured: --baseline published"
        elif entry["us_min"] is None:
            yield f"{title:40}{'no times on a simulated device':>35}{entry['intensity']:11.2f}"
        else:
            share = f"{100 * entry['gb_per_s'] / nominal_gb_per_s:10.0f}%" if nominal_gb_per_s else f"{'-':>11}"
            yield (
                f"{title:40}{entry['us_min']:8.1f}{entry['gb_per_s']:8.1f}{share}{entry['percent_of_read']:7.0f}%"
                f"{entry['intensity']:11.2f}"
            )
    yield f"{'the aim':40}{'':16}{AIM_PERCENT:10.0f}%"
    counts = ", ".join(f"{note_intensity(K, N, packed, rows):.2f} with {rows}" for rows in (2, 4, 8))
    yield f"FLOP/byte: weight, x and y once. As the note counts, x once for each SIMD-group: {counts} outputs a group"


def draw(result: dict, path: Path) -> None:
    """Speed over arithmetic intensity, below the roofs that were measured and promised."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    roof, promised = result["roofline"], result["roofline"]["nominal"]
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    points = [(case, entry) for case in result["cases"] for entry in case["entries"].values() if entry["us_min"]]
    span = [min(entry["intensity"] for _, entry in points) / 2, max(entry["intensity"] for _, entry in points) * 2]
    ridge = roof["ridge_flop_per_byte"]
    corners = sorted({*span, *([ridge] if span[0] < ridge < span[1] else [])})
    heights = [min(roof["fma_gflop_per_s"], x * roof["read_gb_per_s"]) for x in corners]
    axes.plot(corners, heights, "k-", label="measured: read, multiply-adds")
    if promised["gb_per_s"]:
        most = 1e3 * promised["tflop_per_s"] if promised["tflop_per_s"] else float("inf")
        corners = sorted({*span, min(max(most / promised["gb_per_s"], span[0]), span[1])})
        axes.plot(corners, [min(most, x * promised["gb_per_s"]) for x in corners], "k--", label="nominal")
    for index, quant_type in enumerate(dict.fromkeys(case["quant_type"] for case, _ in points)):
        ours = [
            (case["entries"]["torch_qgemv"]["intensity"], case["entries"]["torch_qgemv"]["gflop_per_s"])
            for case in result["cases"]
            if case["quant_type"] == quant_type and case["entries"]["torch_qgemv"]["us_min"]
        ]
        axes.plot(*zip(*ours, strict=True), "o" if index < 10 else "s", label=quant_type)
    others = [(entry["intensity"], entry["gflop_per_s"]) for case, entry in points if entry["group"] == "published"]
    if others:
        axes.plot(*zip(*others, strict=True), "kx", label="published, Q4_K")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of packed weight, x and y", ylabel="GFLOP/s")
    axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
