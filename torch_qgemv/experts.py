"""The linear layers of a mixture of experts: one matrix for each expert, and each row of x goes through one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .modules import PackedModule, QuantType, empty_packed
from .ops import dequantize


class ExpertLinear(nn.Module):
    """The matrices of all experts, not packed. weight: [E, N, K].

    forward: x and ids as torch_qgemv.expert_linear takes them -> [*ids.shape, N].
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if ids.dim() == x.dim():  # several experts for each row
            x = x.unsqueeze(-2).expand(*ids.shape, -1)
        y = x.new_empty(*ids.shape, self.weight.shape[1])
        for expert in ids.unique().tolist():
            if not 0 <= expert < self.weight.shape[0]:
                raise IndexError(f"ids must be in [0, E) with E = {self.weight.shape[0]}, got {expert}")
            rows = ids == expert
            y[rows] = F.linear(x[rows], self.weight[expert])
        return y


class QuantExpertLinear(PackedModule):
    """An ExpertLinear whose weights stay packed in GGUF blocks, all of one type.

    packed: the GGUF bytes, uint8 [E, N, row_bytes] (a buffer; zeros in a new module). forward: x and ids as
    torch_qgemv.expert_linear takes them -> [*ids.shape, N] of x's dtype. It has no `weight`.
    """

    _plain_shape = ("E", "N", "row_bytes")

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        quant_type: QuantType,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        packed = empty_packed(num_experts * out_features, in_features, quant_type, device)
        super().__init__(packed.unflatten(0, (num_experts, out_features)), quant_type, dtype)

    def to_expert_linear(self, dtype: torch.dtype | None = None) -> ExpertLinear:
        """The ExpertLinear with the dequantized weights, in `dtype` or this module's."""
        layer = ExpertLinear(self.num_experts, self.in_features, self.out_features, device="meta")
        layer.weight = self._dequantized(dtype)
        return layer.train(self.training)

    @property
    def weight(self) -> torch.Tensor:
        raise AttributeError("weight")

    @property
    def num_experts(self) -> int:
        return self.stored.shape[0]

    @property
    def in_features(self) -> int:
        return self.matrix_shape[1]

    @property
    def out_features(self) -> int:
        return self.matrix_shape[0]

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.torch_qgemv.expert_linear(x, self._checked(), ids, self._type_id)

    def _matrix(self) -> torch.Tensor:
        packed = self.packed
        return dequantize(packed.flatten(0, 1), self.quant_type).unflatten(0, packed.shape[:2])

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"quant_type={self.quant_type.name}"
        )
