"""What from_gguf knows of each GGUF architecture: its transformers configuration, tensor names and converter's changes.

Keys, names and changes are those of llama.cpp's converter and loader (MIT).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..gguf import GGUFFile

_MISSING = object()


class Hyperparameters:
    """The `<architecture>.*` keys of a file. Remembers which were read: the rest may change what the model computes."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]):
        prefix = architecture + "."
        self.architecture = architecture
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._unread = set(self._values)

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """One value for the whole model; a list that repeats one value for every layer counts as that."""
        value = self.get_any(key, default)
        if value is _MISSING:
            raise ValueError(f"the file lacks the metadata key {self.architecture}.{key}")
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise NotImplementedError(f"{self.architecture}.{key} differs between layers: {value}")
        return value[0]

    def get_any(self, key: str, default: Any) -> Any:
        """A value as it stands in the file: one, or a list with one for each layer."""
        self._unread.discard(key)
        return self._values.get(key, default)

    def require(self, key: str, expected: Any, default: Any = _MISSING) -> None:
        """Refuses a file whose value isn't the one that the transformers class computes with."""
        value = self.get(key, expected if default is _MISSING else default)
        if value != expected:
            raise NotImplementedError(f"{self.architecture}.{key} is {value}, only {expected} is supported here")

    def warn_unread(self) -> None:
        if self._unread:
            keys = ", ".join(f"{self.architecture}.{key}" for key in sorted(self._unread))
            warnings.warn(f"metadata keys that torch_qgemv doesn't know are ignored: {keys}", stacklevel=4)


def _decoder_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    """What all supported decoders have in common."""
    hidden_size, heads = hyper.get("embedding_length"), hyper.get("attention.head_count")
    head_dim = hyper.get("attention.key_length", hidden_size // heads)
    hyper.require("attention.value_length", head_dim)
    hyper.require("rope.dimension_count", head_dim)
    hyper.require("expert_count", 0)
    for key in ("vocab_size", "tensor_data_layout"):  # the tensors themselves say it
        hyper.get(key, None)
    if "token_embd.weight" not in file:
        raise ValueError(f"{file.path}: the file has no tensor 'token_embd.weight'")
    return {
        "vocab_size": file["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": hyper.get("feed_forward_length"),
        "num_hidden_layers": hyper.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": hyper.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": hyper.get("context_length"),
        "rms_norm_eps": hyper.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(hyper),
        "tie_word_embeddings": "output.weight" not in file,
    }


def _rope_parameters(hyper: Hyperparameters, default_theta: float = 10000.0) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": hyper.get("rope.freq_base", default_theta)}
    scaling = hyper.get("rope.scaling.type", "none")
    factor = hyper.get("rope.scaling.factor", None)
    hyper.get("rope.scaling.finetuned", None)  # says how the model was trained, changes nothing
    if scaling == "none" or factor is None:
        return parameters
    parameters |= {"rope_type": scaling, "factor": factor}
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = hyper.get("rope.scaling.original_context_length")
        parameters["beta_fast"] = hyper.get("rope.scaling.yarn_beta_fast", 32.0)
        parameters["beta_slow"] = hyper.get("rope.scaling.yarn_beta_slow", 1.0)
    elif scaling != "linear":
        raise NotImplementedError(f"{hyper.architecture}.rope.scaling.type is {scaling!r}, not none, linear or yarn")
    return parameters


def _llama_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    config = _decoder_config(file, hyper)
    window = hyper.get("attention.sliding_window", 0)
    if window:  # a Mistral file: the same tensors in a class that knows windows
        return config | {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias" in file, "mlp_bias": "blk.0.ffn_gate.bias" in file}
    return config | biases | {"model_type": "llama"}


def _qwen2_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    return _decoder_config(file, hyper) | {"model_type": "qwen2"}


def _qwen3_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    return _decoder_config(file, hyper) | {"model_type": "qwen3", "attention_bias": "blk.0.attn_q.bias" in file}


def _gemma3_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    config = _decoder_config(file, hyper)
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
            "full_attention": _rope_parameters(hyper, default_theta=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


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
    return values - 1 if name.endswith("norm.weight") else values


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


@dataclass(frozen=True)
class Architecture:
    """config(file, hyperparameters): keyword arguments of the transformers configuration, model_type included.
    values(name, values, config): a tensor's values as the transformers class wants them, shape and dtype kept.
    layer_names: a tensor's GGUF name within its layer -> the module's name within the transformers layer.
    """

    config: Callable[[GGUFFile, Hyperparameters], dict[str, Any]]
    values: Callable[[str, torch.Tensor, Any], torch.Tensor] = _same_values
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)

    def parameter_name(self, name: str) -> str:
        """The transformers name of a GGUF tensor; unknown names come back unchanged."""
        stem, _, leaf = name.rpartition(".")
        if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
            module = self.layer_names.get(layer[2])
            return f"model.layers.{layer[1]}.{module}.{leaf}" if module else name
        return f"{_MODEL_NAMES[stem]}.{leaf}" if stem in _MODEL_NAMES else name


ARCHITECTURES = {
    "llama": Architecture(_llama_config, _llama_values),
    "qwen2": Architecture(_qwen2_config),
    "qwen3": Architecture(_qwen3_config),
    "gemma3": Architecture(_gemma3_config, _gemma3_values, _GEMMA3_LAYER_NAMES),
}
