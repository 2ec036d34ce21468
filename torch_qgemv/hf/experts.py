"""The experts of a transformers model, as modules that packed weights fit into."""

from __future__ import annotations

import torch
from torch import nn

from ..experts import ExpertLinear


class GatedExperts(nn.Module):
    """down(act(gate(x)) * up(x)) of the experts chosen for each token, summed with their weights.

    Stands for transformers' experts, which hold gate and up in one tensor; in a GGUF file each has its own type.
    """

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = gate_proj, up_proj, down_proj, act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: [T, K]; top_k_index, top_k_weights: [T, experts for each token]. Returns [T, K]."""
        gate, up = (proj(hidden_states, top_k_index) for proj in (self.gate_proj, self.up_proj))
        y = self.down_proj(self.act_fn(gate) * up, top_k_index)
        return (y * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def split_experts(model: nn.Module) -> None:
    """Replaces the experts of each layer by GatedExperts, without values, in place."""
    for layer in model.model.layers:
        old = layer.mlp.experts
        sizes, dtype = (old.hidden_dim, old.intermediate_dim), old.down_proj.dtype
        gate, up = (ExpertLinear(old.num_experts, *sizes, device="meta", dtype=dtype) for _ in range(2))
        down = ExpertLinear(old.num_experts, *sizes[::-1], device="meta", dtype=dtype)
        layer.mlp.experts = GatedExperts(gate, up, down, old.act_fn)
