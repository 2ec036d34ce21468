"""quantize_model: which matrices of a model are packed and as which type, with a report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import gguf
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from .loading import tie
from .modules import PackedModule, QuantEmbedding, QuantLinear
from .ops import QuantType, quantize, resolve_quant_type

Predicate = Callable[[str, nn.Module], bool]
TypeMap = Mapping[str, QuantType | None]

# The second is the out_proj of nn.MultiheadAttention, an nn.Linear by another name. Other subclasses may compute
# something else.
_LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)

# llama.cpp's choice where rows don't fill blocks of 256 weights: a type with blocks of 32 that is no less exact.
_FALLBACKS = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


@dataclass
class QuantizationReport:
    """What quantize_model did with each matrix; print() shows it as a table.

    replaced: name of a module -> name of its GGUF type. kept: name of a module, or of a parameter that is not the
    `weight` of one -> why.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(map(len, self.replaced | self.kept), default=0)
        lines = [f"{name:{width}}  {quant_type}" for name, quant_type in self.replaced.items()]
        lines += [f"{name:{width}}  kept: {reason}" for name, reason in self.kept.items()]
        return "\n".join([*lines, f"{len(self.replaced)} replaced, {len(self.kept)} kept"])


def quantize_model(
    model: nn.Module,
    quant_type: QuantType | TypeMap,
    predicate: Predicate | None = None,
    *,
    fallback: bool = False,
    report: Callable[[QuantizationReport], object] | None = None,
) -> nn.Module:
    """Replaces every nn.Linear of `model` by a QuantLinear, in place, and returns the model.

    quant_type: one type, or a mapping such as {"*.down": "Q6_K", "head": None, "*": "Q4_K"}: the first pattern
    (fnmatch) that matches a layer's name counts; None keeps the layer. predicate(name, module): which layers to
    replace, by default all. fallback: where in_features don't fill whole blocks, takes the type that llama.cpp takes
    (Q5_0 for Q4_K, ...), and keeps, with a warning, what that doesn't fit either. report: called at the end with the
    QuantizationReport, e.g. print.

    Modules that share a weight go on sharing it, packed: linear layers, and an nn.Embedding tied to one. Subclasses of
    nn.Linear, which may compute something else, and all other modules are left alone. Raises, before anything is
    replaced: ValueError for a pattern that matches no layer and for layers whose in_features don't fill whole blocks,
    that are parametrized, pruned or on the meta device, or that have hooks; and what torch_qgemv.quantize raises.
    """
    plan, result = _plan(model, quant_type, predicate, fallback)
    replacements: dict[nn.Module, PackedModule] = {}  # one for each module, also if the model names it twice
    for group, chosen in plan:
        packed = quantize(group[0].module.weight, chosen)
        first, *others = dict.fromkeys(owner.module for owner in group)
        source = replacements[first] = _packed_module(first, packed, chosen)
        for module in others:
            replacements[module] = _packed_module(module, packed, chosen)
            tie(replacements[module], source)
    for owner in (owner for group, _ in plan for owner in group):
        if owner.name == "":
            model = replacements[owner.module]
        else:
            model.set_submodule(owner.name, replacements[owner.module])
    if report is not None:
        report(result)
    return model


def _packed_module(module: nn.Module, packed: torch.Tensor, quant_type: QuantType) -> PackedModule:
    if isinstance(module, nn.Embedding):
        replacement = QuantEmbedding.from_packed(packed, quant_type)
    else:
        replacement = QuantLinear.from_packed(packed, quant_type, module.bias)
    return replacement.to(module.weight.dtype).train(module.training)


class _Owner(NamedTuple):
    """One of the modules, under one of its names, that a matrix belongs to. `name` leaves out a final ".weight"."""

    name: str
    module: nn.Module
    parameter: str

    @property
    def is_linear(self) -> bool:
        kind = type(self.module).__base__ if is_parametrized(self.module) else type(self.module)
        return kind in _LINEARS and self.parameter == "weight"

    @property
    def is_embedding(self) -> bool:
        """Whether it is an nn.Embedding that QuantEmbedding can stand for."""
        return type(self.module) is nn.Embedding and self.module.max_norm is None


_Group = list[_Owner]  # all owners of one matrix


def _groups(model: nn.Module) -> list[_Group]:
    """The owners of every matrix among the model's parameters, also those of a weight that is computed from others."""
    groups: dict[object, _Group] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() >= 2:
                full_name = prefix if name == "weight" else f"{prefix}.{name}".removeprefix(".")
                groups.setdefault(parameter, []).append(_Owner(full_name, module, name))
        if isinstance(module, nn.Linear) and "weight" not in module._parameters:
            groups.setdefault(module, []).append(_Owner(prefix, module, "weight"))
    return list(groups.values())


