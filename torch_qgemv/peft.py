"""LoRA adapters on packed layers, by peft (pip install "peft>=0.19").

The packed weights stay as they are, and frozen; the adapters beside them learn:

    from peft import LoraConfig, PeftModel, get_peft_model
    import torch_qgemv

    base, tokenizer = torch_qgemv.hf.from_gguf("model.gguf")
    config = torch_qgemv.peft.register(LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    model = get_peft_model(base, config)
    ...  # train as usual
    model.save_pretrained("adapter")  # peft's own format, usable with the unquantized model too

Later, on a fresh `base`:

    config = torch_qgemv.peft.register(LoraConfig.from_pretrained("adapter"))
    model = PeftModel.from_pretrained(base, "adapter", config=config)

A packed weight can't take an adapter in: merge_adapter(), merge_and_unload() and unmerge_adapter() raise
NotImplementedError. Layers that are unpacked first, which takes the memory of the unpacked weights, can:

    torch_qgemv.peft.to_linear(model)
    merged = model.merge_and_unload()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .modules import QuantLinear

try:
    from peft import LoraConfig, PeftType
    from peft.tuners import lora
    from peft.tuners.lora.variants import DoraLinearVariant
except ImportError as error:
    raise ImportError(f'torch_qgemv.peft needs peft 0.19 or newer; run: pip install "peft>=0.19" ({error})') from error

if TYPE_CHECKING:
    from torch import nn

# The others take a part of the base weight away, or need it in a form of their own.
INITS = (True, False, "gaussian", "orthogonal")


class LoraQuantLinear(lora.Linear):
    """peft's LoRA layer around a QuantLinear: base_layer(x) + scaling * B(A(x)), also with DoRA."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict:
        return {(): None, ("use_dora",): DoraLinearVariant}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs) -> None:
        if self._is_packed() and config.init_lora_weights not in INITS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} would change the base weight, which is packed; use "
                f"one of {', '.join(map(repr, INITS))}, or unpack the layer with to_linear() first"
            )
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        self._refuse_packed("merge")
        super().merge(safe_merge, adapter_names)

    def unmerge(self) -> None:
        self._refuse_packed("unmerge")
        super().unmerge()

    def _is_packed(self) -> bool:
        return isinstance(self.get_base_layer(), QuantLinear)

    def _refuse_packed(self, action: str) -> None:
        if self._is_packed():
            raise NotImplementedError(
                f"{action}: an adapter can't be merged into the packed weight of {self.get_base_layer()}; keep it "
                "beside the weight, or unpack the layers with torch_qgemv.peft.to_linear(model) first"
            )


def register(config: LoraConfig) -> LoraConfig:
    """Lets a LoraConfig adapt QuantLinear too; returns the same config. It isn't saved: register a loaded one again.

    Raises TypeError for the configs of other methods, and ValueError for what packed layers can't do.
    """
    if getattr(config, "peft_type", None) != PeftType.LORA:
        raise TypeError(f"register: packed layers work with peft's LoraConfig only, got {type(config).__name__}")
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        raise ValueError(
            'register: peft finds only nn.Linear for target_modules="all-linear"; name the layers, as in '
            'target_modules=["q_proj", "v_proj"], or give a regular expression'
        )
    if config.fan_in_fan_out:
        raise ValueError("register: fan_in_fan_out=True is for weights stored as [in, out]; packed ones are [out, in]")
    config._register_custom_module({QuantLinear: LoraQuantLinear})
    return config


@contextmanager
def registering() -> Iterator[None]:
    """Within it every LoraConfig that is made is registered: for libraries that make their own, as diffusers does in
    load_lora_weights. It concerns all threads."""
    made = LoraConfig.__post_init__

    def registered(self: LoraConfig) -> None:
        made(self)
        register(self)

    LoraConfig.__post_init__ = registered
    try:
        yield
    finally:
        LoraConfig.__post_init__ = made


def to_linear(model: nn.Module) -> nn.Module:
    """Unpacks the layers of `model` that have an adapter, in place, and returns the model: now adapters can be merged.

    Each becomes QuantLinear.to_linear(), frozen, in the layer's dtype.
    """
    for module in model.modules():
        if isinstance(module, LoraQuantLinear) and module._is_packed():
            module.base_layer = module.base_layer.to_linear().requires_grad_(False)
    return model
