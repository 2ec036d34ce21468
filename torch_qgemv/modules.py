"""nn.Modules that hold packed GGUF weights, and the functions that put them into a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from .ops import QuantType, dequantize, quantize, resolve_quant_type


class PackedWeight(torch.Tensor):
    """The matrix [N, K] of a packed module as a tensor that has no data of its own.

    Its shape, dtype and device cost nothing. F.linear and F.embedding on it run the packed operator; anything else
    works on a dequantized copy. It is read-only: an in-place operation raises TypeError.
    """

    @staticmethod
    def __new__(cls, packed: torch.Tensor, quant_type: gguf.GGMLQuantizationType, shape: tuple[int, int], dtype):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        self._packed, self._quant_type = packed, quant_type
        return self

    def __repr__(self) -> str:
        return (
            f"PackedWeight({self._quant_type.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError("a packed weight can't be copied or saved by itself; use the module or to_linear().weight")

    def __deepcopy__(self, memo):
        return self.__reduce_ex__(None)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            return cls._linear(*args, **kwargs)
        if func is F.embedding:
            return cls._embedding(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], cls):
            cls._refuse_write(func)
        if func in (torch.Tensor.data.__get__, torch.Tensor.detach):  # a copy would lose writes silently
            return args[0]
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @staticmethod
    def _linear(input, weight, bias=None):
        if not isinstance(weight, PackedWeight):  # it is the input or the bias
            return F.linear(*(_plain(tensor) for tensor in (input, weight, bias)))
        return torch.ops.torch_qgemv.linear(_plain(input), weight._packed, weight._quant_type, _plain(bias))

    @staticmethod
    def _embedding(input, weight, padding_idx=None, max_norm=None, *args, **kwargs):
        if max_norm is not None:  # torch would rescale rows of the weight in place
            PackedWeight._refuse_write(F.embedding)
        return torch.ops.torch_qgemv.embedding(input, weight._packed, weight._quant_type, weight.dtype)

    @staticmethod
    def _refuse_write(func):
        raise TypeError(f"{func.__name__} would write to a packed weight, which is read-only; use to_linear() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        positional = zip(func._schema.arguments, args, strict=False)
        named = ((argument, kwargs.get(argument.name)) for argument in func._schema.arguments)
        for argument, value in (*positional, *named):
            if argument.is_write and any(isinstance(leaf, cls) for leaf in tree_leaves(value)):
                cls._refuse_write(func)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _plain(value: Any) -> Any:
    return dequantize(value._packed, value._quant_type, value.dtype) if isinstance(value, PackedWeight) else value


class PackedModule(nn.Module):
    """What QuantLinear and QuantEmbedding share: the packed bytes, and what the matrix looks like from outside."""

    packed: torch.Tensor

    def __init__(self, packed: torch.Tensor, quant_type: QuantType, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.quant_type = resolve_quant_type(quant_type)
        _, type_size = gguf.GGML_QUANT_SIZES[self.quant_type]
        if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] % type_size:
            raise ValueError(
                f"packed must be uint8 [N, row_bytes] with whole {self.quant_type.name} blocks of {type_size} bytes, "
                f"got {packed.dtype} {list(packed.shape)}"
            )
        self.register_buffer("packed", packed)
        # Carries the compute dtype: .to(dtype) and .half() change it and leave the packed bytes alone.
        self.register_buffer("_dtype", torch.empty(0, dtype=dtype, device=packed.device), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which .to(dtype), .half() and .bfloat16() change."""
        return self._dtype.dtype

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(N, K), as the packed bytes have it."""
        block_size, type_size = gguf.GGML_QUANT_SIZES[self.quant_type]
        return self.packed.shape[0], self.packed.shape[1] // type_size * block_size

    @property
    def weight(self) -> torch.Tensor:
        """A read-only stand-in for the matrix [N, K] (PackedWeight); under torch.compile the dequantized matrix."""
        if torch.compiler.is_compiling():
            return dequantize(self.packed, self.quant_type, self.dtype)
        return PackedWeight(self.packed, self.quant_type, self.matrix_shape, self.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise TypeError("the weight of a packed module can't be set; use to_linear() first, or set .packed")
        super().__setattr__(name, value)

    def _dequantized(self, dtype: torch.dtype | None) -> nn.Parameter:
        return nn.Parameter(dequantize(self.packed, self.quant_type, torch.float32).to(dtype or self.dtype))


def _empty_packed(rows: int, columns: int, quant_type: QuantType, device: Any) -> torch.Tensor:
    quant_type = resolve_quant_type(quant_type)
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    if columns % block_size:
        raise ValueError(
            f"{columns} features per row are no multiple of the {block_size} weights of a {quant_type.name} block"
        )
    return torch.zeros(rows, columns // block_size * type_size, dtype=torch.uint8, device=device)


class QuantLinear(PackedModule):
    """An nn.Linear whose weight stays packed in GGUF blocks.

    packed: the GGUF bytes, uint8 [out_features, row_bytes] (a buffer; zeros in a new module). bias: [out_features] or
    None. forward: x [..., in_features] -> [..., out_features] of x's dtype, see torch_qgemv.linear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        quant_type: QuantType,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(_empty_packed(out_features, in_features, quant_type, device), quant_type, dtype)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_packed(cls, packed: torch.Tensor, quant_type: QuantType, bias: torch.Tensor | None = None) -> QuantLinear:
        """Holds `packed`, uint8 [out_features, row_bytes], without copying it."""
        layer = cls.__new__(cls)
        PackedModule.__init__(layer, packed, quant_type, None if bias is None else bias.dtype)
        if bias is not None and tuple(bias.shape) != (packed.shape[0],):
            raise ValueError(f"bias must be [out_features] = [{packed.shape[0]}], got {list(bias.shape)}")
        layer.bias = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, quant_type: QuantType) -> QuantLinear:
        """Quantizes an nn.Linear, see torch_qgemv.quantize; the bias is shared."""
        layer = cls.from_packed(quantize(linear.weight, quant_type), quant_type, linear.bias).to(linear.weight.dtype)
        return layer.train(linear.training)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """The nn.Linear with the dequantized weight, in `dtype` or this module's."""
        weight = self._dequantized(dtype)
        linear = nn.Linear(*reversed(weight.shape), bias=self.bias is not None, device="meta")
        linear.weight = weight
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(weight.dtype, copy=True))
        return linear.train(self.training)

    @property
    def in_features(self) -> int:
        return self.matrix_shape[1]

    @property
    def out_features(self) -> int:
        return self.matrix_shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.torch_qgemv.linear(x, self.packed, self.quant_type, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, quant_type={self.quant_type.name}, "
            f"bias={self.bias is not None}"
        )


