"""How fast `quantize` encodes, and how large an error it leaves, beside ggml's encoders (PyPI's libgguf).

    python -m torch_qgemv.bench.encode [--types Q4_K,Q6_K] [--matrix FILE.gguf:TENSOR]

One thread, for libgguf has no more. Times are the least of several, in ns per weight; errors are ggml's times so much,
as the plain squared error and the one weighted by importance, or by |x| where none is given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from ..gguf import GGUFFile
from ..ops import dequantize, quant_types, quantize, resolve_quant_type

_ROUNDS = 15


def least_time(fn: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        result = fn()
        best = min(best, time.perf_counter() - start)
    return result, best


def by_ggml(matrix: np.ndarray, quant_type: int, importance: np.ndarray | None) -> torch.Tensor:
    import libgguf

    raw = libgguf.quantize_rows_raw(quant_type, matrix, *matrix.shape, importance)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(matrix), -1)


def measure(matrix: torch.Tensor, name: str, importance: torch.Tensor | None) -> dict[str, float]:
    """ns per weight of both, and our errors as parts of ggml's."""
    quant_type = resolve_quant_type(name)
    array, given = matrix.numpy(), None if importance is None else importance.numpy()
    mine, my_time = least_time(lambda: quantize(matrix, quant_type, importance))
    theirs, their_time = least_time(lambda: by_ggml(array, int(quant_type), given))
    weights = matrix.abs() if importance is None else importance
    errors = []
    for packed in (mine, theirs):
        squares = (dequantize(packed, quant_type).double() - matrix) ** 2
        errors.append((squares.sum().item(), (squares * weights).sum().item()))
    to_ns = 1e9 / matrix.numel()
    return {
        "ns": my_time * to_ns,
        "ggml ns": their_time * to_ns,
        "error": errors[0][0] / errors[1][0] if errors[1][0] else 1.0,
        "weighted error": errors[0][1] / errors[1][1] if errors[1][1] else 1.0,
    }


def load_matrix(source: str | None) -> torch.Tensor:
    if source is None:
        return torch.randn(128, 2048, generator=torch.Generator().manual_seed(0))
    path, _, name = source.rpartition(":")
    tensor = GGUFFile(path)[name]
    matrix = tensor.data.float() if tensor.data.is_floating_point() else dequantize(tensor.data, tensor.quant_type)
    flat = matrix.flatten()[: matrix.numel() // 2048 * 2048]  # rows that the blocks of all types fill
    return flat.view(-1, 2048)[:128].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(quant_types()))
    parser.add_argument("--matrix", metavar="FILE.gguf:TENSOR", help="default: 128 x 2048 normal values")
    args = parser.parse_args()
    torch.set_num_threads(1)
    matrix = load_matrix(args.matrix)
    importance = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(1)) ** 2
    columns = ("ns", "ggml ns", "error", "weighted error")
    header = " | ".join(f"{'importance: ' + c if i else c}" for i in range(2) for c in columns)
    lines = [f"| type | {header} |", "|---" * (1 + 2 * len(columns)) + "|"]
    for name in tqdm(args.types, leave=False):
        found = [measure(matrix, name, given) for given in (None, importance)]
        cells = [f"{figures[column]:.3g}" for figures in found for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
