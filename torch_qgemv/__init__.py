"""Run GGUF-quantized models in PyTorch with the weights kept packed."""

import importlib

import torch

try:
    from . import _C  # noqa: F401  (registers torch.ops.torch_qgemv)
except ImportError as error:
    raise ImportError(
        f"the extension of torch_qgemv does not load with torch {torch.__version__}: {error}. It only works with the "
        "torch that it was compiled against; to compile it again: pip install --no-build-isolation --force-reinstall "
        "--no-deps torch_qgemv"
    ) from error

# Loading can succeed with a torch of another C++ ABI, and then crash.
_ABI_GROUPS = (("2.10", "2.11"), ("2.12", "2.13", "2.14"))


def _abi_group(version: str) -> tuple[str, ...] | None:
    release = ".".join(version.split(".")[:2])
    return next((group for group in _ABI_GROUPS if release in group), None)


if _abi_group(_C.torch_version) != _abi_group(torch.__version__):
    raise ImportError(
        f"torch_qgemv was compiled against torch {_C.torch_version} and does not work with torch {torch.__version__}; "
        "compile it again: pip install --no-build-isolation --force-reinstall --no-deps torch_qgemv"
    )

from .gguf import GGUFError, GGUFFile, GGUFTensor
from .loading import load_gguf
from .modules import QuantEmbedding, QuantLinear, quantize_model
from .ops import dequantize, embedding, linear, quant_types, quantize


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
    "dequantize",
    "embedding",
    "linear",
    "load_gguf",
    "quant_types",
    "quantize",
    "quantize_model",
]
