"""A GGUF file as a state dict, for code that renames, splits and joins weights before it loads them.

That comfy.gguf.orig_shape.* holds a tensor's shape, where llama.cpp's limits made its writer choose another one, is
ComfyUI-GGUF's convention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import gguf
import torch
from torch.utils._pytree import tree_map

from .gguf import GGUFFile, GGUFTensor
from .loading import _numbers
from .ops import quant_types
from .weight import PackedWeight, plain

aten = torch.ops.aten
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_DIM = {aten.cat.default: 1, aten.slice.Tensor: 1, aten.split.Tensor: 2, aten.split_with_sizes.default: 2}


class PackedRows(PackedWeight):
    """The matrix [N, K] of packed bytes in a state dict: a PackedWeight whose rows stay packed when they are cut out or
    joined with others of the same type. Anything else works on a dequantized copy."""

    @classmethod
    def __torch_dispatch__(cls, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _DIM:
            position = _DIM[func]
            dim = args[position] if len(args) > position else kwargs.get("dim", 0)
            parts = list(args[0]) if func is aten.cat.default else [args[0]]
            if dim in (0, -2) and cls._alike(parts):
                first, packed = parts[0], [part._packed for part in parts]
                rows = func(packed if func is aten.cat.default else packed[0], *args[1:], **kwargs)
                return tree_map(first._with_rows, rows)
        return super().__torch_dispatch__(func, types_, args, kwargs)

    @staticmethod
    def _alike(parts: list[torch.Tensor]) -> bool:
        whole = [part for part in parts if isinstance(part, PackedRows) and not part._transposed]
        return len(whole) == len(parts) and len({(part._quant_type, part.shape[1]) for part in whole}) == 1

    def _with_rows(self, packed: torch.Tensor) -> PackedRows:
        return PackedRows(packed, self._quant_type, (len(packed), self.shape[1]), self.dtype)


def state_dict(file: GGUFFile, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file by name, in the shapes that their writer gave them.

    Matrices of a packed type are PackedRows that say they are of `dtype`; other tensors are numbers, dequantized to
    float32 where they are packed: those that are no matrix, and matrices whose rows hold no whole blocks, since their
    writer has packed them in another shape. Raises NotImplementedError for a type that isn't in quant_types(), and
    ValueError for a comfy.gguf.orig_shape that doesn't fit its tensor.
    """
    return {name: _value(file, tensor, dtype) for name, tensor in file.items()}


def _value(file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    shape = original_shape(file, tensor)
    if not tensor.is_packed:
        return tensor.data.reshape(shape)  # raises GGUFError for an unknown type
    if tensor.quant_type.name not in quant_types():
        raise NotImplementedError(
            f"{file.path}: tensor {tensor.name!r}: type {tensor.quant_type.name} is none of {', '.join(quant_types())}"
        )
    block_size, type_size = gguf.GGML_QUANT_SIZES[tensor.quant_type]
    if len(shape) == 2 and shape[1] % block_size == 0:
        packed = tensor.data.reshape(shape[0], shape[1] // block_size * type_size)
        return PackedRows(packed, tensor.quant_type, shape, dtype)
    return _numbers(tensor).reshape(shape)


def original_shape(file: GGUFFile, tensor: GGUFTensor) -> tuple[int, ...]:
    """The shape that the writer of a file gave a tensor: that of the file, or what comfy.gguf.orig_shape says."""
    shape = file.metadata.get(ORIGINAL_SHAPE + tensor.name)
    if shape is None:
        return tensor.shape
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) != math.prod(tensor.shape):
        raise ValueError(
            f"{file.path}: metadata key {ORIGINAL_SHAPE + tensor.name!r}: {shape!r} is no shape of the "
            f"{math.prod(tensor.shape)} weights of that tensor, {list(tensor.shape)} in the file"
        )
    return tuple(shape)


def as_tensors(state: Mapping[str, torch.Tensor], file: GGUFFile) -> dict[str, GGUFTensor]:
    """A state dict of `file`, after the names and rows were changed, as load_tensors takes it."""
    return {name: _as_tensor(name, value, file) for name, value in state.items()}


def _as_tensor(name: str, value: torch.Tensor, file: GGUFFile) -> GGUFTensor:
    if isinstance(value, PackedRows) and not value._transposed:
        return GGUFTensor.of(name, value._packed, tuple(value.shape), value._quant_type, file.path)
    return GGUFTensor.of(name, plain(value), tuple(value.shape), None, file.path)
