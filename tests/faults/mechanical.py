"""Tries one mechanical fault."""

from pathlib import Path

import metal_sim

from . import kernels, sandbox
from .mutants import KERNELS, LAUNCHER, Mutant, all_mutants
from .sandbox import Outcome, Trouble

PLANS = ("tests/test_launch_plan.py", "tests/test_matmul_plan.py", "tests/test_fused_plan.py")
# Those that see most of the launcher in little time.
LAUNCHER_TESTS = [
    *("tests/test_mps.py", "tests/test_linear.py", "tests/test_embedding.py", "tests/test_dequantize.py"),
    *("tests/test_gradients.py", "tests/test_mps_matmul.py", "tests/test_fused_linear.py", "-k"),
    "one_row or one_launch or in_place or buffers or copied_only"
    " or launch_nothing or is_no_row or thousand or made_once"
    " or (that_runs and Q4_0) or 16_bits or strided_x or leading"
    " or (views_of_weight and Q4_K) or index_shapes or test_bias or views_of_a_packed"
    " or (gradient_of_x_for_every_format and Q4_K) or beyond_the_largest_tile or of_nothing or of_strided_tensors"
    " or a_product_for_each or share_a_launch or nothing_is_copied or empty_weights",
]


def _planned(file: str) -> bool:
    return file.endswith(("launch_plan.h", "gemv_plan.h", "params.h"))


def try_launcher(mutant: Mutant, folder: Path, usual: Path) -> Outcome:
    """The plan's own tests first, which are quick; then a launcher is built. usual: the unbroken library."""
    if _planned(mutant.file):
        outcome = sandbox.pytest_outcome(folder, *PLANS)
        if outcome.caught:
            return outcome
    try:
        launcher = sandbox.build_launcher(folder)
    except metal_sim.CompileError as error:
        lines = [line for line in str(error).splitlines() if "error:" in line]
        return Outcome(True, f"does not compile: {(lines or ['?'])[0]}")
    if launcher == usual:
        raise Trouble("the library built is the usual one")
    return sandbox.pytest_outcome(folder, *LAUNCHER_TESTS, launcher=launcher)


def try_kernels(mutant: Mutant, folder: Path) -> Outcome:
    names = ("gemv", "dequantize")
    texts = {name: sandbox.metal_source(folder, name) for name in names}
    usual = {name: sandbox.metal_source(sandbox.ROOT, name) for name in names}
    if texts["gemv"] == usual["gemv"]:
        raise Trouble("the text that the Metal compiler gets is the usual one")
    found = kernels.problem(texts, mutant.file)
    compiled = not (found or "").startswith("does not compile")
    if compiled and kernels.built(texts["gemv"], mutant.file) == kernels.built(usual["gemv"], mutant.file):
        raise Trouble("the library built is the usual one")
    return Outcome(found is not None, found or "")


def attempt(mutant: Mutant, folder: Path, usual: Path) -> Outcome:
    sandbox.copy_sources(folder)
    sandbox.change(folder, mutant.file, mutant.apply)
    if mutant.file in LAUNCHER:
        return try_launcher(mutant, folder, usual)
    return try_kernels(mutant, folder)


def unbroken(folder: Path) -> Outcome:
    """What has to pass where nothing is broken."""
    texts = {name: sandbox.metal_source(folder, name) for name in ("gemv", "dequantize")}
    for file in sorted({mutant.file for mutant in all_mutants(KERNELS)}):
        if found := kernels.problem(texts, file):
            return Outcome(True, found)
    launcher = sandbox.build_launcher(folder)
    return sandbox.pytest_outcome(folder, *PLANS, *LAUNCHER_TESTS, launcher=launcher)
