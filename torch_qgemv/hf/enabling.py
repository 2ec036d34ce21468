"""enable and disable: transformers' own GGUF loader with this package's operators."""

from __future__ import annotations

import sys
from typing import Any

import gguf
import transformers

# The loader's inside, which enable() reaches into, is no public interface: it may differ in every release.
KNOWN_VERSIONS = ("5.24",)
_MISSING = object()

_undo: list[tuple[Any, Any, Any]] = []  # what to set back: (module or dict, name, value)


def enable() -> None:
    """Lets `AutoModelForCausalLM.from_pretrained(folder, gguf_file=...)` keep GGUF weights packed, without a download.

    For the architectures that transformers' loader keeps packed (qwen35, qwen35moe, lfm2), on the CPU and on MPS, in
    float32, float16 and bfloat16 and for any number of rows; Q5_0 and Q5_1 tensors load too, and experts whose gate and
    up have different types. It changes transformers for the whole process, until disable(); a second call does nothing.
    Models loaded in between run only while it is enabled.

    Raises NotImplementedError for a version of transformers whose loader isn't known here.
    """
    if _undo:
        return
    version = transformers.__version__
    if not version.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS)):
        known = ", ".join(KNOWN_VERSIONS)
        raise NotImplementedError(
            f"torch_qgemv.hf.enable knows the GGUF loader of transformers {known}, but {version} is installed; run: "
            f"pip install 'transformers=={KNOWN_VERSIONS[-1]}.*', or load with torch_qgemv.hf.from_gguf"
        )
    from transformers.integrations.gguf import dequant, kernels, utils
    from transformers.quantizers import auto

    from . import hub_kernel
    from .quantizer import PackedGgufQuantizer, missing_types

    changes = [
        (kernels, "_gguf_kernel", kernels.GgufKernel(hub_kernel)),
        (kernels, "kernel_can_read", _can_read),
        (kernels, "kernelize_ggml_layers", _leave_layers),
        (utils, "MAX_GEMV_ROWS", sys.maxsize),
        (auto.AUTO_QUANTIZER_MAPPING, "gguf", PackedGgufQuantizer),
    ]
    for type_id, sizes in missing_types().items():
        changes.append((dequant.GGML_BLOCK, type_id, sizes))
        changes.append((dequant.GGML_NAME, type_id, gguf.GGMLQuantizationType(type_id).name))
    _undo[:] = [(owner, name, _get(owner, name)) for owner, name, _ in changes]
    for change in changes:
        _set(*change)


def disable() -> None:
    """Sets back everything that enable() changed in transformers. Does nothing if it isn't enabled."""
    while _undo:
        _set(*_undo.pop())


def _get(owner: Any, name: Any) -> Any:
    return owner.get(name, _MISSING) if isinstance(owner, dict) else getattr(owner, name)


def _set(owner: Any, name: Any, value: Any) -> None:
    if not isinstance(owner, dict):
        setattr(owner, name, value)
    elif value is _MISSING:
        del owner[name]
    else:
        owner[name] = value


def _can_read(tensor: Any) -> bool:
    """Whether the operators can read this tensor's memory, in place of transformers' function: the CPU's too."""
    return tensor.device.type in ("cpu", "mps")


def _leave_layers(model: Any) -> None:
    """In place of transformers' function, which downloads kernels for other layers."""
