"""The operators under the five names that transformers' own GGUF loader asks of a kernel.

transformers 5.24 looks for them in a kernel that it downloads for Apple GPUs (transformers.integrations.gguf.kernels);
torch_qgemv.hf.enable() gives it these instead, which run on the CPU too, in x's dtype and for any number of rows.
`ggml_type` is a GGUF type id.
"""

from __future__ import annotations

import gguf
import torch

from .. import ops

GEMV_TYPES = frozenset(int(gguf.GGMLQuantizationType[name]) for name in ops.quant_types())


def mul_mat_vec(blocks: torch.Tensor, x: torch.Tensor, ggml_type: int, out_features: int) -> torch.Tensor:
    """blocks: uint8 [N, row_bytes]; x: [M, K]. Returns [M, N] of x's dtype."""
    return torch.ops.torch_qgemv.linear(x, blocks, ggml_type)


def dequantize(blocks: torch.Tensor, ggml_type: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """blocks: uint8 [rows, row_bytes]. Returns [rows, cols] of `dtype`."""
    return torch.ops.torch_qgemv.dequantize(blocks, ggml_type, dtype)


def get_rows(
    blocks: torch.Tensor, indices: torch.Tensor, ggml_type: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    """blocks: uint8 [N, row_bytes]; indices: integers [M]. Returns [M, cols] of `dtype`."""
    return torch.ops.torch_qgemv.embedding(indices, blocks, ggml_type, dtype)


def mul_mat_id(
    blocks: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, ggml_type: int, out_features: int
) -> torch.Tensor:
    """blocks: uint8 [E, N, row_bytes]; x: [T, K]; ids: the experts of each row, [T, used]. Returns [T, used, N]."""
    return torch.ops.torch_qgemv.expert_linear(x, blocks, ids, ggml_type)
