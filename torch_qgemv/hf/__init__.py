"""transformers models and tokenizers from a GGUF file alone, with the weights packed."""

try:
    import transformers as _  # noqa: F401
except ImportError as error:
    raise ImportError("torch_qgemv.hf needs transformers. Run: pip install 'torch_qgemv[hf]'") from error

from .enabling import disable, enable
from .model import from_gguf

__all__ = ["disable", "enable", "from_gguf"]
