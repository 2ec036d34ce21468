"""Loads the tensors of a GGUF file into the parameters and buffers of any torch.nn.Module, packed where it can be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gguf
import torch
from torch import nn
from tqdm.auto import tqdm

from .experts import ExpertLinear, QuantExpertLinear
from .gguf import GGUFFile, GGUFTensor
from .modules import PackedModule, QuantEmbedding, QuantLinear
from .ops import dequantize, quant_types

Packer = Callable[[nn.Module, torch.Tensor, gguf.GGMLQuantizationType], nn.Module]
NameMap = Mapping[str, str | None] | Callable[[str], str | None]


class LoadResult(NamedTuple):
    """missing: parameters and buffers without a tensor in the file; unexpected: tensors without a place in the model.

    Names of tied parameters appear once. Each unexpected tensor has its GGUF name, and the mapped one if it differs.
    """

    missing: list[str]
    unexpected: list[str]


def load_gguf(
    model: nn.Module,
    path: str | os.PathLike[str],
    name_map: NameMap | None = None,
    strict: bool = True,
    progress: bool | None = None,
) -> LoadResult:
    """Loads the GGUF file at `path` into `model`, in place.

    An nn.Linear or nn.Embedding whose weight is packed in the file is replaced by a QuantLinear or QuantEmbedding that
    holds the file's bytes, an experts.ExpertLinear by a QuantExpertLinear. Packed tensors that belong anywhere else
    (norms, biases, convolutions, subclasses with a forward of their own) are dequantized; F32, F16 and BF16 tensors are
    copied. Each takes the dtype and the device of the parameter it fills. A parameter on the meta device becomes a CPU
    one that may share the file's private map. Parameters that were tied stay tied, and tied packed weights share one
    buffer.

    name_map: GGUF name -> name in the model, a mapping or a function. Without one, and for names that a mapping lacks,
        the names are the same. None as a name leaves that tensor out on purpose.
    strict: raise if a tensor of the file has no place in the model, or a parameter or persistent buffer of the model
        gets no value. With strict=False the result lists both.
    progress: show a progress bar; None shows it on a terminal only.

    Raises ValueError, before anything in the model is changed: the strict lists, shapes that differ, two tensors for
    one parameter, integers for a float parameter or the reverse. NotImplementedError likewise for a packed type that
    isn't in torch_qgemv.quant_types(). GGUFError for a bad file.
    """
    return load_tensors(model, GGUFFile(path), name_map, strict, progress)


def load_tensors(
    model: nn.Module,
    tensors: Mapping[str, GGUFTensor],
    name_map: NameMap | None = None,
    strict: bool = True,
    progress: bool | None = None,
    transform: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    packers: Mapping[type[nn.Module], Packer] | None = None,
) -> LoadResult:
    """load_gguf for tensors that are open already.

    transform(name, values): applied to each tensor under its GGUF name, to undo what a converter did. `values` are the
        packed rows, uint8 [N, row_bytes], where the tensor stays packed, else the numbers. It keeps the shape, and
        packed rows packed.
    packers: module class -> function that makes the packed module in its place, beside those for nn.Linear and
        nn.Embedding.
    """
    slots = _slots(model)
    plan, unexpected = _match(tensors, name_map, slots)
    missing = [name for name, slot in slots.items() if slot not in plan and name == slot.names[0]]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{type(model).__name__} and the file don't match (strict=False loads the rest).\n"
            f"{len(missing)} parameters or buffers missing from the file: {', '.join(missing) or 'none'}\n"
            f"{len(unexpected)} tensors of the file without a place in the model: {', '.join(unexpected) or 'none'}"
        )
    for slot, tensor in plan.items():
        _check(slot, tensor)

    packers = PACKERS | dict(packers or {})
    packed = {slot: tensor for slot, tensor in plan.items() if _can_pack(model, slot, tensor, packers)}
    dense = {slot: tensor for slot, tensor in plan.items() if slot not in packed}
    transform = transform or (lambda name, values: values)
    size = sum(tensor.data.nbytes for tensor in plan.values())
    disable = None if progress is None else not progress  # None: tqdm looks whether it writes to a terminal
    with tqdm(total=size, desc="Loading", unit="B", unit_scale=True, disable=disable) as bar:
        # Dense tensors first: a packed layer takes over the bias of the layer that it replaces.
        for slot, tensor in dense.items():
            _copy(model, slot, transform(tensor.name, _numbers(tensor)))
            bar.update(tensor.data.nbytes)
        for slot, tensor in packed.items():
            _replace(model, slot, transform(tensor.name, tensor.data), tensor.quant_type, packers)
            bar.update(tensor.data.nbytes)
    return LoadResult(missing, unexpected)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A parameter or persistent buffer of the model, and every name it has: tied parameters have several."""

    value: torch.Tensor
    names: list[str] = field(default_factory=list)


def _slots(model: nn.Module) -> dict[str, _Slot]:
    by_value, by_name = {}, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):  # a module's extra state may be anything
            slot = by_value.setdefault(id(value), _Slot(value))
            slot.names.append(name)
            by_name[name] = slot
    return by_name


def _match(
    tensors: Mapping[str, GGUFTensor], name_map: NameMap | None, slots: Mapping[str, _Slot]
) -> tuple[dict[_Slot, GGUFTensor], list[str]]:
    """Which tensor fills which slot, and the names of the tensors that fill none."""
    plan, unexpected = {}, []
    for name, tensor in tensors.items():
        target = _target(name, name_map)
        if target is None:
            continue
        slot = slots.get(target)
        if slot is None:
            unexpected.append(name if name == target else f"{name} (as {target})")
        elif slot in plan:
            raise ValueError(f"tensors {plan[slot].name!r} and {name!r} of the file are both for {slot.names[0]!r}")
        else:
            plan[slot] = tensor
    return plan, unexpected


