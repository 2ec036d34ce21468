"""Operations per weight in the hot loop of each linear kernel, and their cost on an Apple GPU by a published model.

The kernels are compiled as C++ for OpenCL (../msl_check), and the instructions of LLVM's optimised code counted: not
Apple's compiler, but the same kind. A second opinion: what LLVM makes of them for an AMD GPU, whose instructions are
much like these. `python tests/metal_cost` prints the table; table.txt is its committed copy.
"""

import importlib.metadata
import re
import tempfile
from collections import Counter
from pathlib import Path

import msl_check
from metal_sim import toolchain, translate
from msl_check.opencl import language, metal_sources

from . import amd, llvm

TABLE = Path(__file__).parent / "table.txt"
# As Metal's compiler in safe mode: no contraction; lanes are scalar, so nothing is made into vectors, but a vector is
# loaded at once; small loops go.
OPTIMISE = [
    *("-Wno-everything", "-O3", "-ffp-contract=off", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-mllvm", "-disable-vector-combine", "-mllvm", "-unroll-threshold=20000"),
    *("-mllvm", "-inline-threshold=1000000", "-S"),
]
# {source: (its kernels' template parameters, weights that a lane uses up in one pass of the loop)}
WEIGHTS_OF_ONE_PASS = {
    "gemv": (
        "typename F, typename S, typename T, uint rows, uint simdgroups, uint splits",
        "rows * F::block_size / GemvLane<F, S, T, rows, splits>::lanes",
    ),
    "rows": ("typename F, typename S, typename T, int M, uint simdgroups", "rows_outputs * piece_size"),
    "matmul": ("typename Side, typename T, int R", "matmul_outputs * piece_size / (2 * R)"),
    "transposed": ("typename Side, typename T, int R", "matmul_outputs * piece_size / (2 * R)"),
    "tiles": ("typename F, typename S, typename T", "tiles_outputs / 8 * 2 * piece_size"),
}
# A wave of 32 lanes; loads need no more alignment than on an Apple GPU.
AMD = ["-mcpu=gfx1030", "-Xclang", "-target-feature", "-Xclang", "+unaligned-access-mode"]
COLUMNS = (*llvm.COUNTED, "cycles", "gfx1030")
LEGEND = """\
Operations per weight in the hot loops for half x: a lane's instructions of one pass, divided by the weights that they
use up for all rows of x together. Made by `python tests/metal_cost --write`.
  float    add, multiply, multiply-add        int    and, or, add, compare, select
  convert  integer <-> float                  shift  shift, rotation, integer multiply
  load     of any width; not of a lane's own memory
  cycles   max(4 * (convert + shift), float + convert + int + shift): conversions, shifts and integer multiplies take
           four cycles of a pipe beside the others, by public measurements of M1-generation GPUs. No time of memory.
  gfx1030  vector instructions of an AMD GPU, addresses and moves included; of the gemv kernels
An 8x8 matrix product counts as the 16 multiply-adds a lane that it does.
Not counted but there: moves between half and float, of 16 bits within a word, addresses. float and bfloat x: the same
but for bfloat's moves, which may take a shift or an and.
"""


class Unavailable(RuntimeError):
    """The table cannot be made here: libclang or ziglang is missing."""


def compiler() -> str:
    """What the counts hold for: the clang of this version of ziglang. Raises Unavailable without it."""
    try:
        return f"clang of ziglang {importlib.metadata.version('ziglang')}"
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(f"no compiler: `pip install {toolchain.ZIGLANG}`") from None


def table(formats: list[str]) -> str:
    """The table of all kernels of these formats, below a head that names the compiler."""
    lines = [f"compiler: {compiler()}", "", LEGEND, f"{'kernel':32}" + "".join(f"{name:>9}" for name in COLUMNS)]
    for family in WEIGHTS_OF_ONE_PASS:
        for name in formats:
            for kernel, costs in measure(family, name).items():
                cells = (f"{costs[column]:9.3f}" if column in costs else f"{'-':>9}" for column in COLUMNS)
                lines.append(f"{kernel:32}" + "".join(cells))
    return "\n".join(lines) + "\n"


def measure(family: str, quant_type: str) -> dict[str, dict[str, float]]:
    """{kernel: {column: operations per weight}} of the kernels of one source (gemv, ...) and format."""
    source, macros = metal_sources()[family], {"QGEMV_FORMAT": quant_type, "QGEMV_TYPE": "half"}
    kernels = list(translate.INSTANTIATION.finditer(msl_check.preprocess(source, macros)))
    constants = _weights_of_one_pass(kernels, WEIGHTS_OF_ONE_PASS[family])
    opencl = msl_check.as_opencl(source + constants, macros)
    module = compile_to(["-emit-llvm"], opencl)
    vector = amd.vector_operations(compile_to(AMD, opencl)) if family == "gemv" else {}
    weights = [int(n) for n in re.findall(r"^@\w*weights_\d+\w* = .* constant i32 (\d+)", module, re.M)]
    # All come out in the order of the source.
    return {
        re.sub(r'"\s*"|^"|"$', "", kernel["name"].strip()): {
            **_per_weight(llvm.count(llvm.hot_loop(body)), n),
            **({"gfx1030": vector[name] / n} if vector else {}),
        }
        for kernel, (name, body), n in zip(kernels, llvm.functions(module).items(), weights, strict=True)
    }


def _weights_of_one_pass(kernels, formula: tuple[str, str]) -> str:
    """Constants, read back from LLVM's code: how many weights a lane uses up in one pass of each kernel's loop."""
    parameters, weights = formula
    lines = [f"template <{parameters}> struct OnePass {{ enum {{ weights = {weights} }}; }};"]
    for i, kernel in enumerate(kernels):
        arguments = kernel["function"].split("<", 1)[1]
        lines.append(f"extern constant uint weights_{i};")
        lines.append(f"constant uint weights_{i} = OnePass<{arguments}::weights;")
    return "\nnamespace qgemv {\n" + "\n".join(lines) + "\n}\n"


def _per_weight(counts: Counter, weights: int) -> dict[str, float]:
    per = {name: counts[name] / weights for name in llvm.COUNTED}
    slow = per["convert"] + per["shift"]
    return {**per, "cycles": max(4 * slow, per["float"] + per["int"] + slow)}


def compile_to(target: list[str], opencl: str) -> str:
    """What clang makes, with these flags, of what msl_check.as_opencl returns."""
    import ziglang

    zig = Path(ziglang.__file__).parent / "zig"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cl"
        path.write_text(opencl)
        return toolchain.run([str(zig), "clang", *language(), *OPTIMISE, *target, str(path), "-o", "-"])
