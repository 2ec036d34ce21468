"""ComfyUI's operations, with matrices that stay packed, and the patcher that applies LoRA to them."""

from __future__ import annotations

from functools import partial
from typing import Any

import comfy.lora
import comfy.model_patcher
import comfy.ops
import torch
from torch import nn
from torch.nn import functional as F

from torch_qgemv import QuantEmbedding, QuantLinear
from torch_qgemv.checkpoint import PackedRows
from torch_qgemv.modules import PackedModule


class Packed:
    """What ComfyUI looks for in a layer. weight_function: functions that patch the weight at each call."""

    comfy_cast_weights = True  # the layer can run while its weights lie on another device

    def _prepare(self) -> None:
        self.weight_function, self.bias_function = [], []

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Under the names that ComfyUI knows, for it lists what a LoRA can patch by a state dict."""
        destination[f"{prefix}weight"] = self.weight
        if getattr(self, "bias", None) is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _packed_on(self, device: torch.device) -> torch.Tensor:
        return self._checked() if self.stored.device == device else self.packed.to(device)

    def _patched(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        weight = torch.ops.torch_qgemv.dequantize(self._packed_on(device), self._type_id, dtype)
        for function in self.weight_function:
            weight = function(weight)
        return weight.to(dtype)


class PackedLinear(Packed, QuantLinear):
    """A linear layer of ComfyUI on packed bytes. With a LoRA it is dequantized at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.device)
        for function in self.bias_function:
            bias = function(bias)
        if self.weight_function:
            return F.linear(x, self._patched(x.device, x.dtype), None if bias is None else bias.to(x.dtype))
        return torch.ops.torch_qgemv.linear(x, self._packed_on(x.device), self._type_id, bias)


class PackedEmbedding(Packed, QuantEmbedding):
    """An embedding of ComfyUI on packed bytes."""

    def forward(self, indices: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = out_dtype or self.dtype
        if self.weight_function:
            return F.embedding(indices, self._patched(indices.device, dtype))
        return torch.ops.torch_qgemv.embedding(indices, self._packed_on(indices.device), self._type_id, dtype)


class _BecomesPacked:
    """An operation that turns into its packed form when a state dict has packed rows for it."""

    _packed_class: type[PackedModule]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rows = state_dict.get(f"{prefix}weight")
        if not isinstance(rows, PackedRows):
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        *_, error_msgs = args
        wanted = self._shape()
        if tuple(rows.shape) != wanted:
            error_msgs.append(f"{prefix}weight: shape {tuple(rows.shape)} in the file, {wanted} in the model")
            return
        packed = self._packed_class.from_packed(rows._packed, rows._quant_type)
        if f"{prefix}bias" in state_dict:
            packed.bias = nn.Parameter(state_dict[f"{prefix}bias"].detach().clone(), requires_grad=False)
        packed._prepare()
        self.__dict__, self.__class__ = packed.to(rows.dtype).__dict__, type(packed)


class Operations(comfy.ops.manual_cast):
    """For model_options["custom_operations"]."""

    class Linear(_BecomesPacked, comfy.ops.manual_cast.Linear):
        _packed_class = PackedLinear

        def _shape(self) -> tuple[int, int]:
            return self.out_features, self.in_features

    class Embedding(_BecomesPacked, comfy.ops.manual_cast.Embedding):
        _packed_class = PackedEmbedding

        def _shape(self) -> tuple[int, int]:
            return self.num_embeddings, self.embedding_dim


class PackedPatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher that leaves packed bytes alone: their layers apply patches at each call."""

    @classmethod
    def of(cls, patcher: comfy.model_patcher.ModelPatcher) -> PackedPatcher:
        if type(patcher) is not comfy.model_patcher.ModelPatcher:
            raise RuntimeError(f"packed weights need ComfyUI's plain ModelPatcher, got {type(patcher).__name__}")
        patcher = patcher.clone()
        patcher.__class__ = cls  # which clone() passes on
        return patcher

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        name, _, leaf = key.rpartition(".")
        module = self.model.get_submodule(name)
        if leaf != "weight" or not isinstance(module, Packed):
            return super().patch_weight_to_device(key, *args, **kwargs)
        patches = self.patches.get(key)
        module.weight_function = [partial(_patch, patches, key)] if patches else []
        return None

    def load(self, *args: Any, **kwargs: Any) -> None:
        super().load(*args, **kwargs)
        for name, module in self.model.named_modules():
            if isinstance(module, Packed):
                self.patch_weight_to_device(f"{name}.weight")

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            for module in self.model.modules():
                if isinstance(module, Packed):
                    module.weight_function = []
        super().unpatch_model(device_to, unpatch_weights)


def _patch(patches: list[Any], key: str, weight: torch.Tensor) -> torch.Tensor:
    return comfy.lora.calculate_weight(patches, weight, key)
