"""Keeps transformers from saving packed models as folders that it would load again with random weights."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn


def guard_save_pretrained(packed_class: type[nn.Module]) -> None:
    """Makes save_pretrained of transformers' models raise for those that hold a `packed_class`, before it writes.

    Whoever makes a packed module calls this. It does nothing while transformers isn't imported: then there is no model
    of transformers that the module could belong to.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    pretrained_class = getattr(modeling, "PreTrainedModel", None)  # None: it is being imported
    if pretrained_class is not None:
        _guard(pretrained_class, packed_class)


@functools.cache
def _guard(pretrained_class: type[nn.Module], packed_class: type[nn.Module]) -> None:
    save_pretrained = pretrained_class.save_pretrained

    @functools.wraps(save_pretrained)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        packed = [name for name, module in self.named_modules() if isinstance(module, packed_class)]
        if packed and not getattr(self, "_hf_peft_config_loaded", False):  # then it saves the adapters alone
            raise NotImplementedError(
                f"save_pretrained: {type(self).__name__} has {len(packed)} packed modules ({packed[0]}, ...), which "
                "from_pretrained can't load. Save its state_dict(), with torch.save or safetensors.torch.save_model, "
                "and load that with torch_qgemv.load_state_dict; or unpack the modules with to_linear() first"
            )
        return save_pretrained(self, *args, **kwargs)

    pretrained_class.save_pretrained = guarded
