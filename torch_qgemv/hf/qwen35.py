"""Qwen3.5, dense and with experts: what its GGUF files hold in another way than transformers' class.

Value heads: v-th value head of key head k is at [v, k] in the file and at [k, v] in transformers; so are the rows (of
out_proj, the columns) that belong to them. Norms hold the factor, transformers' class adds 1 to its weight; ssm_a is
-exp(A_log). That is what llama.cpp's converter (MIT) does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..gguf import GGUFFile, GGUFTensor
from ..modules import QuantLinear
from ..permuted import PermutedQuantLinear
from .hyperparameters import Hyperparameters, decoder_config

LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def dense_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    sizes = {"model_type": "qwen3_5_text", "intermediate_size": hyper.get("feed_forward_length")}
    hyper.require("expert_count", 0)
    return _config(file, hyper) | sizes


def moe_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    return _config(file, hyper) | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": hyper.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": hyper.get("expert_shared_feed_forward_length"),
        "num_experts": hyper.get("expert_count"),
        "num_experts_per_tok": hyper.get("expert_used_count"),
    }


def _config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    config = decoder_config(file, hyper)
    layers = config["num_hidden_layers"] - hyper.get("nextn_predict_layers", 0)
    interval, value_heads = hyper.get("full_attention_interval"), hyper.get("ssm.time_step_rank")
    # How many rotary frequencies each axis of an image has; without the key, as in transformers' class.
    sections = hyper.get_any("rope.dimension_sections", [11, 11, 10])
    return config | {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)],
        "linear_conv_kernel_dim": hyper.get("ssm.conv_kernel"),
        "linear_key_head_dim": hyper.get("ssm.state_size"),
        "linear_num_key_heads": hyper.get("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": hyper.get("ssm.inner_size") // value_heads,
        "rope_parameters": config["rope_parameters"]
        | {
            "mrope_section": [section for section in sections if section],
            "mrope_interleaved": True,
            "partial_rotary_factor": hyper.get("rope.dimension_count") / config["head_dim"],
        },
    }


def tensors(file: GGUFFile, config: Any) -> dict[str, GGUFTensor]:
    """All but those of the layers for multi-token prediction, which the transformers class doesn't have."""
    blocks = file.metadata[f"{file.metadata['general.architecture']}.block_count"]
    left_out = tuple(f"blk.{layer}." for layer in range(config.num_hidden_layers, blocks))
    return {name: _with_ones(tensor) for name, tensor in file.items() if not name.startswith(left_out)}


def _with_ones(tensor: GGUFTensor) -> GGUFTensor:
    """The tensor in the shape of transformers, where the file leaves out a dimension of 1."""
    if tensor.name.endswith(".ssm_conv1d.weight") and len(tensor.shape) == 2:
        return dataclasses.replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    if tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        return dataclasses.replace(tensor, shape=(1, *tensor.shape))
    return tensor


def tensor_values(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    _, _, inner = name.removesuffix(".weight").rpartition(".")
    if inner.endswith("norm") and inner != "ssm_norm":
        return values.float() - 1
    if inner == "ssm_a":
        return _grouped(values.float().neg().log(), config)
    if inner in ("ssm_alpha", "ssm_beta", "attn_gate") or name.endswith(".ssm_dt.bias"):
        return _grouped(values, config)
    if inner in ("attn_qkv", "ssm_conv1d"):  # rows of q, k and v; only those of v belong to value heads
        split = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return torch.cat([values[:split], _grouped(values[split:], config)])
    if inner == "ssm_out" and values.dtype != torch.uint8:  # packed columns stay, see permute_inputs
        return _grouped(values.T, config).T
    return values


def _grouped(rows: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of all value heads, [value_heads * rows per head, ...], packed or not, from [v, k] to [k, v]."""
    keys = config.linear_num_key_heads
    return rows.reshape(config.linear_num_value_heads // keys, keys, -1).transpose(0, 1).reshape(rows.shape)


def permute_inputs(model: nn.Module) -> None:
    """Gives each packed out_proj the permutation of its input that the order of its columns asks for."""
    config = model.config
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if keys in (1, heads):  # then both orders are the same
        return
    columns = torch.arange(heads * config.linear_value_head_dim, device="cpu").reshape(keys, heads // keys, -1)
    permutation = columns.transpose(0, 1).flatten()
    for layer in model.model.layers:
        attention = getattr(layer, "linear_attn", None)
        if attention is not None and isinstance(attention.out_proj, QuantLinear):
            old = attention.out_proj
            new = PermutedQuantLinear.from_packed(old.packed, old.quant_type, old.bias, permutation)
            attention.out_proj = new.to(old.dtype).train(old.training)