class QuantEmbedding(PackedModule):
    """An nn.Embedding whose weight stays packed in GGUF blocks.

    packed: the GGUF bytes, uint8 [num_embeddings, row_bytes] (a buffer; zeros in a new module). forward: indices of
    any shape -> [*indices.shape, embedding_dim] in the module's dtype.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        quant_type: QuantType,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(_empty_packed(num_embeddings, embedding_dim, quant_type, device), quant_type, dtype)

    @classmethod
    def from_packed(cls, packed: torch.Tensor, quant_type: QuantType) -> QuantEmbedding:
        """Holds `packed`, uint8 [num_embeddings, row_bytes], without copying it."""
        layer = cls.__new__(cls)
        PackedModule.__init__(layer, packed, quant_type, None)
        return layer

    def to_embedding(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """The nn.Embedding with the dequantized weight, in `dtype` or this module's."""
        return nn.Embedding.from_pretrained(self._dequantized(dtype).data, freeze=False).train(self.training)

    @property
    def num_embeddings(self) -> int:
        return self.matrix_shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.matrix_shape[1]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.ops.torch_qgemv.embedding(indices, self.packed, self.quant_type, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, quant_type={self.quant_type.name}"


def quantize_model(
    model: nn.Module, quant_type: QuantType, predicate: Callable[[str, nn.Linear], bool] | None = None
) -> nn.Module:
    """Replaces every nn.Linear of `model` by a QuantLinear, in place, and returns the model.

    predicate(name, module): which ones to replace; by default all. Subclasses of nn.Linear are left alone: they may
    compute something else. Raises ValueError, before anything is replaced, listing the layers whose in_features don't
    fill whole blocks; exclude them with the predicate.
    """
    quant_type = resolve_quant_type(quant_type)
    block_size, _ = gguf.GGML_QUANT_SIZES[quant_type]
    chosen = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and (predicate is None or predicate(name, module))
    }
    bad = [f"{name} (in_features={m.in_features})" for name, m in chosen.items() if m.in_features % block_size]
    if bad:
        raise ValueError(
            f"{quant_type.name} blocks hold {block_size} weights, and in_features is no multiple of that in "
            f"{', '.join(bad)}; leave them out with a predicate"
        )
    replacements: dict[nn.Linear, QuantLinear] = {}  # one for each module, also if the model names it twice
    for name, module in chosen.items():
        if module not in replacements:
            replacements[module] = QuantLinear.from_linear(module, quant_type)
        if name == "":
            return replacements[module]
        model.set_submodule(name, replacements[module])
    return model
