"""from_gguf: the transformers model and tokenizer of a GGUF file."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gguf
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from .. import modules
from ..gguf import GGUFFile
from ..loading import load_tensors
from ..modules import QuantEmbedding, QuantLinear
from .architectures import ARCHITECTURES, Architecture
from .hyperparameters import ROPE_FACTORS, Hyperparameters
from .tokenizer import build_tokenizer, end_token_ids, special_token_ids


def from_gguf(
    path: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
    prepare: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Builds the transformers model and tokenizer of the GGUF file at `path`, from the file alone.

    Architectures: llama (Mistral files say llama too), qwen2, qwen3, phi3, qwen35, qwen35moe and gemma3 (of the last
    three the text part, without multi-token prediction). Linear layers, experts and embeddings keep the file's packed
    bytes; the model is in eval mode and ready for `model.generate`.

    device: where the model goes; None is the CPU.
    dtype: of activations and of the tensors that aren't packed; None is torch.float32, on every device.
    progress: show a progress bar; None shows it on a terminal only.
    prepare: on the CPU, rearrange the weights for speed (torch_qgemv.prepare). Without it they stay in the file's map,
        in memory only as far as they are used, and shared with other processes.

    Raises GGUFError for a damaged file, NotImplementedError for an architecture, option or tokenizer that isn't
    supported, ValueError if the file's tensors aren't exactly those of the model.
    """
    file = GGUFFile(path)
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise NotImplementedError(f"GGUF architecture {name!r} is not supported, only {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    model = _empty_model(file, architecture, dtype or torch.float32)
    load_tensors(
        model,
        architecture.tensors(file, model.config),
        name_map=architecture.parameter_name,
        progress=progress,
        transform=partial(architecture.values, config=model.config),
        packers={type(model.get_input_embeddings()): _pack_embedding},
    )
    if isinstance(model.get_output_embeddings(), QuantLinear):
        model._tied_weights_keys = {}  # the packed bytes are shared already; transformers only ties parameters
    architecture.after(model)
    _fill_buffers(model, file)
    tokenizer = build_tokenizer(file.metadata)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model = model.to(device or "cpu").eval()
    return modules.prepare(model) if prepare else model, tokenizer


def _empty_model(file: GGUFFile, architecture: Architecture, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device, its configuration read from the file."""
    hyper = Hyperparameters(file.metadata["general.architecture"], file.metadata)
    arguments = architecture.config(file, hyper) | special_token_ids(file.metadata)
    hyper.warn_unread()
    config = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        architecture.before(model)
    model.generation_config.eos_token_id = end_token_ids(file.metadata) or None
    return model


class _Scaled:
    """An embedding whose rows are multiplied by `scale`, as Gemma's input embedding does."""

    scale = 1.0

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        rows = super().forward(indices)
        return rows * torch.tensor(self.scale, dtype=rows.dtype)  # the scale is rounded to that dtype, as in training


class ScaledEmbedding(_Scaled, nn.Embedding):
    """What ScaledQuantEmbedding.to_embedding gives."""


class ScaledQuantEmbedding(_Scaled, QuantEmbedding):
    """A QuantEmbedding with rows multiplied by `scale`."""

    def to_embedding(self, dtype: torch.dtype | None = None) -> ScaledEmbedding:
        embedding = ScaledEmbedding.from_pretrained(self._dequantized(dtype).data, freeze=False)
        embedding.scale = self.scale
        return embedding.train(self.training)


def _pack_embedding(embedding: Any, packed: torch.Tensor, quant_type: gguf.GGMLQuantizationType) -> QuantEmbedding:
    scale = getattr(embedding, "scalar_embed_scale", None)
    if scale is None:
        return QuantEmbedding.from_packed(packed, quant_type)
    scaled = ScaledQuantEmbedding.from_packed(packed, quant_type)
    scaled.scale = scale
    return scaled


def _fill_buffers(model: PreTrainedModel, file: GGUFFile) -> None:
    """Computes the buffers that no file holds: rotary frequencies, and the scale of a Gemma embedding left unpacked."""
    for name, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
        else:
            rotary = type(module)(module.config)
            if ROPE_FACTORS in file:
                _divide_frequencies(rotary, file[ROPE_FACTORS].data)
            model.set_submodule(name, rotary)


def _divide_frequencies(rotary: Any, factors: torch.Tensor) -> None:
    """Llama 3 files hold its frequency scaling as one divisor per frequency instead of the parameters behind it."""
    if not hasattr(rotary, "inv_freq") or rotary.inv_freq.shape != factors.shape:
        raise ValueError(f"{ROPE_FACTORS} of shape {tuple(factors.shape)} doesn't fit {type(rotary).__name__}")
    rotary.inv_freq = rotary.inv_freq / factors
    rotary.original_inv_freq = rotary.inv_freq.clone()