def _target(name: str, name_map: NameMap | None) -> str | None:
    if name_map is None:
        return name
    return name_map.get(name, name) if isinstance(name_map, Mapping) else name_map(name)


def _check(slot: _Slot, tensor: GGUFTensor) -> None:
    what = f"tensor {tensor.name!r} for {slot.names[0]!r}"
    if tuple(slot.value.shape) != tuple(tensor.shape):
        raise ValueError(f"{what}: shape {tuple(tensor.shape)} in the file, {tuple(slot.value.shape)} in the model")
    if _is_packed(tensor) and tensor.quant_type.name not in quant_types():
        raise NotImplementedError(f"{what}: type {tensor.quant_type.name} is none of {', '.join(quant_types())}")
    is_float = _is_packed(tensor) or tensor.data.is_floating_point()
    if is_float != slot.value.is_floating_point():
        raise ValueError(f"{what}: type {tensor.quant_type.name} in the file, {slot.value.dtype} in the model")


def _is_packed(tensor: GGUFTensor) -> bool:
    return tensor.data.dtype == torch.uint8


def _can_pack(model: nn.Module, slot: _Slot, tensor: GGUFTensor, packers: Mapping[type[nn.Module], Packer]) -> bool:
    owners = [_owner(model, name) for name in slot.names]
    return _is_packed(tensor) and all(
        leaf == "weight" and module is not model and _packer(module, packers) for module, leaf in owners
    )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that a parameter belongs to, and the parameter's name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _packer(module: nn.Module, packers: Mapping[type[nn.Module], Packer]) -> Packer | None:
    """The packer for a module's class; none if the module computes more than that class does."""
    if getattr(module, "max_norm", None) is not None:  # nn.Embedding then writes to its weight
        return None
    for base in type(module).__mro__:
        if base in packers:
            return packers[base]
        if "forward" in vars(base):
            return None
    return None


def _numbers(tensor: GGUFTensor) -> torch.Tensor:
    if not _is_packed(tensor):
        return tensor.data
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    return dequantize(rows, tensor.quant_type).reshape(tensor.shape)


def _copy(model: nn.Module, slot: _Slot, values: torch.Tensor) -> None:
    old = slot.value
    if not old.is_meta:
        with torch.no_grad():
            old.copy_(values)
        return
    new = values.to(old.dtype)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for name in slot.names:
        module, leaf = _owner(model, name)
        setattr(module, leaf, new)


def _replace(
    model: nn.Module,
    slot: _Slot,
    packed: torch.Tensor,
    quant_type: gguf.GGMLQuantizationType,
    packers: Mapping[type[nn.Module], Packer],
) -> None:
    """Replaces the modules that own a weight by packed ones, which all hold the same bytes."""
    if not slot.value.is_meta:
        packed = packed.to(slot.value.device)
    replacements: dict[nn.Module, nn.Module] = {}
    for name in slot.names:
        old, _ = _owner(model, name)
        if old not in replacements:
            new = _packer(old, packers)(old, packed, quant_type).to(dtype=slot.value.dtype)
            if replacements:
                tie(new, next(iter(replacements.values())))
            replacements[old] = new.train(old.training)
    for name in slot.names:
        path = name.rpartition(".")[0]
        model.set_submodule(path, replacements[model.get_submodule(path)])


class _Tied:
    """Makes a packed module hold the bytes of another one, the source, on whatever device that is.

    torch keeps parameters shared when a model moves, but copies a shared buffer once for each module.
    """

    _source: tuple[nn.Module]  # in a tuple, so that it doesn't become a submodule

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        (source,) = self._source
        source._apply(fn, recurse)
        self._buffers["packed"] = None
        try:
            return super()._apply(fn, recurse)
        finally:
            self._buffers["packed"] = source.stored

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The source's tensor is taken, so that it is seen as shared: after torch_qgemv.prepare each is a copy."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        plain = destination[f"{prefix}packed"]
        for value in destination.values():
            is_like = isinstance(value, torch.Tensor) and value.shape == plain.shape and value.dtype == plain.dtype
            if is_like and value.device == plain.device and not plain.is_meta and torch.equal(value, plain):
                destination[f"{prefix}packed"] = value
                break


class TiedQuantLinear(_Tied, QuantLinear):
    """A QuantLinear on the bytes of another module, such as an output layer on those of the input embedding."""


class TiedQuantEmbedding(_Tied, QuantEmbedding):
    """A QuantEmbedding on the bytes of another module."""


def tie(module: PackedModule, source: PackedModule) -> None:
    """Makes a QuantLinear or a QuantEmbedding hold the bytes of another one, also when that moves."""
    module._become({QuantLinear: TiedQuantLinear, QuantEmbedding: TiedQuantEmbedding}[module._base])
    module._source = (source,)


def _pack_linear(linear: nn.Linear, packed: torch.Tensor, quant_type: gguf.GGMLQuantizationType) -> QuantLinear:
    layer = QuantLinear.from_packed(packed, quant_type)
    layer.bias = linear.bias
    return layer


def _pack_embedding(_: nn.Embedding, packed: torch.Tensor, quant_type: gguf.GGMLQuantizationType) -> QuantEmbedding:
    return QuantEmbedding.from_packed(packed, quant_type)


def _pack_experts(_: ExpertLinear, packed: torch.Tensor, quant_type: gguf.GGMLQuantizationType) -> QuantExpertLinear:
    return QuantExpertLinear.from_packed(packed, quant_type)


PACKERS: dict[type[nn.Module], Packer] = {
    nn.Linear: _pack_linear,
    nn.Embedding: _pack_embedding,
    ExpertLinear: _pack_experts,
}
