"""Checks a gemv source without a launcher: every kernel of some formats, on tensors that end where the data do."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import metal_sim
import torch
from formats import TYPES, block_size, dequantized, random_packed, random_x
from metal_sim.kernels import compile_metal

from torch_qgemv.testing import linear_error

ROOT = Path(__file__).parents[2]
NAMES = {quant_type.name: quant_type for quant_type in TYPES}
DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
SHAPES = [(5, 1, 1), (7, 3, 2), (19, 17, 2)]  # N, blocks, M
BIASES = [(0, None), (1, torch.float32), (2, torch.float16), (3, torch.bfloat16)]
# The formats that a file is checked with: those that use all of it. A file of lanes: those that it has lanes for.
FORMATS = {
    "metal/lanes/generic.h": ["Q4_0", "Q2_K", "Q3_K"],
    "metal/storage.h": ["Q4_0", "Q6_K", "IQ4_XS", "Q8_0"],
    "metal/gemv.h": ["Q4_K", "Q4_0", "IQ4_XS"],
    "metal/gemv.metal": ["Q4_0"],
}
LANE = re.compile(r"struct Lane<(\w+), Aligned, T, wide>")


def formats_of(file: str) -> list[str]:
    return FORMATS.get(file) or LANE.findall((ROOT / file).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Variant:
    """One of a format's kernels for a type of x; see QGEMV_GEMV_SHAPES."""

    suffix: str  # of its name
    rows: int
    simdgroups: int
    splits: int

    @property
    def plain(self) -> bool:
        return self.suffix == "plain"

    @property
    def threads(self) -> int:
        return 32 * self.simdgroups

    @property
    def outputs(self) -> int:
        return self.rows * self.simdgroups // self.splits


def gemv_variants() -> list[Variant]:
    text = (ROOT / "metal/params.h").read_text(encoding="utf-8")
    made = []
    for macro, plain in (("QGEMV_GEMV_SHAPES", False), ("QGEMV_PLAIN_GEMV_SHAPE", True)):
        (shapes,) = re.findall(rf"#define {macro}\((?:.*\\\n)*.*", text)
        for shape in re.findall(r"_\(__VA_ARGS__, (\d+), (\d+), (\d+)\)", shapes):
            made.append(Variant("plain" if plain else "r{}_s{}_k{}".format(*shape), *map(int, shape)))
    return made


def strided(data: torch.Tensor, pitch: int, offset: int) -> torch.Tensor:
    """A copy on the device whose rows lie `pitch` elements apart, `offset` from the buffer's start, up to its end."""
    rows, columns = data.shape
    buffer = torch.empty(offset + (rows - 1) * pitch + columns, dtype=data.dtype, device="mps")
    return buffer.as_strided((rows, columns), (pitch, 1), offset).copy_(data)


@dataclass
class Case:
    name: str
    dtype: torch.dtype
    variant: Variant
    packed: torch.Tensor
    x: torch.Tensor
    bias_type: int
    bias: torch.Tensor | None
    matrix: torch.Tensor


def cases(name: str) -> list[Case]:
    """Every kernel in every shape, with the types of x in turn."""
    made = []
    for i, (N, blocks, M) in enumerate(SHAPES):
        for j, variant in enumerate(gemv_variants()):
            made.append(make_case(name, list(DTYPES.values())[(i + j) % 3], variant, N, blocks, M, len(made)))
    return made


def make_case(name: str, dtype: torch.dtype, variant: Variant, N: int, blocks: int, M: int, number: int = 0) -> Case:
    packed = random_packed(NAMES[name], N, blocks * block_size(NAMES[name]))
    matrix = dequantized(packed, NAMES[name])
    bias_type, bias_dtype = BIASES[number % len(BIASES)]
    bias = None if bias_dtype is None else random_x((N,), bias_dtype, seed=9)
    x = random_x((M, matrix.shape[1]), dtype, seed=N)
    return Case(name, dtype, variant, packed, x, bias_type, bias, matrix)


def gemv_problem(source: str, case: Case, **macros: str) -> str | None:
    N, (M, K) = case.matrix.shape[0], case.x.shape
    weight = strided(case.packed, case.packed.shape[1] + 16, 33 if case.variant.plain else 32)
    x = strided(case.x, K + 16, 16)
    bias = weight if case.bias is None else strided(case.bias[None], N, 3)
    y = torch.full((5 + M * N,), torch.nan, dtype=case.dtype, device="mps")
    params = struct.pack("<QQIIII", weight.stride(0), x.stride(0), N, K, case.bias_type, 0)
    params = torch.frombuffer(bytearray(params), dtype=torch.uint8).to("mps")
    dtype = next(key for key, value in DTYPES.items() if value == case.dtype)
    kernel = f"gemv_{case.name}_{dtype}_{case.variant.suffix}"
    groups = (-(-N // case.variant.outputs), M)
    buffers = [weight, x, bias, y[5:], params]
    metal_sim.launch(source, kernel, buffers, groups=groups, threads=case.variant.threads,
                     macros={"QGEMV_FORMAT": case.name, **macros})  # fmt: skip
    if not y[:5].isnan().all():
        return f"{kernel} writes before y"
    error = linear_error(y[5:].view(M, N), case.x, case.matrix, case.bias)
    return None if error <= 1 else f"{kernel}, N={N} K={K} M={M}: {error:.3g} times the error allowed"


def dequantize_problem(source: str, name: str) -> str | None:
    """storage.h serves dequantize too."""
    packed = random_packed(NAMES[name], 3, 512)
    matrix = dequantized(packed, NAMES[name])
    for plain in (False, True):
        weight, out = strided(packed, packed.shape[1], int(plain)), torch.empty(3, 512, device="mps")
        params = struct.pack("<QII", packed.shape[1], 512, 0)
        params = torch.frombuffer(bytearray(params), dtype=torch.uint8).to("mps")
        kernel = f"dequantize_{name}_float{'_plain' if plain else ''}"
        options = {"grid": (32, 3), "threads": (32, 3), "macros": {"QGEMV_FORMAT": name}}
        metal_sim.launch(source, kernel, [weight, out, params], **options)
        if not torch.equal(out.cpu(), matrix):
            return f"{kernel} is not equal to gguf"


def problem(sources: dict[str, str], file: str) -> str | None:
    """What is wrong with {"gemv": text, "dequantize": text}, in a line; None if nothing is."""
    try:
        for name in formats_of(file):
            for case in cases(name):
                if found := gemv_problem(sources["gemv"], case):
                    return found
            if file == "metal/storage.h" and (found := dequantize_problem(sources["dequantize"], name)):
                return found
    except metal_sim.CompileError as error:
        lines = [line for line in str(error).splitlines() if "error:" in line]
        return f"does not compile: {(lines or str(error).splitlines())[0]}"
    except RuntimeError as error:
        return str(error).splitlines()[0]


def built(source: str, file: str) -> str:
    """The library made for the first of a file's formats. Its name is a digest of what it was made from."""
    return compile_metal(source, macros={"QGEMV_FORMAT": formats_of(file)[0]})
