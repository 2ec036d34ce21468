"""Run GGUF-quantized models in PyTorch with the weights kept packed."""

import torch

try:
    from . import _C  # noqa: F401  (registers torch.ops.torch_qgemv)
except ImportError as error:
    raise ImportError(
        f"the extension of torch_qgemv does not load with torch {torch.__version__}: {error}. It only works with the "
        "torch that it was compiled against; to compile it again: pip install --no-build-isolation --force-reinstall "
        "--no-deps torch_qgemv"
    ) from error

from .gguf import GGUFError, GGUFFile, GGUFTensor
from .loading import load_gguf
from .modules import QuantEmbedding, QuantLinear, quantize_model
from .ops import dequantize, embedding, linear, quant_types, quantize

__version__ = "0.1.0"
__all__ = [
    "GGUFError",
    "GGUFFile",
    "GGUFTensor",
    "QuantEmbedding",
    "QuantLinear",
    "dequantize",
    "embedding",
    "linear",
    "load_gguf",
    "quant_types",
    "quantize",
    "quantize_model",
]
