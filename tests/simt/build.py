"""Prepares a folder with cubins, launches and data: all that a machine with a GPU needs beside these sources."""

import json
import shutil
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
from metal_sim import toolchain, translate
from msl_check.opencl import format_names, metal_sources

from . import cases, nvptx

__all__ = ["build", "compile_kernels", "format_names"]


def build(folder: Path, arch: str, types: list[str], shapes: list[tuple[int, int]]) -> int:
    """Writes launches.json, cubins and data; prints what it makes. The timed cases are of `types` and `shapes`, the
    small ones of every format."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    planner = cases.Planner(folder)
    wanted = cases.timed_cases(types, shapes, cases.TIMED_DTYPES, cases.ROWS_OF_X, planner.variants)
    wanted += cases.checked_cases(format_names(), planner.variants)
    described = [cases.describe(case, planner) for case in wanted]
    kernels = defaultdict(set)  # of a format
    for case in described:
        kernels[case["quant_type"]].add(case["kernel"])
    reads = {case["N"] * case["row_bytes"]: [] for case in described if case["timed"]}
    for nbytes in reads:
        reads[nbytes] = planner.reads(nbytes)
        kernels[types[0]] |= {read["kernel"] for read in reads[nbytes]}  # of no format, in fact
    cubins, untimed = {}, set()
    for quant_type, names in kernels.items():
        made, with_matrices = compile_kernels(quant_type, names, arch, folder)
        cubins |= made
        untimed |= with_matrices
    if slow := sorted({case["kernel"] for case in described if case["timed"]} & untimed):
        print(f"checked, but not timed, as their 8x8 matrices are emulated: {', '.join(slow)}")
        described = [case for case in described if not (case["timed"] and case["kernel"] in untimed)]
    for quant_type, K in dict.fromkeys((case["quant_type"], case["K"]) for case in described):
        np.savez_compressed(folder / f"data_{quant_type}_{K}.npz", **cases.data(quant_type, K))
    plan = {"arch": arch, "compilers": nvptx.compilers(), "cubins": cubins, "reads": reads, "cases": described}
    (folder / "launches.json").write_text(json.dumps(plan) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {sum(map(len, cubins.values()))} kernels, {len(described)} launches, {size / 1e6:.1f} MB")
    return 0


def compile_kernels(quant_type: str, names: set[str], arch: str, folder: Path) -> tuple[dict, set[str]]:
    """Writes cubins with these kernels of one format. Returns {cubin: {kernel: its registers and so on}}, and those of
    the kernels that have matrices."""
    cubins, missing, with_matrices = {}, set(names), set()
    for (source, text), dtype in product(metal_sources().items(), cases.DTYPES):
        if not missing:
            break
        preprocessed = nvptx.preprocess(text, quant_type, dtype)
        found = missing & nvptx.kernel_names(preprocessed)
        if not found:
            continue
        missing -= found
        cubin = folder / f"{source}_{quant_type}_{dtype}.cubin"
        try:
            cubins[cubin.name] = nvptx.assemble(nvptx.compile_ptx(preprocessed, found, arch), arch, cubin)
        except (toolchain.CompileError, translate.TranslationError) as error:
            raise SystemExit(f"metal/{source}.metal for {quant_type}: {error}") from None
        if nvptx.has_matrices(preprocessed):
            with_matrices |= found
    if missing:
        raise SystemExit(f"no .metal file has {', '.join(sorted(missing))}")
    return cubins, with_matrices
