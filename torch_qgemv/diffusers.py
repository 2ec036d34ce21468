"""Diffusion models of the diffusers library with their GGUF weights kept packed (pip install 'torch_qgemv[diffusers]').

A GGUF checkpoint of a transformer, in diffusers' names or in those of its original code:

    import torch
    from diffusers import FluxPipeline, FluxTransformer2DModel
    import torch_qgemv

    transformer = torch_qgemv.diffusers.from_gguf(
        "flux1-dev-Q4_K_S.gguf",
        FluxTransformer2DModel,
        "black-forest-labs/FLUX.1-dev", subfolder="transformer",  # the configuration, which no GGUF file holds
        dtype=torch.bfloat16,
    )
    pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", transformer=transformer)

Or a model that diffusers has loaded already, with GGUFQuantizationConfig:

    torch_qgemv.diffusers.convert(pipe.transformer)

LoRA: model.add_adapter(torch_qgemv.peft.register(LoraConfig(...))); and, where diffusers makes the LoraConfig itself,

    with torch_qgemv.peft.registering():
        pipe.load_lora_weights("lora.safetensors")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import checkpoint, modules
from .gguf import GGUFFile
from .loading import load_tensors
from .modules import QuantLinear
from .ops import quant_types

try:
    from accelerate import init_empty_weights
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_gguf_tensor
except ImportError as error:
    raise ImportError(
        "torch_qgemv.diffusers needs diffusers and accelerate. Run: pip install 'torch_qgemv[diffusers]'"
    ) from error


def convert(model: nn.Module) -> nn.Module:
    """Replaces the GGUF layers that diffusers has made, in place, by QuantLinear; returns the model.

    The packed bytes are held as they are, not copied; the compute dtype is that of the GGUF layers. What diffusers
    keeps as bytes but QuantLinear can't hold (BF16 matrices, packed tensors of other modules) is dequantized to it.
    Then the model is no quantized one to diffusers: it can be cast, adapted by LoRA and compiled as any other.

    Raises, before anything is replaced, ValueError if the model has no GGUF layers, or if one has hooks or an adapter,
    which a replacement would lose.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GGUFLinear)}
    if not layers:
        raise ValueError(
            f"convert: {type(model).__name__} has no GGUF layers; load it with "
            "quantization_config=GGUFQuantizationConfig(compute_dtype=...), or by torch_qgemv.diffusers.from_gguf"
        )
    for name, layer in layers.items():
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks) or "forward" in layer.__dict__ or name.endswith(".base_layer"):
            raise ValueError(f"convert: {name} has hooks, offloading or an adapter; convert the model before those")
    dtype = next(iter(layers.values())).compute_dtype
    for name, layer in layers.items():
        model.set_submodule(name, _converted(layer))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, GGUFParameter):
                module._parameters[name] = nn.Parameter(dequantize_gguf_tensor(parameter).to(dtype), False)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    return model


def _converted(layer: GGUFLinear) -> nn.Module:
    weight, bias = layer.weight, layer.bias
    bias = None if bias is None else nn.Parameter(bias.detach().to(layer.compute_dtype), False)
    if isinstance(weight, GGUFParameter) and weight.quant_type.name in quant_types():
        packed = QuantLinear.from_packed(weight.as_tensor().detach(), weight.quant_type, bias)
        return packed.to(dtype=layer.compute_dtype).train(layer.training)
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    dense.weight = nn.Parameter(dequantize_gguf_tensor(weight).detach().to(layer.compute_dtype), False)
    dense.bias = bias
    return dense.train(layer.training)


def from_gguf(
    path: str | os.PathLike[str],
    model_class: type[nn.Module],
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
    prepare: bool = True,
    **config_options: Any,
) -> nn.Module:
    """The diffusers model of the GGUF checkpoint at `path`, with its matrices packed, in eval mode.

    model_class: a diffusers class, such as FluxTransformer2DModel. The tensors have the names of its state dict, or
        those of the original code, which diffusers converts for classes with from_single_file; rows stay packed then.
    config: of the model: a dict, or what model_class.load_config takes (a folder or a repository, with
        config_options such as subfolder="transformer").
    device: where the model goes; None is the CPU. dtype: the compute dtype, and of tensors that aren't packed; None is
        torch.float32. Parameters that the class keeps in float32 stay so.
    progress: show a progress bar; None shows it on a terminal only.
    prepare: on the CPU, rearrange the weights for speed (torch_qgemv.prepare). Leave it out if parts of the model are
        to be offloaded: those would be rearranged anew at each move.

    Shapes given by comfy.gguf.orig_shape metadata are restored. Raises GGUFError for a damaged file,
    NotImplementedError for a type that isn't in torch_qgemv.quant_types(), ValueError if the file's tensors aren't
    exactly those of the model.
    """
    if not isinstance(config, Mapping):
        config = model_class.load_config(config, **config_options)
    elif config_options:
        raise ValueError(f"config is a dict, which takes no {', '.join(config_options)}")
    file = GGUFFile(path)
    with init_empty_weights():
        model = model_class.from_config(config)
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept & set(name.split(".")) else dtype or torch.float32)
    tensors = _in_diffusers_names(checkpoint.state_dict(file, dtype or torch.float32), model, config)
    load_tensors(model, checkpoint.as_tensors(tensors, file), progress=progress)
    model = model.to(device or "cpu").eval()
    return modules.prepare(model) if prepare else model


def _in_diffusers_names(
    tensors: dict[str, torch.Tensor], model: nn.Module, config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors under the names of the model's state dict, by the function that from_single_file uses."""
    missing = sorted(model.state_dict().keys() - tensors.keys())
    known = [base.__name__ for base in type(model).__mro__ if base.__name__ in SINGLE_FILE_LOADABLE_CLASSES]
    if not missing or not known:
        return tensors
    convert_names = SINGLE_FILE_LOADABLE_CLASSES[known[0]]["checkpoint_mapping_fn"]
    try:
        return convert_names(config=dict(config), checkpoint=dict(tensors))
    except Exception as error:  # whatever it stumbles over
        raise ValueError(
            f"the file's tensors have neither the names of {type(model).__name__} ({missing[0]} and "
            f"{len(missing) - 1} others are missing) nor those of its original code ({error!r})"
        ) from error
