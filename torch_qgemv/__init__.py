"""Run GGUF-quantized models in PyTorch with the weights kept packed."""

import importlib

from . import _extension  # noqa: F401  (first: it registers torch.ops.torch_qgemv)
from . import vmap as _vmap  # noqa: F401  (registers the operators' rules)
from .fusing import fuse, unfuse
from .gguf import GGUFError, GGUFFile, GGUFTensor
from .loading import load_gguf
from .modules import QuantEmbedding, QuantLinear, prepare
from .ops import dequantize, embedding, expert_linear, fused_linear, linear, quant_types, quantize
from .quantizing import QuantizationReport, quantize_model
from .saving import load_state_dict
from .tuning import load_tuning, unload_tuning


def __getattr__(name: str):
    """torch_qgemv.hf, .peft and .diffusers are imported when they are first used: they need packages, and seconds."""
    if name in ("hf", "peft", "diffusers"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "GGUFError",
    "GGUFFile",
    "GGUFTensor",
    "QuantEmbedding",
    "QuantLinear",
    "QuantizationReport",
    "dequantize",
    "embedding",
    "expert_linear",
    "fuse",
    "fused_linear",
    "linear",
    "load_gguf",
    "load_state_dict",
    "load_tuning",
    "prepare",
    "quant_types",
    "quantize",
    "quantize_model",
    "unfuse",
    "unload_tuning",
]
