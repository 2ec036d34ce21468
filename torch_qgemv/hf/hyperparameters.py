"""The `<architecture>.*` metadata of a GGUF file, and what transformers configurations take from them everywhere.

Keys are those of llama.cpp's converter and loader (MIT).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
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


def dense_decoder_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    """What decoders have in common that rotate all of a head and have no experts."""
    config = decoder_config(file, hyper)
    hyper.require("rope.dimension_count", config["head_dim"])
    hyper.require("expert_count", 0)
    return config | {"intermediate_size": hyper.get("feed_forward_length")}


def decoder_config(file: GGUFFile, hyper: Hyperparameters) -> dict[str, Any]:
    """What all supported decoders have in common."""
    hidden_size, heads = hyper.get("embedding_length"), hyper.get("attention.head_count")
    head_dim = hyper.get("attention.key_length", hidden_size // heads)
    hyper.require("attention.value_length", head_dim)
    for key in ("vocab_size", "tensor_data_layout"):  # the tensors themselves say it
        hyper.get(key, None)
    if "token_embd.weight" not in file:
        raise ValueError(f"{file.path}: the file has no tensor 'token_embd.weight'")
    return {
        "vocab_size": file["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": hyper.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": hyper.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": hyper.get("context_length"),
        "rms_norm_eps": hyper.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(hyper),
        "tie_word_embeddings": "output.weight" not in file,
    }


def rope_parameters(hyper: Hyperparameters, default_theta: float = 10000.0) -> dict[str, Any]:
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
