"""Keeps transformers and diffusers from saving packed models as folders that they would load with random weights."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

# The classes with save_pretrained, and the attribute that says that it saves adapters alone.
_CLASSES = (
    ("transformers.modeling_utils", "PreTrainedModel", "_hf_peft_config_loaded"),
    ("diffusers.models.modeling_utils", "ModelMixin", None),  # it has save_lora_adapter for those
)


def guard_save_pretrained(packed_class: type[nn.Module]) -> None:
    """Makes save_pretrained of those libraries' models raise for those that hold a `packed_class`, before it writes.

    Whoever makes a packed module calls this. It does nothing while a library isn't imported: then there is no model of
    it that the module could belong to.
    """
    for module, name, adapters in _CLASSES:
        pretrained_class = getattr(sys.modules.get(module), name, None)  # None: it is being imported
        if pretrained_class is not None:
            _guard(pretrained_class, packed_class, adapters)


@functools.cache
def _guard(pretrained_class: type[nn.Module], packed_class: type[nn.Module], adapters: str | None) -> None:
    save_pretrained = pretrained_class.save_pretrained

    @functools.wraps(save_pretrained)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        packed = [name for name, module in self.named_modules() if isinstance(module, packed_class)]
        if packed and not (adapters and getattr(self, adapters, False)):
            raise NotImplementedError(
                f"save_pretrained: {type(self).__name__} has {len(packed)} packed modules ({packed[0]}, ...), which "
                "from_pretrained can't load. Save its state_dict(), with torch.save or safetensors.torch.save_model, "
                "and load that with torch_qgemv.load_state_dict; or unpack the modules with to_linear() first"
            )
        return save_pretrained(self, *args, **kwargs)

    pretrained_class.save_pretrained = guarded
