"""What is launched: the launches that the product's own plan (csrc/mps/launch_plan.h) makes, and data for them."""

import ctypes
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np

from torch_qgemv.ops import resolve_quant_type
from torch_qgemv.testing import random_packed

HERE = Path(__file__).parent
DTYPES = ("float", "half", "bfloat")  # csrc/mps/launch_plan.h has the same order
TIMED_TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS")
TIMED_SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672))  # K, N
TIMED_DTYPES = ("half", "float")
CHECKED_SHAPES = ((256, 1), (768, 37), (4352, 131))
ROWS_OF_X = (1, 2, 3, 4, 8)
DISTINCT_ROWS = 61  # of a weight; the others repeat them
VECTORS_PER_THREAD = (1, 2, 4, 8, 16, 32)  # of the pure read, whose fastest counts


class _Launch(ctypes.Structure):
    _fields_ = (
        ("error", ctypes.c_char * 256),
        ("kernel", ctypes.c_char * 96),
        ("grid", ctypes.c_uint64 * 2),
        ("threadgroup", ctypes.c_uint64 * 2),
        ("params_size", ctypes.c_uint64),
        ("params", ctypes.c_ubyte * 64),
    )


@dataclass(frozen=True)
class Case:
    """A product y = x W^T (+ bias, float32) of x [M, K]; the weight starts `offset` bytes behind its buffer's start."""

    operator: str  # "linear", or "published": the baseline
    quant_type: str
    K: int
    N: int
    M: int
    dtype: str  # of DTYPES
    offset: int = 0
    bias: bool = False
    timed: bool = False
    variant: int = -1  # of the gemv kernel; negative: as the plan chooses

    @property
    def buffers(self) -> tuple[str, ...]:
        """What the launcher binds, in its order."""
        return ("weight", "x", "bias", "y") if self.operator == "linear" else ("weight", "x", "y")


def timed_cases(types, shapes, dtypes, rows, variants: int) -> list[Case]:
    """What the plan chooses for each number of rows of x; for one row, each of so many variants too."""
    cases = []
    for quant_type in types:
        for K, N in shapes:
            for dtype in dtypes:
                if quant_type == "Q4_K" and 1 in rows:
                    cases.append(Case("published", quant_type, K, N, 1, dtype, timed=True))
                cases += [Case("linear", quant_type, K, N, M, dtype, timed=True) for M in rows]
                cases += [Case("linear", quant_type, K, N, 1, dtype, timed=True, variant=v) for v in range(variants)]
    return cases


def checked_cases(types, variants: int) -> list[Case]:
    """Small, odd ones: one row of the weight, rows that fill no threadgroup, weights at odd addresses, a bias."""
    cases = [
        Case("linear", quant_type, K, N, M, dtype, offset, bias)
        for quant_type in types
        for K, N in CHECKED_SHAPES
        for dtype in DTYPES
        for offset, bias in ((0, True), (1, False))
        for M in ROWS_OF_X
    ] + [
        Case("linear", quant_type, K, N, 1, dtype, bias=True, variant=variant)
        for quant_type in types
        for K, N in CHECKED_SHAPES
        for dtype in DTYPES
        for variant in range(variants)
    ]
    return cases + [
        Case("published", "Q4_K", K, N, 1, dtype) for K, N in CHECKED_SHAPES for dtype in DTYPES if "Q4_K" in types
    ]


class Planner:
    """The launch plan, compiled for this machine."""

    def __init__(self, folder: Path):
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if not compiler:
            raise FileNotFoundError("no C++ compiler for the launch plan: c++ is not installed")
        library = folder / "plan.so"
        subprocess.run(
            [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(HERE / "plan.cpp"), "-o", str(library)], check=True
        )
        self._library = ctypes.CDLL(str(library))

    @property
    def variants(self) -> int:
        """How many gemv kernels there are for one format, one type of x and aligned weights."""
        return self._library.variant_count()

    def launch(self, case: Case) -> dict:
        """{"kernel", "groups": [x, y], "threads": [x, y] of a group, "params": hexadecimal}."""
        product = (ctypes.c_int64 * 9)(
            *(resolve_quant_type(case.quant_type), case.N, case.K, case.M, case.offset, row_bytes(case)),
            *(DTYPES.index(case.dtype), case.bias, case.variant),
        )
        return self._plan(f"plan_{case.operator}", product)

    def reads(self, nbytes: int) -> list[dict]:
        """Launches of the pure read of so many bytes."""
        arguments = [(ctypes.c_uint64(nbytes), ctypes.c_uint64(vectors)) for vectors in VECTORS_PER_THREAD]
        return [self._plan("plan_read", *pair) for pair in arguments]

    def _plan(self, function: str, *arguments) -> dict:
        launch = _Launch()
        getattr(self._library, function)(*arguments, ctypes.byref(launch))
        if launch.error:
            raise OverflowError(launch.error.decode())
        pairs = list(zip(launch.grid, launch.threadgroup, strict=True))
        if any(grid % group for grid, group in pairs):
            raise ValueError(f"{launch.kernel.decode()}: {pairs}: an NVIDIA GPU has no threadgroups of part size")
        return {
            "kernel": launch.kernel.decode(),
            "groups": [grid // group for grid, group in pairs],
            "threads": list(launch.threadgroup),
            "params": bytes(launch.params[: launch.params_size]).hex(),
        }


def row_bytes(case: Case) -> int:
    block_size, type_size = gguf.GGML_QUANT_SIZES[resolve_quant_type(case.quant_type)]
    return case.K // block_size * type_size


def describe(case: Case, planner: Planner) -> dict:
    return {**asdict(case), "buffers": case.buffers, "row_bytes": row_bytes(case), **planner.launch(case)}


def data(quant_type: str, K: int) -> dict[str, np.ndarray]:
    """The distinct rows of a weight, x in each type, and in float64 the exact products [M, rows] and their scale,
    sqrt(sum_k (x_k w_k)^2)."""
    kind = resolve_quant_type(quant_type)
    rows = random_packed(kind, DISTINCT_ROWS, K).numpy()
    matrix = gguf.quants.dequantize(rows, kind).astype(np.float64)
    x = (np.random.default_rng(K).standard_normal((max(ROWS_OF_X), K)) / K**0.5).astype(np.float32)
    arrays = {"rows": rows}
    for dtype in DTYPES:
        stored, exact_x = rounded(x, dtype)
        arrays[f"x_{dtype}"] = stored
        arrays[f"exact_{dtype}"] = exact_x @ matrix.T
        arrays[f"scale_{dtype}"] = np.sqrt(exact_x**2 @ (matrix**2).T)
    return arrays


def rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """float32 x as it is stored in `dtype` (bfloat: the upper 16 bits), and the values stored, in float64."""
    if dtype == "bfloat":
        bits = x.view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.astype(np.uint16), (bits << 16).view(np.float32).astype(np.float64)
    stored = x.astype(np.float16 if dtype == "half" else np.float32)
    return stored, stored.astype(np.float64)
