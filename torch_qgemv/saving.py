"""load_state_dict: a plain model becomes the packed one that a state dict was saved from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import torch
from torch import nn

from .loading import PACKERS, LoadResult, _owner, _packer, _replace, _Slot, _slots
from .ops import resolve_quant_type
from .permuted import pack_permuted, permutation_problem

_TYPE_ID = "quant_type_id"
_PERMUTATION = "input_permutation"
_PERMUTED_PACKERS = PACKERS | {nn.Linear: pack_permuted}


def load_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:
    """Loads the state dict of a model with packed layers into the plain model of the same structure, in place.

    Every nn.Linear or nn.Embedding of `model` whose weight is packed in the state dict becomes a QuantLinear or
    QuantEmbedding that holds its bytes, without copying them on the same device; its compute dtype is that of the
    weight it had. Layers that are packed already take bytes of their own type. All else is loaded as by
    nn.Module.load_state_dict; if anything of the model is on the meta device, with assign=True. Tied layers stay tied;
    the state dict may have any of their names, as safetensors.torch.save_model leaves it.

    strict: raise if names are missing or unexpected. With strict=False the result lists both.

    Raises ValueError, before anything in the model is changed: the strict lists, shapes that differ, packed weights for
    other modules, unknown types.
    """
    slots = _slots(model)
    state = dict(state_dict)
    for slot in slots.values():
        for leaf in ("weight", "packed", _TYPE_ID):
            _complete(state, [name.removesuffix("weight") + leaf for name in slot.names if name.endswith("weight")])
        _complete(state, slot.names)
    plan, problems = _plan(model, state, slots)
    replaced = {name for slot in plan for name in slot.names}
    leaves = ("packed", _TYPE_ID, _PERMUTATION)
    packed = {name.removesuffix("weight") + leaf for name in replaced for leaf in leaves}
    missing = sorted(slots.keys() - replaced - state.keys())
    unexpected = sorted(name for name in state.keys() - (slots.keys() - replaced) - packed if not _is_extra(name))
    for name in sorted((slots.keys() - replaced) & state.keys()):
        there, here = tuple(state[name].shape), tuple(slots[name].value.shape)
        if there != here:
            problems.append(f"{name}: shape {there} in the state dict, {here} in the model")
    if strict and missing:
        problems.append(f"missing from the state dict: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"without a place in the model: {', '.join(unexpected)}")
    if problems:
        raise ValueError(f"load_state_dict changed nothing of {type(model).__name__}:\n  " + "\n  ".join(problems))

    assign = any(slot.value.is_meta for slot in slots.values())
    for slot, (packed, quant_type) in plan.items():
        is_permuted = slot.names[0].removesuffix("weight") + _PERMUTATION in state
        _replace(model, slot, packed, quant_type, _PERMUTED_PACKERS if is_permuted else PACKERS)
    model.load_state_dict(state, strict=False, assign=assign)
    return LoadResult(missing, unexpected)


def _plan(
    model: nn.Module, state_dict: Mapping[str, Any], slots: Mapping[str, _Slot]
) -> tuple[dict[_Slot, tuple[torch.Tensor, gguf.GGMLQuantizationType]], list[str]]:
    """The packed weights for modules that aren't packed yet, and why some can't be taken."""
    plan, problems = {}, []
    for name in state_dict:
        prefix = name.removesuffix(_TYPE_ID)
        slot = slots.get(f"{prefix}weight")
        if prefix == name or f"{prefix}packed" not in state_dict or slot is None:
            continue
        try:
            plan[slot] = _weight(model, slot, state_dict[f"{prefix}packed"], int(state_dict[name]))
            permutation = state_dict.get(f"{prefix}{_PERMUTATION}")
            if permutation is not None and (problem := permutation_problem(permutation, slot.value.shape[-1])):
                raise ValueError(f"its {_PERMUTATION} {problem}")
        except ValueError as error:
            problems.append(f"{prefix}packed: {error}")
    return plan, problems


def _weight(
    model: nn.Module, slot: _Slot, packed: torch.Tensor, type_id: int
) -> tuple[torch.Tensor, gguf.GGMLQuantizationType]:
    quant_type = resolve_quant_type(type_id)
    for module, leaf in (_owner(model, name) for name in slot.names):
        if module is model or leaf != "weight" or _packer(module, PACKERS) is None:
            raise ValueError(
                f"a packed weight can't take the place of {leaf} of {type(module).__name__}, only of the weight of "
                "nn.Linear and nn.Embedding modules below the model"
            )
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    *rows, columns = slot.value.shape
    shape = (*rows, columns // block_size * type_size)
    if packed.dtype != torch.uint8 or tuple(packed.shape) != shape or columns % block_size:
        raise ValueError(
            f"{packed.dtype} {list(packed.shape)} in the state dict is no {quant_type.name} weight of "
            f"[{'E, N, K'[-3 * len(shape) + 2 :]}] = {[*rows, columns]}, which the model has"
        )
    return packed, quant_type


def _complete(state: dict[str, Any], names: list[str]) -> None:
    """Gives all the names of a tied tensor the value of the one that the state dict has."""
    value = next((state[name] for name in names if name in state), None)
    if value is not None:
        for name in names:
            state.setdefault(name, value)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"
