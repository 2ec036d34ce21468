"""What the benchmark shows: heading, table, footnotes, chart."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path

import torch

from .memory import MB


def describe_machine() -> dict:
    """The processor and what runs on it."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "last_level_cache_bytes": _last_level_cache(),
        "torch": torch.__version__,
    }


def heading(result: dict) -> str:
    machine, settings = result["machine"], result["settings"]
    cache = machine["last_level_cache_bytes"]
    gpu = f"{machine['gpu']}; " if machine["gpu"] else ""
    lines = [
        f"{gpu}{machine['processor']}, {machine['cpus']} CPUs, last-level cache "
        f"{f'{cache / MB:.0f} MB' if cache else 'unknown'}; torch {machine['torch']}; {machine['system']}",
        f"{settings['threads']} thread(s), x in {settings['dtype']}, kernels {settings['isa']}, {settings['layout']} "
        f"weights; weights rotate over {settings['rotate_bytes'] / MB:.0f} MB each, "
        f"{'huge' if settings['huge_pages'] else 'small'} pages asked for",
    ]
    if table := settings["tuning"]:
        lines.append(f"kernels for one row of x by {table['file']}, entries: {table['entries']}")
    for name, peer in result["peers"].items():
        features = " ".join(f"{key}={value}" if value != "1" else key for key, value in peer["features"].items())
        lines.append(f"{name} {peer['version']}, commit {peer['commit']}: {features}")
    return "\n".join([*lines, footnotes(result["warnings"])])


def footnotes(warnings: list[str]) -> str:
    return "".join(f"! {warning}\n" for warning in warnings)


def table_head(result: dict) -> str:
    settings = result["settings"]
    dense = " ".join(f"{name.removeprefix('F.linear '):>15}" for name in settings["dense"])
    peer = "ggml, its fastest path" if settings["device"] == "cpu" else "the published kernel"
    return (
        f"{'':29}|{'torch_qgemv':^62}|{peer:^44}| F.linear, ratio, error\n"
        f"{'type':7}{'KxN':>12}{'M':>5}     | {'us':>8} {'median':>9} {'GB/s':>6} {'% read':>7} {'% nominal':>10} "
        f"{'FLOP/B':>7} {'error':>8} "
        f"| {'us':>8} {'ratio':>6} {'error':>8} {'path':<17} | {dense}"
    )


def table_row(case: dict, dense: list[str]) -> str:
    ours = next(iter(case["entries"].values()))
    row = (
        f"{case['quant_type']:7}{case['K']:>6}x{case['N']:<6}{case['M']:>4} {'~' if case['noisy'] else ' '}   | "
        f"{_number(ours['us_min'], 8)} {_number(ours['us_median'], 9)} {_number(ours['gb_per_s'], 6)} "
        f"{_number(ours['percent_of_read'], 6, '%')} {_number(ours['percent_of_nominal'], 9, '%')} "
        f"{ours['intensity']:7.2f} {ours['relative_error']:8.1e} | "
    )
    if peer := next((name for name, entry in case["entries"].items() if entry["group"] == "published"), None):
        row += _peer(case, "published", peer, "")
    elif name := case["best"].get("ggml"):
        row += _peer(case, "ggml", name, name[5:])
    else:
        row += f"{'-':>8} {'-':>6} {'-':>8} {'-':<17} |"
    for name in dense:
        if name in case["entries"]:
            row += f" {_times(case, name)} {case['entries'][name]['relative_error']:8.1e}"
        else:
            row += f" {'-':>6} {'-':>8}"
    return row


def _peer(case: dict, group: str, name: str, path: str) -> str:
    entry = case["entries"][name]
    return f"{_number(entry['us_min'], 8)} {_times(case, group)} {entry['relative_error']:8.1e} {path:<17} |"


def _number(value: float | None, width: int, unit: str = "") -> str:
    """'-' where nothing was measured or is known."""
    return f"{value:{width}.1f}{unit}" if value is not None else f"{'-':>{width + len(unit)}}"


def _times(case: dict, group: str) -> str:
    if group not in case["ratios"]:
        return f"{'-':>6}"  # not timed
    ratio = case["ratios"][group]
    return "refused" if ratio is None else f"{ratio:5.2f}x"


def check_chart(option: str, path: Path) -> None:
    """Stops before minutes of measuring if the chart can't be drawn."""
    if not find_spec("matplotlib"):
        raise SystemExit(f"{option} {path} needs matplotlib. Run: pip install matplotlib")


def draw_chart(result: dict, path: Path) -> None:
    """Left: time at the smallest M by type, beside a read of the weight. Right: ratio to the fastest peer over M."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shape = (result["cases"][0]["K"], result["cases"][0]["N"])
    cases = [case for case in result["cases"] if (case["K"], case["N"]) == shape]
    types = list(dict.fromkeys(case["quant_type"] for case in cases))
    smallest = min(case["M"] for case in cases)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 5), layout="constrained")

    bars = {"read of the packed weight": [], "torch_qgemv": [], "ggml": []}
    for case in (case for case in cases if case["M"] == smallest):
        peer = case["best"].get("ggml")
        bars["read of the packed weight"].append(case["read_us_min"])
        bars["torch_qgemv"].append(case["entries"]["torch_qgemv"]["us_min"])
        bars["ggml"].append(case["entries"][peer]["us_min"] if peer else 0)
    for index, (name, us) in enumerate(bars.items()):
        left.bar([position + 0.27 * (index - 1) for position in range(len(types))], us, 0.27, label=name)
    left.set_xticks(range(len(types)), types, rotation=45)
    left.set(title=f"M = {smallest}, K x N = {shape[0]} x {shape[1]}", ylabel="us, minimum")
    left.legend()

    group = "ggml" if any(case["ratios"].get("ggml") for case in cases) else result["settings"]["dense"][-1]
    for index, quant_type in enumerate(types):
        points = [(c["M"], c["ratios"].get(group)) for c in cases if c["quant_type"] == quant_type]
        points = [(M, ratio) for M, ratio in sorted(points) if ratio]
        style = "o-" if index < 10 else "s--"  # pyplot has ten colours
        right.plot(*zip(*points, strict=True) if points else ([], []), style, label=quant_type)
    right.axhline(1, color="grey", linewidth=1)
    right.set_xscale("log", base=2)
    right.set(title=f"time of {group} / time of torch_qgemv", xlabel="M, rows of x")
    right.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _last_level_cache() -> int | None:
    """Bytes of the largest cache that Linux tells of; None elsewhere."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip().removesuffix("K")) << 10 for size in sizes), default=None)
