"""Random packed weights, and how exact `linear` has to be: what the tests, the benchmark and the self test share."""

from __future__ import annotations

from functools import cache

import gguf
import torch

from .ops import QuantType, dequantize, resolve_quant_type


@cache
def half_fields(quant_type: QuantType) -> tuple[int, ...]:
    """Byte offsets of the half-precision scales of a block: a NaN there, and only there, makes weights NaN."""
    _, type_size = gguf.GGML_QUANT_SIZES[resolve_quant_type(quant_type)]
    blocks = torch.zeros(type_size // 2, type_size // 2, dtype=torch.float16)
    blocks.fill_diagonal_(torch.nan)
    weights = dequantize(blocks.view(torch.uint8), quant_type)
    return tuple(2 * field for field in weights.isnan().any(dim=1).nonzero().flatten().tolist())


def random_packed(quant_type: QuantType, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A packed weight, uint8 [rows, row_bytes] on the CPU: random bytes in every field, but scales of 0.005 to 0.015 of
    either sign."""
    quant_type = resolve_quant_type(quant_type)
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    generator = torch.Generator().manual_seed(seed + 1000 * quant_type)
    shape = (rows, columns // block_size, type_size)
    packed = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    for field in half_fields(quant_type):
        scales = torch.rand(*shape[:2], 1, generator=generator) + 0.5
        scales *= 0.01 * (2 * torch.randint(2, scales.shape, generator=generator) - 1)
        packed[..., field : field + 2] = scales.half().view(torch.uint8)
    return packed.flatten(1)


def linear_error(
    y: torch.Tensor,
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None = None,
    positive: bool = False,
) -> float:
    """The error of y = x W^T + bias against float64, as a multiple of what `linear` promises: 1 or less is right.

    float32: each output within 2e-6 of sqrt(sum_k (x_k w_k)^2), the size that a random sum has (`positive`: three times
    that, for all-positive x, where minimums cancel), and from N = 31 on a relative L2 error of 1e-6. float16 and
    bfloat16: what rounding the exact result costs, plus 10 %, plus 3e-7 (3e-5) of that size.
    """
    y, x, matrix = (tensor.detach().cpu() for tensor in (y, x, matrix))
    dtype, rows = x.dtype, matrix.shape[0]
    y, x, matrix = y.double().reshape(-1, rows), x.double().reshape(-1, matrix.shape[1]), matrix.double()
    exact = x @ matrix.T
    scale = (x.square() @ matrix.square().T).sqrt()
    if bias is not None:
        bias = bias.detach().cpu().double()
        exact, scale = exact + bias, (scale.square() + bias.square()).sqrt()
    error = (y - exact).abs()
    if y.numel() == 0:
        return 0.0
    if not error.isfinite().all():
        return float("inf")
    if dtype == torch.float32:
        worst = (error / ((6e-6 if positive else 2e-6) * scale + 1e-30)).max().item()
        if rows >= 31 and not positive:
            worst = max(worst, (error.norm() / (1e-6 * exact.norm())).item())
        return worst
    rounding = (exact.to(dtype).double() - exact).norm()
    inside = 3e-5 if dtype == torch.bfloat16 else 3e-7  # bfloat16 activations have 16 bits inside
    if y.numel() < 31:
        inside *= 3  # a norm over few outputs scatters
    return (error.norm() / (1.1 * rounding + inside * scale.norm())).item()
