"""From a GGUF file and a prompt to a greedy continuation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..experts import QuantExpertLinear
from ..fusing import fuse
from ..hf import from_gguf
from ..modules import PackedModule, QuantEmbedding


def load(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, float]:
    """The model, fused on a GPU, its tokenizer, and the seconds that took."""
    start = time.perf_counter()
    try:
        model, tokenizer = from_gguf(path, device=device, dtype=dtype)
    except (OSError, ValueError, NotImplementedError) as error:  # a GGUFError is a ValueError
        raise SystemExit(f"run: {error}") from None
    if device.type == "mps":
        fuse(model)
    return model, tokenizer, time.perf_counter() - start


def unpack(model: nn.Module) -> nn.Module:
    """Replaces the packed layers by torch's own, in place, their weights dequantized. Tied weights stay tied."""
    weights = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedModule):
            dense = _dense(module)
            dense.weight = weights.setdefault(module.stored.data_ptr(), dense.weight)
            model.set_submodule(name, dense)
    return model


def _dense(module: PackedModule) -> nn.Module:
    if isinstance(module, QuantEmbedding):
        return module.to_embedding()
    return module.to_expert_linear() if isinstance(module, QuantExpertLinear) else module.to_linear()


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids [1, tokens]: a user's turn for models with a chat template, else the start of a text."""
    chat = tokenizer.chat_template is not None
    if chat:
        turn = {"role": "user", "content": prompt}
        prompt = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=not chat).input_ids  # a template writes them itself
    if not ids:
        raise SystemExit("run: --prompt holds no token")
    return torch.tensor([ids])


def generate(model: Any, ids: torch.Tensor, tokens: int, streamer: Any = None, **options: Any) -> list[int]:
    """Ids of the greedy continuation, streamed as they come. eos_token_id=None: go on after the end of the text."""
    ids = ids.to(model.device)
    end = model.generation_config.eos_token_id or [None]
    options = {"pad_token_id": end[0], "do_sample": False, "max_new_tokens": tokens, "streamer": streamer} | options
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, ids.shape[1] :].tolist()


def streamer(tokenizer: Any) -> Any:
    """Prints the words of the continuation while they come."""
    from transformers import TextStreamer  # after ..hf, whose error names what to install

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


@torch.inference_mode()
def logits_of(model: Any, ids: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] over a prompt and its continuation."""
    return model(torch.cat([ids, torch.tensor([text])], 1).to(model.device)).logits[0].float().cpu()
