"""Test data, and the reference that all kernels are measured with."""

import gguf
import torch

from torch_qgemv import quant_types
from torch_qgemv.testing import linear_error, random_packed

__all__ = [
    "TYPES",
    "assert_linear_close",
    "block_size",
    "dequantized",
    "odd_view",
    "random_packed",
    "random_x",
    "type_size",
]

TYPES = [gguf.GGMLQuantizationType[name] for name in quant_types()]


def block_size(quant_type) -> int:
    return gguf.GGML_QUANT_SIZES[quant_type][0]


def type_size(quant_type) -> int:
    return gguf.GGML_QUANT_SIZES[quant_type][1]


def odd_view(weight):
    """The same bytes at an odd address."""
    return torch.empty(weight.numel() + 1, dtype=torch.uint8, device=weight.device)[1:].view(weight.shape).copy_(weight)


def dequantized(packed: torch.Tensor, quant_type) -> torch.Tensor:
    """The float32 matrix by gguf's own decoder."""
    return torch.from_numpy(gguf.quants.dequantize(packed.cpu().contiguous().numpy(), quant_type))


def random_x(shape, dtype=torch.float32, seed: int = 0, positive: bool = False) -> torch.Tensor:
    """Activations scaled by 1/sqrt(K)."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / max(shape[-1], 1) ** 0.5
    return (x.abs() if positive else x).to(dtype)


def assert_linear_close(y, x, matrix, bias=None, positive=False, context=""):
    """y = x W^T + bias has the shape, dtype and accuracy that linear promises (torch_qgemv.testing.linear_error)."""
    assert y.shape == (*x.shape[:-1], matrix.shape[0]), context
    assert y.dtype == x.dtype, context
    error = linear_error(y, x, matrix, bias, positive)
    assert error <= 1, f"{context}: {error:.2f} times the error allowed"
