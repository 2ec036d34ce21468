"""A QuantLinear whose packed columns are in another order than those of its input.

Some converters reorder columns in units that are smaller than a block. Packed columns can't be moved back without
encoding the weight anew, so the layer moves the values of x instead.
"""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch import nn

from .modules import QuantLinear, QuantType
from .weight import natural_columns, permuted, stand_in


class PermutedQuantLinear(QuantLinear):
    """A QuantLinear that multiplies x[..., input_permutation].

    input_permutation: int64 [in_features], a buffer: column k of the packed weight belongs to x[..., permutation[k]].
    A new module has 0, 1, 2, ... there. `weight` and to_linear() have the columns in the order of x.
    """

    input_permutation: torch.Tensor

    def __init__(self, in_features: int, out_features: int, quant_type: QuantType, *args: Any, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, quant_type, *args, **kwargs)
        self._hold(None)

    @classmethod
    def from_packed(
        cls,
        packed: torch.Tensor,
        quant_type: QuantType,
        bias: torch.Tensor | None = None,
        input_permutation: torch.Tensor | None = None,
    ) -> PermutedQuantLinear:
        """Holds `packed`, uint8 [out_features, row_bytes], without copying it. None as permutation is 0, 1, 2, ...

        Raises ValueError if input_permutation doesn't hold each of 0 ... in_features - 1 once.
        """
        layer = super().from_packed(packed, quant_type, bias)
        layer._hold(input_permutation)
        return layer

    def _hold(self, permutation: torch.Tensor | None) -> None:
        if permutation is None:
            permutation = torch.arange(self.in_features, device=self.stored.device)
        elif problem := permutation_problem(permutation, self.in_features):
            raise ValueError(f"input_permutation {problem}")
        self.register_buffer("input_permutation", permutation.to(self.stored.device, torch.int64))

    @property
    def weight(self) -> torch.Tensor:
        """A read-only stand-in for the matrix [N, K], see PackedWeight."""
        return stand_in(self.stored, self.quant_type, self.matrix_shape, self.dtype, self.input_permutation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(permuted(x, self.input_permutation))

    def _matrix(self) -> torch.Tensor:
        return natural_columns(super()._matrix(), self.input_permutation)

    def _obstacle_to_loading(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        permutation = state_dict.get(f"{prefix}input_permutation")
        if permutation is not None and (problem := permutation_problem(permutation, self.in_features)):
            return f"{prefix}input_permutation {problem}"
        return super()._obstacle_to_loading(state_dict, prefix)


def permutation_problem(permutation: torch.Tensor, columns: int) -> str | None:
    """What is wrong with a permutation of that many columns."""
    if permutation.dtype not in (torch.int64, torch.int32) or tuple(permutation.shape) != (columns,):
        return f"must be int64 [K] = [{columns}], got {permutation.dtype} {list(permutation.shape)}"
    if not permutation.is_meta and permutation.sort().values.tolist() != list(range(columns)):
        return f"must hold each of 0 ... {columns - 1} once"
    return None


def pack_permuted(
    linear: nn.Linear, packed: torch.Tensor, quant_type: gguf.GGMLQuantizationType
) -> PermutedQuantLinear:
    """The permuted layer in the place of an nn.Linear, with its bias; its permutation is 0, 1, 2, ..."""
    layer = PermutedQuantLinear.from_packed(packed, quant_type)
    layer.bias = linear.bias
    return layer
