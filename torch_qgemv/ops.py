"""The operators as typed functions. Each is also torch.ops.torch_qgemv.<name>, which takes the GGUF type id.

A `quant_type` is a name ("Q4_K"), a gguf.GGMLQuantizationType or a GGUF type id. A packed weight is a uint8 tensor
[N, row_bytes]: N rows of K weights each, in GGUF blocks. Rows may lie at any distance from one another (a slice works).
"""

from __future__ import annotations

import gguf
import numpy as np
import torch

QuantType = str | gguf.GGMLQuantizationType | int

# Types that gguf.quants can encode.
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


_SUPPORTED = {name: gguf.GGMLQuantizationType[name] for name in torch.ops.torch_qgemv._format_names()}
_RESOLVED = _SUPPORTED | {int(member): member for member in _SUPPORTED.values()}


def quant_types() -> tuple[str, ...]:
    """The names of the supported GGUF types."""
    return tuple(_SUPPORTED)


def resolve_quant_type(quant_type: QuantType) -> gguf.GGMLQuantizationType:
    """The GGUF type meant by a name, a member or an id. Raises ValueError for what is not a supported type."""
    resolved = _RESOLVED.get(quant_type)
    if resolved is None:
        raise ValueError(f"quant_type {quant_type!r} is not a supported GGUF type; supported: {', '.join(_SUPPORTED)}")
    return resolved


def linear(
    x: torch.Tensor, weight: torch.Tensor, quant_type: QuantType, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x W^T + bias, as torch.nn.functional.linear, for a packed W.

    x: [..., K], float32, float16 or bfloat16, any strides. weight: uint8 [N, row_bytes]. bias: [N], any float dtype,
    added in float32. Returns [..., N] of x's dtype; sums are of float32 accuracy (16-bit grade for bfloat16 x).
    Differentiable in x and bias, any number of times, also in forward mode and by torch.func. Raises ValueError or
    TypeError naming the argument and the sizes.
    """
    return torch.ops.torch_qgemv.linear(x, weight, resolve_quant_type(quant_type), bias)


def dequantize(weight: torch.Tensor, quant_type: QuantType, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [N, K] that a packed weight, uint8 [N, row_bytes], stands for.

    float32 equals gguf.quants bit for bit; float16 and bfloat16 are that, rounded.
    """
    return torch.ops.torch_qgemv.dequantize(weight, resolve_quant_type(quant_type), dtype)


def embedding(
    indices: torch.Tensor, weight: torch.Tensor, quant_type: QuantType, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows of a packed weight, uint8 [N, row_bytes], as torch.nn.functional.embedding.

    indices: int64 or int32, any shape. Returns [*indices.shape, K] of `dtype`. An index outside [0, N) raises
    IndexError on the CPU; on MPS, where a kernel can't raise, it gives a row of NaN.
    """
    return torch.ops.torch_qgemv.embedding(indices, weight, resolve_quant_type(quant_type), dtype)


def quantize(weight: torch.Tensor, quant_type: QuantType) -> torch.Tensor:
    """Packs a float matrix [N, K]: uint8 [N, row_bytes] on the same device. Encoding runs on the CPU.

    Raises ValueError if K is no multiple of the type's block or if weight holds a NaN or an infinity, and
    NotImplementedError for types without an encoder.
    """
    quant_type = resolve_quant_type(quant_type)
    if quant_type.name not in QUANTIZABLE:
        raise NotImplementedError(f"quantize: no encoder for {quant_type.name} yet, only for {', '.join(QUANTIZABLE)}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"quantize: weight must be a float matrix [N, K], got {weight.dtype} {list(weight.shape)}")
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    rows, columns = weight.shape
    if columns % block_size:
        raise ValueError(
            f"quantize: weight [{rows}, {columns}] has K = {columns}, no multiple of the {block_size} weights of a "
            f"{quant_type.name} block"
        )
    values = weight.detach().to("cpu", torch.float32)
    bad = (~values.isfinite()).any(dim=1).nonzero()
    if len(bad):
        raise ValueError(f"quantize: weight [{rows}, {columns}] has a NaN or an infinity in row {bad[0].item()}")
    if weight.numel() == 0:
        return torch.empty(rows, columns // block_size * type_size, dtype=torch.uint8, device=weight.device)
    packed = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), quant_type)
    return torch.from_numpy(packed).to(weight.device)
