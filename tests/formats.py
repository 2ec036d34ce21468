"""Test data: random packed weights of every type, and the reference that all kernels are measured with."""

import gguf
import numpy as np
import torch

from torch_qgemv import quant_types

TYPES = [gguf.GGMLQuantizationType[name] for name in quant_types()]

# Byte offsets of the half-precision fields of a block: anything else may hold any bits.
HALF_FIELDS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def block_size(quant_type) -> int:
    return gguf.GGML_QUANT_SIZES[quant_type][0]


def type_size(quant_type) -> int:
    return gguf.GGML_QUANT_SIZES[quant_type][1]


def random_packed(quant_type, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random bytes in every field, with scales of any sign that are finite halfs of usual size."""
    rng = np.random.default_rng([seed, int(quant_type), rows, columns])
    blocks = columns // block_size(quant_type)
    packed = rng.integers(0, 256, size=(rows, blocks, type_size(quant_type)), dtype=np.uint8)
    for offset in HALF_FIELDS[quant_type.name]:
        scales = (
            rng.uniform(0.5, 1.5, size=(rows, blocks, 1)) * rng.choice([-0.01, 0.01], size=(rows, blocks, 1))
        ).astype(np.float16)
        packed[..., offset : offset + 2] = scales.view(np.uint8)
    return torch.from_numpy(packed.reshape(rows, -1))


def dequantized(packed: torch.Tensor, quant_type) -> torch.Tensor:
    """The float32 matrix by gguf's own decoder."""
    return torch.from_numpy(gguf.quants.dequantize(packed.cpu().contiguous().numpy(), quant_type))


def random_x(shape, dtype=torch.float32, seed: int = 0, positive: bool = False) -> torch.Tensor:
    """Activations scaled by 1/sqrt(K)."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / max(shape[-1], 1) ** 0.5
    return (x.abs() if positive else x).to(dtype)


def assert_linear_close(y, x, matrix, bias=None, positive=False, context=""):
    """The accuracy that linear promises, against float64.

    fp32: each output within 2e-6 of the scale sqrt(sum_k (x_k w_k)^2) that a random sum has (three times that where
    all x are positive and minimums cancel), relative L2 error within 1e-6 from N = 31. fp16 and bf16: what rounding
    the exact result costs, plus 10 %.
    """
    assert y.shape == (*x.shape[:-1], matrix.shape[0]), context
    assert y.dtype == x.dtype, context
    y = y.detach().cpu().double().reshape(-1, matrix.shape[0])
    x64, w64 = x.detach().cpu().double().reshape(-1, matrix.shape[1]), matrix.double()
    exact = x64 @ w64.T
    scale = (x64.square() @ w64.square().T).sqrt()
    if bias is not None:
        b = bias.detach().cpu().double()
        exact, scale = exact + b, (scale.square() + b.square()).sqrt()
    error = (y - exact).abs()
    if x.dtype == torch.float32:
        bound = (6e-6 if positive else 2e-6) * scale + 1e-30
        assert (error <= bound).all(), f"{context}: {(error / bound).max():.2f} times the bound"
        if matrix.shape[0] >= 31 and not positive:
            assert error.norm() <= 1e-6 * exact.norm(), f"{context}: relative error {error.norm() / exact.norm():.2e}"
    else:
        rounded = (exact.to(x.dtype).double() - exact).norm()
        # bf16 activations have 16 bits inside, an error of 3e-5 of the result.
        inside = 3e-5 if x.dtype == torch.bfloat16 else 3e-7
        assert error.norm() <= 1.1 * rounded + inside * exact.norm(), (
            f"{context}: {error.norm():.2e}, rounding {rounded:.2e}"
        )