def _plan(
    model: nn.Module, quant_type: QuantType | TypeMap, predicate: Predicate | None, fallback: bool
) -> tuple[list[tuple[_Group, gguf.GGMLQuantizationType]], QuantizationReport]:
    """The groups of modules to replace with their types, and the report on all matrices. Changes nothing."""
    plan, result, problems = [], QuantizationReport(), []
    groups = _groups(model)
    types = _types_by_name([owner.name for group in groups for owner in group if owner.is_linear], quant_type)
    for group in groups:
        names = [owner.name for owner in group]
        reasons = _reasons_to_keep(group, types, predicate)
        if not reasons and (obstacle := _obstacle(group, types)):
            problems.append(f"{' and '.join(names)}: {obstacle}")
        elif not reasons:
            wanted = next(types[owner.name] for owner in group if owner.is_linear)
            columns = group[0].module.weight.shape[1]
            chosen = fitting_type(wanted, columns, fallback)
            if chosen is not None:
                plan.append((group, chosen))
                result.replaced |= dict.fromkeys(names, chosen.name)
                continue
            misfit = f"no multiple of the {_block_size(wanted)} weights of a {wanted.name} block"
            if fallback:
                reasons = dict.fromkeys(names, f"in_features={columns} is {misfit}, and no fallback fits")
                warnings.warn(f"quantize_model keeps {' and '.join(names)} (in_features={columns})", stacklevel=3)
            else:
                problems.append(f"{' and '.join(names)} (in_features={columns}): {misfit}")
        result.kept |= reasons
    if problems:
        raise ValueError(
            "quantize_model replaced nothing, for it can't replace these layers (a predicate can leave them out):\n  "
            + "\n  ".join(problems)
        )
    return plan, result


def _types_by_name(names: list[str], quant_type: QuantType | TypeMap) -> dict[str, gguf.GGMLQuantizationType | None]:
    """The type that each linear layer is to have; None: it stays. Raises ValueError for a pattern that matches none."""
    if not isinstance(quant_type, Mapping):
        return dict.fromkeys(names, resolve_quant_type(quant_type))
    resolved = {pattern: None if t is None else resolve_quant_type(t) for pattern, t in quant_type.items()}
    for pattern in resolved:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"quant_type: the pattern {pattern!r} matches no linear layer of the model")
    return {name: next((t for p, t in resolved.items() if fnmatchcase(name, p)), None) for name in names}


def _reasons_to_keep(
    group: _Group, types: Mapping[str, gguf.GGMLQuantizationType | None], predicate: Predicate | None
) -> dict[str, str]:
    """Why each owner of a matrix keeps it; empty, if it is to be packed."""
    has_linear = any(owner.is_linear for owner in group)
    reasons = {}
    for owner in group:
        kind = type(owner.module).__name__
        if owner.is_linear:
            if predicate is not None and not predicate(owner.name, owner.module):
                reasons[owner.name] = "left out by the predicate"
            elif types[owner.name] is None:
                reasons[owner.name] = "left out by the type map"
        elif isinstance(owner.module, nn.Linear) and owner.parameter == "weight":
            reasons[owner.name] = f"{kind}, a subclass of nn.Linear, may compute something else"
        elif not (owner.is_embedding and has_linear):
            reasons[owner.name] = f"belongs to {kind}; only nn.Linear is replaced"
    if reasons:
        tied = f"shares its weight with {next(iter(reasons))}"
        return {owner.name: reasons.get(owner.name, tied) for owner in group}
    return {}


def _obstacle(group: _Group, types: Mapping[str, gguf.GGMLQuantizationType | None]) -> str | None:
    """Why the owners of a matrix can't be packed, whatever the type."""
    for module in (owner.module for owner in group):
        if is_parametrized(module) or "weight" not in module._parameters:
            return "it has a parametrization, pruning or weight norm; make that permanent first"
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks) or "forward" in module.__dict__:
            return "it has hooks or a forward of its own, which a replacement would lose; remove them first"
    if group[0].module.weight.is_meta:
        return "it is on the meta device, where there is nothing to encode"
    if len({types[owner.name] for owner in group if owner.is_linear}) > 1:
        return "they share a weight, but the type map has different types for them"
    return None


def _block_size(quant_type: gguf.GGMLQuantizationType) -> int:
    return gguf.GGML_QUANT_SIZES[quant_type][0]


def fitting_type(
    quant_type: gguf.GGMLQuantizationType, columns: int, fallback: bool
) -> gguf.GGMLQuantizationType | None:
    """The type whose blocks rows of that length fill: the one wanted, or llama.cpp's replacement."""
    choices = [quant_type]
    if fallback and quant_type.name in _FALLBACKS:
        choices.append(resolve_quant_type(_FALLBACKS[quant_type.name]))
    return next((t for t in choices if columns % _block_size(t) == 0), None)
