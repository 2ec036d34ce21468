"""nn.Modules that hold packed GGUF weights."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import gguf
import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_dynamo_compiling

from .ops import QuantType, dequantize, quantize, resolve_quant_type
from .pretrained import guard_save_pretrained
from .weight import stand_in


@functools.cache
def _class_for(base: type[PackedModule], quant_type: gguf.GGMLQuantizationType) -> type[PackedModule]:
    """The subclass of a packed module's class for one type, which differs in the code object of its forward alone.

    torch.compile counts recompilations by code object. With one for all types, a model compiled layer by layer would
    reach the limit through its mixture of types; nn.Linear, where only the shapes differ, would not.
    """
    forward = base.forward
    code = forward.__code__.replace(co_name=f"forward_{quant_type.name}")
    function = types.FunctionType(code, forward.__globals__, "forward", forward.__defaults__, forward.__closure__)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), names | {"forward": functools.update_wrapper(function, forward), "_base": base})


_Packed = TypeVar("_Packed", bound="PackedModule")


class PackedModule(nn.Module):
    """What QuantLinear and QuantEmbedding share: the packed bytes, and what the matrix looks like from outside."""

    _base: type[PackedModule]  # the class without a type
    _plain_shape = ("N", "row_bytes")

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls._base = cls.__dict__.get("_base", cls)

    def __init__(self, packed: torch.Tensor, quant_type: QuantType, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.quant_type = resolve_quant_type(quant_type)
        self._type_id = int(self.quant_type)  # the operators take it 1 us faster than the enum
        _, type_size = gguf.GGML_QUANT_SIZES[self.quant_type]
        dims = len(self._plain_shape)
        if packed.dtype != torch.uint8 or packed.dim() != dims or packed.shape[-1] % type_size:
            raise ValueError(
                f"packed must be uint8 [{', '.join(self._plain_shape)}] with whole {self.quant_type.name} blocks of "
                f"{type_size} bytes, got {packed.dtype} {list(packed.shape)}"
            )
        # Carries the compute dtype: .to(dtype) and .half() change it and leave the packed bytes alone. The first of the
        # buffers, for code that takes the dtype of the first one for that of the model.
        self.register_buffer("_dtype", torch.empty(0, dtype=dtype, device=packed.device), persistent=False)
        self._keep_dtype_off_meta()
        self.register_buffer("packed", packed)
        # For saving and loading alone: the operators take the Python integer.
        type_id = torch.tensor(int(self.quant_type), dtype=torch.int32, device=packed.device)
        self.register_buffer("quant_type_id", type_id)
        self._checked_type_id = type_id
        self._become(self._base)

    @property
    def stored(self) -> torch.Tensor:
        """The buffer as the operators take it: `packed`, or, on the CPU after torch_qgemv.prepare, interleaved.

        Interleaved, it has the same bytes in another order, and the shape [K / block_size, N, bytes of a block].
        """
        return self._buffers["packed"]

    @property
    def packed(self) -> torch.Tensor:
        """The plain GGUF bytes, uint8 [N, row_bytes]; a copy, if `stored` is interleaved."""
        if "packed" not in self._buffers:  # while the module is being made
            raise AttributeError("packed")
        stored = self.stored
        return self._by_matrix(torch.ops.torch_qgemv.deinterleave, stored) if self._is_interleaved else stored

    @property
    def _is_interleaved(self) -> bool:
        stored = self.stored
        return stored is not None and stored.dim() > len(self._plain_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which .to(dtype), .half() and .bfloat16() change."""
        return self._dtype.dtype

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(N, K), as the packed bytes have it."""
        block_size, type_size = gguf.GGML_QUANT_SIZES[self.quant_type]
        shape = self.stored.shape
        if self._is_interleaved:
            return shape[-2], shape[-3] * block_size
        return shape[-2], shape[-1] // type_size * block_size

    @property
    def weight(self) -> torch.Tensor:
        """A read-only stand-in for the matrix [N, K], see PackedWeight."""
        return stand_in(self.stored, self.quant_type, self.matrix_shape, self.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise TypeError("the weight of a packed module can't be set; use to_linear() first, or set .packed")
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name.startswith("weight"):  # "weight_orig" is what pruning registers
            raise TypeError("a packed module can't have a weight of another kind; use to_linear() first")
        super().register_parameter(name, param)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Copies and pickles name the class without a type, which can be imported."""
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return object.__new__, (self._base,), *state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._become(self._base)
        stored = self.stored
        if self._is_interleaved and stored.device.type not in ("cpu", "meta"):  # torch.load has moved it
            plain = self._by_matrix(torch.ops.torch_qgemv.deinterleave, stored.cpu())
            self._buffers["packed"] = plain.to(stored.device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if self._is_interleaved and fn(torch.empty(0, dtype=torch.uint8)).device.type != "cpu":
            self._buffers["packed"] = self.packed
        before = self.quant_type_id
        super()._apply(fn, recurse)
        self._keep_dtype_off_meta()
        if self.quant_type_id is not before:  # to_empty() leaves it without a value
            type_id = torch.full_like(self.quant_type_id, self.quant_type, dtype=torch.int32)
            self._buffers["quant_type_id"] = self._checked_type_id = type_id
        return self

    def _keep_dtype_off_meta(self) -> None:
        """No state dict brings it back from there, as it brings the other buffers."""
        if self._dtype.is_meta:
            self._buffers["_dtype"] = torch.empty(0, dtype=self.dtype, device="cpu")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._is_interleaved:
            destination[f"{prefix}packed"] = self.packed

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, error_msgs = args
        if problem := self._obstacle_to_loading(state_dict, prefix):
            error_msgs.append(problem)
            return
        stored = self.stored
        if not self._is_interleaved:
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:
            plain = self._buffers["packed"] = self.packed
            super()._load_from_state_dict(state_dict, prefix, *args)
            loaded = self._interleaved()
            # In place, as torch loads: tied modules go on sharing the bytes. With assign=True they are new ones.
            self._buffers["packed"] = stored.copy_(loaded) if self.stored is plain else loaded
        self._checked_type_id = self.quant_type_id

    def _obstacle_to_loading(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """Why this module can't hold the packed bytes of a state dict: another type, or no bytes."""
        type_id, packed = (state_dict.get(f"{prefix}{name}") for name in ("quant_type_id", "packed"))
        is_known = isinstance(type_id, torch.Tensor) and type_id.numel() == 1 and not type_id.is_meta
        if is_known and int(type_id) != self.quant_type:
            return f"{prefix}packed is {_type_name(type_id)} in the state dict, but {self.quant_type.name} here"
        if isinstance(packed, torch.Tensor) and packed.dtype != torch.uint8:
            return f"{prefix}packed must be packed bytes (torch.uint8), but is {packed.dtype} in the state dict"
        is_permuted = f"{prefix}input_permutation" in state_dict
        if packed is not None and is_permuted != ("input_permutation" in self._buffers):
            owner, other = ("the state dict", "the module") if is_permuted else ("the module", "the state dict")
            return f"{prefix}packed has an input_permutation in {owner}, but none in {other}"
        return None

    def _checked(self) -> torch.Tensor:
        """`stored`, for an operator. Raises if foreign code has cast it, or has loaded a weight of another type."""
        buffers = self._buffers
        stored = buffers["packed"]
        if stored.dtype is not torch.uint8:
            raise TypeError(
                f"{type(self).__name__}: packed must hold packed bytes (torch.uint8), but is {stored.dtype} "
                f"{list(stored.shape)}: something has cast the buffer, so load it again"
            )
        if not is_dynamo_compiling() and buffers["quant_type_id"] is not self._checked_type_id:
            self._check_type_id()
        return stored

    def _check_type_id(self) -> None:
        """For code that sets the buffers by their names, as accelerate does."""
        type_id = self.quant_type_id
        if type(type_id) is not torch.Tensor or type_id.is_meta or is_functorch_wrapped_tensor(type_id):
            return  # it has no value that can be read
        if int(type_id) != self.quant_type:
            raise ValueError(
                f"{type(self).__name__}: packed was made a {_type_name(type_id)} weight (quant_type_id), but "
                f"this module is for {self.quant_type.name}"
            )
        self._checked_type_id = type_id

    def _become(self, base: type[PackedModule]) -> None:
        self.__class__ = _class_for(base, self.quant_type)
        guard_save_pretrained(PackedModule)

    def _interleaved(self) -> torch.Tensor:
        """`stored`, interleaved where that is possible and of use: on the CPU, 16 rows of two blocks, or more."""
        stored = self.stored
        _, type_size = gguf.GGML_QUANT_SIZES[self.quant_type]
        rows, row_bytes = stored.shape[-2:]
        if self._is_interleaved or stored.device.type != "cpu" or rows < 16 or row_bytes < 2 * type_size:
            return stored
        return self._by_matrix(torch.ops.torch_qgemv.interleave, stored)

    def _by_matrix(self, op: Callable[..., torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        """`op`, which takes one matrix, on the only one or on each of the experts'."""
        if len(self._plain_shape) == 2:
            return op(weight, self.quant_type)
        return torch.stack([op(matrix, self.quant_type) for matrix in weight])

    @classmethod
    def from_packed(cls: type[_Packed], packed: torch.Tensor, quant_type: QuantType) -> _Packed:
        """Holds `packed`, uint8 bytes in the shape that the class describes, without copying it."""
        layer = cls.__new__(cls)
        PackedModule.__init__(layer, packed, quant_type, None)
        return layer

    def _matrix(self) -> torch.Tensor:
        return dequantize(self.stored, self.quant_type, torch.float32)

    def _dequantized(self, dtype: torch.dtype | None) -> nn.Parameter:
        return nn.Parameter(self._matrix().to(dtype or self.dtype))


def _type_name(type_id: torch.Tensor) -> str:
    try:
        return gguf.GGMLQuantizationType(int(type_id)).name
    except ValueError:
        return f"of GGUF type id {int(type_id)}"


def prepare(model: nn.Module) -> nn.Module:
    """Rearranges the packed bytes of `model` for speed on the CPU, in place, and returns the model.

    In every QuantLinear and QuantEmbedding on the CPU, sixteen rows at a time are interleaved: products take about
    0.7 times as long. The results are the same, `packed` and state_dict() still give the plain bytes, and a module
    that moves to another device gets them back. It takes about as long as copying the weights; bytes that were mapped
    from a file are then in memory.
    """
    prepared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tied modules go on sharing their bytes
    for module in model.modules():
        if isinstance(module, PackedModule):
            plain = module.stored
            if id(plain) not in prepared:
                prepared[id(plain)] = plain, module._interleaved()
            module._buffers["packed"] = prepared[id(plain)][1]
    return model


def empty_packed(rows: int, columns: int, quant_type: QuantType, device: Any) -> torch.Tensor:
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
        super().__init__(empty_packed(out_features, in_features, quant_type, device), quant_type, dtype)
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
        return torch.ops.torch_qgemv.linear(x, self._checked(), self._type_id, self.bias)

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
        super().__init__(empty_packed(num_embeddings, embedding_dim, quant_type, device), quant_type, dtype)

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
        return torch.ops.torch_qgemv.embedding(indices, self._checked(), self._type_id, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, quant_type={self.quant_type.name}"
