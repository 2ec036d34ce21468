"""Run every kernel once on this machine and compare it with the CPU's.

Every format, every dtype of x, aligned and unaligned weights, one row of x by each kernel for it, a few and many, two
weights at once, on --device. Prints one table; please paste it into an issue if a number of failures is not 0. Exits
with 1 then.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator

import gguf
import torch
from tqdm import tqdm

from . import __version__, ops
from .testing import linear_error, random_packed
from .tuning import gpu_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
N, BLOCKS = 37, 9  # rows that fill no threadgroup, blocks that fill no SIMD-group
ROWS_OF_X = (1, 2, 3, 4, 8, 20, 40)  # each has kernels of its own on MPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, mps, or auto: mps where there is one (default)")
    parser.add_argument("--types", default=",".join(ops.quant_types()), help="GGUF types: Q4_K,Q6_K (default: all)")


def run(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    types = args.types.split(",")
    print(describe(device))
    print(f"{'type':8}{'first call':>12}{'worst error':>14}{'checks':>9}{'failures':>10}")
    failed = []
    for name in tqdm(types, unit="type", leave=False, disable=None):
        first, results = test_type(name, device)
        failed += [f"{name}: {what}: {error}" for what, error in results if not passed(error)]
        errors = [error for _, error in results if isinstance(error, float)]
        failures = sum(not passed(error) for _, error in results)
        tqdm.write(f"{name:8}{1e3 * first:9.0f} ms{max(errors, default=0.0):14.2f}{len(results):9}{failures:10}")
    print("worst error: 1 is what torch_qgemv.linear promises; first call: includes compiling the kernels on mps")
    print(*failed, sep="\n", end="\n" if failed else "")
    print(f"{len(failed)} failures")
    return 1 if failed else 0


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(f"selftest: --device {name}: {str(error).splitlines()[0]}") from None
    return device


def describe(device: torch.device) -> str:
    system = f"macOS {platform.mac_ver()[0]}" if platform.mac_ver()[0] else platform.system()
    chip = gpu_name() if device.type == "mps" else ""
    return f"torch_qgemv {__version__}, {device} {chip}, {system}, torch {torch.__version__}".replace(" ,", ",")


def passed(error: float | str) -> bool:
    return isinstance(error, float) and error <= 1


def test_type(name: str, device: torch.device) -> tuple[float, list[tuple[str, float | str]]]:
    """Seconds of the first call, and what was checked: the error where 1 is allowed, or an exception's text."""
    results, first = [], None
    for what, check in checks(name, device):
        start = time.perf_counter()
        try:
            results.append((what, float(check())))
        except Exception as error:  # whatever goes wrong goes into the report
            results.append((what, f"{type(error).__name__}: {error}"))
        first = first or time.perf_counter() - start
    return first, results


def checks(name: str, device: torch.device) -> Iterator[tuple[str, Callable[[], float]]]:
    """What to check, and a function that gives the error where 1 is allowed."""
    quant_type = ops.resolve_quant_type(name)
    packed = random_packed(quant_type, N, BLOCKS * gguf.GGML_QUANT_SIZES[quant_type][0])
    matrix = ops.dequantize(packed, quant_type)
    odd = torch.empty(packed.numel() + 1, dtype=torch.uint8, device=device)[1:].view(packed.shape)
    odd.copy_(packed)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(1))
    indices = torch.arange(0, N, 5)

    def rows_of_x(M):
        return torch.randn(M, matrix.shape[1], generator=torch.Generator().manual_seed(M))

    for where, weight in (("", packed.to(device)), (" unaligned", odd)):
        for dtype in DTYPES:
            short = str(dtype).removeprefix("torch.") + where

            def linear(M, weight=weight, dtype=dtype):
                x = rows_of_x(M).to(dtype)
                y = ops.linear(x.to(device), weight, quant_type, bias.to(device))
                return linear_error(y, x, matrix, bias)

            def dequantize(weight=weight, dtype=dtype):
                return mismatches(ops.dequantize(weight, quant_type, dtype), matrix.to(dtype))

            def embedding(weight=weight, dtype=dtype):
                rows = ops.embedding(indices.to(device), weight, quant_type, dtype)
                return mismatches(rows, matrix[indices].to(dtype))

            def variant(name, weight=weight, dtype=dtype):
                x = rows_of_x(1).to(dtype)
                y = torch.ops.torch_qgemv._linear_variant(x.to(device), weight, quant_type, name)
                return linear_error(y, x, matrix)

            for M in ROWS_OF_X:
                yield f"linear {short} M={M}", lambda M=M, linear=linear: linear(M)
            if device.type == "mps" and not where:
                for kernel in torch.ops.torch_qgemv._gemv_variants():
                    yield f"linear {short} {kernel}", lambda kernel=kernel, variant=variant: variant(kernel)
            yield f"dequantize {short}", dequantize
            yield f"embedding {short}", embedding

    def fused():
        x = rows_of_x(1).half().to(device)
        weights = [packed.to(device), packed[5:14].to(device)]
        ys = ops.fused_linear(x, weights, [quant_type] * 2)
        return sum(mismatches(y, ops.linear(x, w, quant_type).cpu()) for y, w in zip(ys, weights, strict=True))

    yield "fused_linear float16", fused


def mismatches(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """How many numbers aren't equal bit for bit, twice, so that one is too many."""
    bits = torch.int32 if expected.dtype == torch.float32 else torch.int16
    return 2.0 * (actual.cpu().view(bits) != expected.view(bits)).sum().item()
