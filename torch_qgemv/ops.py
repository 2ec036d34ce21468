"""The operators as typed functions. Each is also torch.ops.torch_qgemv.<name>, which takes the GGUF type id.

A `quant_type` is a name ("Q4_K"), a gguf.GGMLQuantizationType or a GGUF type id. A packed weight is a uint8 tensor
[N, row_bytes]: N rows of K weights each, in GGUF blocks. Rows may lie at any distance from one another (a slice works).
"""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import torch

QuantType = str | gguf.GGMLQuantizationType | int

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


def fused_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    quant_types: Sequence[QuantType],
    biases: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """[linear(x, weight, quant_type, bias) for each], for weights of the same K, of any types; biases: None for none.

    On MPS the products of one row of x, [..., K] with one in all other dimensions, are one launch for every four
    weights. Values and derivatives are those of linear, bit for bit. Raises what linear raises, and ValueError unless
    weights, quant_types and biases are as many, one or more.
    """
    types = [resolve_quant_type(quant_type) for quant_type in quant_types]
    return torch.ops.torch_qgemv.fused_linear(x, weights, types, [None] * len(types) if biases is None else biases)


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


def expert_linear(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, quant_type: QuantType) -> torch.Tensor:
    """y = x W^T, where each row of x has its own W, one of E packed experts: the products of a mixture of experts.

    x: [*rows, K], float32, float16 or bfloat16, any strides. weight: uint8 [E, N, row_bytes]. ids: int64 or int32,
    [*rows], an expert for each row of x, or [*rows, k], k experts for each. Returns [*ids.shape, N] of x's dtype:

        gate = expert_linear(hidden, gate_weight, top_k_index, ...)    # [T, K], [T, k] -> [T, k, I]
        down = expert_linear(act(gate) * up, down_weight, top_k_index, ...)    # [T, k, I], [T, k] -> [T, k, K]

    Rows are multiplied expert by expert; an expert without rows costs nothing. Accuracy and derivatives are those of
    linear. An id outside [0, E) raises IndexError on the CPU; on MPS, where a kernel can't raise, it gives a row of
    NaN. Raises ValueError or TypeError naming the argument and the sizes.
    """
    return torch.ops.torch_qgemv.expert_linear(x, weight, ids, resolve_quant_type(quant_type))


def quantize(weight: torch.Tensor, quant_type: QuantType, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Packs a matrix: uint8 [N, row_bytes] on weight's device. For an MPS tensor too the CPU encodes.

    weight: [N, K], any float dtype. importance: [K], float, not negative: how much the squared error in each column
    counts (an importance matrix, "imatrix"); without it errors of large weights count more. Scales, minimums and codes
    are searched for, on all threads, with the same result on every processor and a smaller error than ggml's.
    Raises ValueError naming the argument if the sizes don't fit, if K is no multiple of the type's block, or if a row
    of weight holds a NaN, an infinity or values beyond the reach of the type's float16 scale.
    """
    return torch.ops.torch_qgemv.quantize(weight.detach(), resolve_quant_type(quant_type), importance)
