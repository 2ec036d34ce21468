"""transformers' GGUF loader, changed where its own packed path stops. For the versions that enabling.py knows."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming
from transformers.integrations.gguf.dequant import GGML_BLOCK, row_bytes
from transformers.integrations.gguf.utils import get_gguf_plan
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from .experts import GatedExperts
from .hub_kernel import GEMV_TYPES

_GATE, _UP = r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"  # what transformers' mapping joins


class PackedGgufQuantizer(GgufHfQuantizer):
    """GgufHfQuantizer that downloads no kernels, in any dtype, with gate and up of experts in different types."""

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        if not self.supported or dtype in (None, torch.float32):
            return super().update_dtype(dtype)
        self.dtype = dtype  # without the advice to take float32, which these operators don't need
        return dtype

    def update_attn_implementation(self, config: Any) -> Any:
        config = super().update_attn_implementation(config)
        self.attn_requested = True  # so that no attention kernel is downloaded
        return config

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        if self.supported and not self.quantization_config.dequantize and self._gate_and_up_differ():
            self._split_experts(model)

    def _gate_and_up_differ(self) -> bool:
        types = self.header.ggml_types
        pairs = ((types[name], types.get(name.replace("ffn_gate_exps", "ffn_up_exps"))) for name in types)
        return any(gate != up for gate, up in pairs if up is not None)

    def _split_experts(self, model: nn.Module) -> None:
        """Loads gate and up of all experts apart, since their packed rows can't be joined in one tensor."""
        self.mapping = [entry for entry in self.mapping if _GATE not in entry.source_patterns] + [
            WeightRenaming(_GATE, ".mlp.experts.gate_proj.weight"),
            WeightRenaming(_UP, ".mlp.experts.up_proj.weight"),
            WeightRenaming(r"\.mlp\.experts\.down_proj$", ".mlp.experts.down_proj.weight"),
        ]
        self.quantized, packable, self.input_permutations = get_gguf_plan(self.header, self.mapping)
        names = [name for name, _ in model.named_modules() if name.endswith(".mlp.experts")]
        for name in names:
            old = model.get_submodule(name)
            weights = [f"{name}.{part}_proj.weight" for part in ("gate", "up", "down")]
            types = [packable.get(weight) for weight in weights]
            if not GEMV_TYPES.issuperset(types):
                raise NotImplementedError(
                    f"{name}: gate, up and down have the types {', '.join(map(_type_name, types))}, which can't stay "
                    "packed together here; load the file with torch_qgemv.hf.from_gguf"
                )
            inner, outer = (old.hidden_dim, old.intermediate_dim), (old.intermediate_dim, old.hidden_dim)
            parts = [
                GgufExpertLinear(old.num_experts, *sizes, ggml_type)
                for sizes, ggml_type in zip((inner, inner, outer), types, strict=True)
            ]
            model.set_submodule(name, GatedExperts(*parts, old.act_fn))
            for joined in ("gate_up_proj", "down_proj"):
                self.packed_modules.pop(f"{name}.{joined}", None)
            self.packed_modules |= dict(zip(weights, parts, strict=True))


class GgufExpertLinear(nn.Module):
    """One of the three linear layers of experts, as transformers' loader fills it: weight uint8 [E, N, row_bytes]."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, ggml_type: int) -> None:
        super().__init__()
        self.ggml_type = ggml_type
        packed = torch.empty(num_experts, out_features, row_bytes(ggml_type, in_features), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.torch_qgemv.expert_linear(x, self.weight, ids, self.ggml_type)


def _type_name(ggml_type: int | None) -> str:
    return "float" if ggml_type is None else gguf.GGMLQuantizationType(ggml_type).name


def missing_types() -> dict[int, tuple[int, int]]:
    """The block sizes of the types that the operators have and transformers' loader doesn't know, by type id."""
    return {type_id: gguf.GGML_QUANT_SIZES[type_id] for type_id in sorted(GEMV_TYPES - GGML_BLOCK.keys())}
