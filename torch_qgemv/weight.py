"""The stand-in for the matrix of a packed module: its `weight`."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from .ops import dequantize

aten = torch.ops.aten
# What would set something on the stand-in that is then gone with it; with None or False they do nothing.
_SETTERS = (
    torch.Tensor.data.__set__,
    torch.Tensor.grad.__set__,
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.requires_grad_,
)


class ReadOnlyWeight(torch.Tensor):
    """The matrix [N, K] of a packed module: what PackedWeight and its twin for torch.compile share.

    F.linear and F.embedding on it run the packed operator. It is read-only: an in-place operation raises TypeError.
    """

    _packed: torch.Tensor
    _quant_type: gguf.GGMLQuantizationType
    _transposed: bool  # then it is the matrix [K, N]
    _input_permutation: torch.Tensor | None  # where the packed columns belong, see PermutedQuantLinear

    @classmethod
    def __torch_function__(cls, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            return cls._linear(*args, **kwargs)
        if func is F.embedding:
            return cls._embedding(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], cls):
            cls._refuse_write(func)
        if func in (torch.Tensor.data.__get__, torch.Tensor.detach):  # a copy would lose writes silently
            return args[0]
        if func in _SETTERS and not any(value is None or value is False for value in args[1:]):
            cls._refuse_write(getattr(func, "__self__", func))
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_exporting():  # its modes refuse a class of tensors that they don't know
                args, kwargs = tree_map(plain, args), tree_map(plain, kwargs)
            return func(*args, **kwargs)

    @staticmethod
    def _linear(input, weight, bias=None):
        if not isinstance(weight, ReadOnlyWeight) or weight._transposed:
            return F.linear(*(plain(tensor) for tensor in (input, weight, bias)))
        input = permuted(plain(input), weight._input_permutation)
        return torch.ops.torch_qgemv.linear(input, weight._packed, weight._quant_type, plain(bias))

    @staticmethod
    def _embedding(input, weight, padding_idx=None, max_norm=None, *args, **kwargs):
        if max_norm is not None:  # torch would rescale rows of the weight in place
            ReadOnlyWeight._refuse_write(F.embedding)
        if weight._transposed or weight._input_permutation is not None:
            return F.embedding(input, plain(weight))
        return torch.ops.torch_qgemv.embedding(input, weight._packed, weight._quant_type, weight.dtype)

    @staticmethod
    def _refuse_write(func):
        raise TypeError(f"{func.__name__} would write to a packed weight, which is read-only; use to_linear() first")


class PackedWeight(ReadOnlyWeight):
    """The matrix [N, K] of a packed module as a tensor that has no data of its own.

    Its shape, dtype and device cost nothing. Products with its transpose run the packed operator, as F.linear does;
    anything else works on a dequantized copy.
    """

    @staticmethod
    def __new__(
        cls,
        packed: torch.Tensor,
        quant_type: gguf.GGMLQuantizationType,
        shape: tuple[int, int],
        dtype: torch.dtype,
        transposed: bool = False,
        input_permutation: torch.Tensor | None = None,
    ):
        strides = (1, shape[0]) if transposed else (shape[1], 1)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=packed.device)
        self._packed, self._quant_type, self._transposed = packed, quant_type, transposed
        self._input_permutation = input_permutation
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
    def __torch_dispatch__(cls, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.t.default:
            weight = args[0]
            shape, permutation = weight.shape[::-1], weight._input_permutation
            return cls(weight._packed, weight._quant_type, shape, weight.dtype, not weight._transposed, permutation)
        # What torch makes of F.linear inside functions of its own, such as F.multi_head_attention_forward.
        if func is aten.linear.default:
            return cls._linear(*args, **kwargs)
        if func in (aten.mm.default, aten.addmm.default) and isinstance(args[-1], cls) and not kwargs:
            *bias, x, weight = args
            if weight._transposed and all(b.shape == weight.shape[1:] for b in bias):
                return cls._linear(x, weight.t(), *bias)
        positional = zip(func._schema.arguments, args, strict=False)
        named = ((argument, kwargs.get(argument.name)) for argument in func._schema.arguments)
        for argument, value in (*positional, *named):
            if argument.is_write and any(isinstance(leaf, cls) for leaf in tree_leaves(value)):
                cls._refuse_write(func)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


class TracedWeight(ReadOnlyWeight):
    """PackedWeight's twin for Dynamo, which can't trace a tensor without data. It is the dequantized matrix; of that
    the graph keeps only what is used as a matrix."""


def plain(value: Any) -> Any:
    """`value` itself, or, if it is a stand-in, the dequantized matrix."""
    if not isinstance(value, ReadOnlyWeight):
        return value
    matrix = _dequantize(value._packed, value._quant_type, value.dtype, value._input_permutation)
    return matrix.t() if value._transposed else matrix


def permuted(x: torch.Tensor, input_permutation: torch.Tensor | None) -> torch.Tensor:
    """x[..., input_permutation], the order of packed columns that are in another one than x; None is the same order."""
    if input_permutation is None:
        return x
    if x.shape[-1:] != input_permutation.shape:  # of a longer x values would be left out silently
        raise ValueError(f"x must be [..., K] with K = {input_permutation.shape[0]}, got {list(x.shape)}")
    return x.index_select(-1, input_permutation)


def natural_columns(matrix: torch.Tensor, input_permutation: torch.Tensor | None) -> torch.Tensor:
    """The matrix with its columns in the order of x, of one whose columns belong to x[..., input_permutation]."""
    return matrix if input_permutation is None else matrix.index_select(1, input_permutation.argsort())


def _dequantize(
    packed: torch.Tensor,
    quant_type: gguf.GGMLQuantizationType,
    dtype: torch.dtype,
    input_permutation: torch.Tensor | None,
) -> torch.Tensor:
    """In float64 too, which the operators don't have and which adds nothing to float32 here."""
    is_double = dtype == torch.float64
    matrix = dequantize(packed, quant_type, torch.float32 if is_double else dtype)
    return natural_columns(matrix.double() if is_double else matrix, input_permutation)


def stand_in(
    packed: torch.Tensor,
    quant_type: gguf.GGMLQuantizationType,
    shape: tuple[int, int],
    dtype: torch.dtype,
    input_permutation: torch.Tensor | None = None,
) -> ReadOnlyWeight:
    """The read-only matrix of those bytes: a PackedWeight, and, while Dynamo traces, a TracedWeight."""
    if not torch.compiler.is_dynamo_compiling():
        return PackedWeight(packed, quant_type, shape, dtype, False, input_permutation)
    weight = _dequantize(packed, quant_type, dtype, input_permutation).as_subclass(TracedWeight)
    weight._packed, weight._quant_type, weight._transposed = packed, quant_type, False
    weight._input_permutation = input_permutation
    return weight
