"""Run GGUF-quantized models in PyTorch with the weights kept packed."""

import importlib

from . import _extension  # noqa: F401  (first: it registers torch.ops.torch_qgemv)
from .gguf import GGUFError, GGUFFile, GGUFTensor
from .loading import load_gguf
from .modules import QuantEmbedding, QuantLinear
from .ops import dequantize, embedding, linear, quant_types, quantize
from .quantizing import QuantizationReport, quantize_model


def __getattr__(name: str):
    """torch_qgemv.hf is imported when it is first used: it needs transformers, and a second to load."""
    if name == "hf":
        return importlib.import_module(".hf", __name__)
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
    "linear",
    "load_gguf",
    "quant_types",
    "quantize",
    "quantize_model",
]
