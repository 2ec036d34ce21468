"""What from_gguf knows of each GGUF architecture: its transformers configuration, tensor names and converter's changes.

Keys, names and changes are those of llama.cpp's converter and loader (MIT).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..gguf import GGUFFile, GGUFTensor
from . import qwen35
from .experts import split_experts
from .hyperparameters import ROPE_FACTORS, Hyperparameters, decoder_config, dense_decoder_config, rope_parameters


def _llama_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    config = dense_decoder_config(file, hyper)
    window = hyper.get("attention.sliding_window", 0)
    if window:  # a Mistral file: the same tensors in a class that knows windows
        return config | {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias" in file, "mlp_bias": "blk.0.ffn_gate.bias" in file}
    return config | biases | {"model_type": "llama"}


def _qwen2_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    return dense_decoder_config(file, hyper) | {"model_type": "qwen2"}


def _qwen3_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    return dense_decoder_config(file, hyper) | {"model_type": "qwen3", "attention_bias": "blk.0.attn_q.bias" in file}


def _gemma3_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    config = dense_decoder_config(file, hyper)
    layers, window = config["num_hidden_layers"], hyper.get("attention.sliding_window", 0)
    # Every sixth layer sees all positions unless the file says otherwise. Rope scaling is for those layers alone.
    period = hyper.get_any("attention.sliding_window_pattern", 6)
    is_local = period if isinstance(period, list) else [bool((layer + 1) % period) for layer in range(layers)]
    layer_types = ["sliding_attention" if window and local else "full_attention" for local in is_local]
    local_theta = hyper.get("rope.freq_base_swa", 10000.0)
    # The 27B model (62 layers) scales attention by hidden_size / heads, the others by head_dim; no key says so.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return config | {
        "model_type": "gemma3_text",
        "sliding_window": window or None,
        "layer_types": layer_types,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": hyper.get("final_logit_softcapping", None),
        "attention_bias": "blk.0.attn_q.bias" in file,
        "rope_parameters": {
            "full_attention": rope_parameters(hyper, default_theta=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


_PHI3_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def _phi3_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    config = decoder_config(file, hyper)
    hyper.require("expert_count", 0)
    head_dim, context = config["head_dim"], config["max_position_embeddings"]
    original = hyper.get("rope.scaling.original_context_length", context)
    rope = config["rope_parameters"] | {
        "partial_rotary_factor": hyper.get("rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": original,
    }
    attention_factor = hyper.get("rope.scaling.attn_factor", None)
    missing = [name for name in _PHI3_FACTORS.values() if name not in file]
    if len(missing) == 1:
        raise ValueError(f"{file.path}: the file has no tensor {missing[0]!r}")
    if not missing:
        rope |= {key: file[name].data.tolist() for key, name in _PHI3_FACTORS.items()}
        rope |= {"rope_type": "longrope", "attention_factor": attention_factor}
    return config | {
        "model_type": "phi3",
        "intermediate_size": hyper.get("feed_forward_length"),
        "sliding_window": hyper.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def _phi3_tensors(file: GGUFFile, config: Any) -> dict[str, GGUFTensor]:
    """The factors of the rotary frequencies are in the configuration."""
    factors = _PHI3_FACTORS.values()
    return {name: tensor for name, tensor in _all_tensors(file, config).items() if name not in factors}


def unpermute_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes the row order of llama files, where the two halves of each head's rows alternate.

    rows: [heads * head_dim, ...], packed or not, since a row stays whole.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _llama_values(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    if ".attn_q." in name:
        return unpermute_rows(values, config.num_attention_heads)
    if ".attn_k." in name:
        return unpermute_rows(values, config.num_key_value_heads)
    return values


def _gemma3_values(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Files hold the factor that a norm multiplies by; transformers' Gemma adds 1 to its weight."""
    return values.float() - 1 if name.endswith("norm.weight") else values


def _same_values(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    return values


_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_LAYER_NAMES = _LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def _all_tensors(file: GGUFFile, config: Any) -> dict[str, GGUFTensor]:
    return {name: tensor for name, tensor in file.items() if name != ROPE_FACTORS}


def _unchanged(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Architecture:
    """config(file, hyperparameters): keyword arguments of the transformers configuration, model_type included.
    values(name, values, config): a tensor's values as the transformers class wants them, shape kept.
    layer_names: a tensor's GGUF name within its layer, or that without ".weight" or ".bias" -> the name within the
        transformers layer.
    tensors(file, config): the tensors to load, in the shapes of the transformers class.
    before(model), after(model): what else is to be changed in the model, in place, around loading.
    """

    config: Callable[[GGUFFile, Hyperparameters], dict[str, Any]]
    values: Callable[[str, torch.Tensor, Any], torch.Tensor] = _same_values
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    tensors: Callable[[GGUFFile, Any], dict[str, GGUFTensor]] = _all_tensors
    before: Callable[[nn.Module], None] = _unchanged
    after: Callable[[nn.Module], None] = _unchanged

    def parameter_name(self, name: str) -> str:
        """The transformers name of a GGUF tensor; unknown names come back unchanged."""
        names, prefix, inner = _MODEL_NAMES, "", name
        if layer := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
            names, prefix, inner = self.layer_names, f"model.layers.{layer[1]}.", layer[2]
        stem, _, leaf = inner.rpartition(".")
        if inner in names:
            return prefix + names[inner]
        return f"{prefix}{names[stem]}.{leaf}" if stem in names else name


ARCHITECTURES = {
    "llama": Architecture(_llama_config, _llama_values),
    "qwen2": Architecture(_qwen2_config),
    "qwen3": Architecture(_qwen3_config),
    "gemma3": Architecture(_gemma3_config, _gemma3_values, _GEMMA3_LAYER_NAMES),
    "phi3": Architecture(_phi3_config, layer_names=_PHI3_LAYER_NAMES, tensors=_phi3_tensors),
    "qwen35": Architecture(
        qwen35.dense_config,
        qwen35.tensor_values,
        _LAYER_NAMES | qwen35.LAYER_NAMES,
        qwen35.tensors,
        after=qwen35.permute_inputs,
    ),
    "qwen35moe": Architecture(
        qwen35.moe_config,
        qwen35.tensor_values,
        _LAYER_NAMES | qwen35.LAYER_NAMES,
        qwen35.tensors,
        before=split_experts,
        after=qwen35.permute_inputs,
    ),
}
