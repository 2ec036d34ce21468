"""Say what is in a GGUF file: metadata, tensors, bytes per type, and what will stay packed.

    python -m torch_qgemv inspect model.gguf
    python -m torch_qgemv inspect model.gguf --names ffn_down     only tensors with that in their names

Shapes are those that the file's writer gave the tensors (comfy.gguf.orig_shape). The last column says what becomes of a
tensor that is loaded: "packed" by QuantLinear (or QuantEmbedding, or as one matrix for each expert), "dense" with the
reason, or "refused" if its type can't be read. It is judged by type, shape and name alone; a packed matrix that a model
reads otherwise than by nn.Linear or nn.Embedding is dequantized there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf

from .checkpoint import original_shape
from .gguf import GGUFFile, GGUFTensor
from .ops import quant_types

SHOWN_CHARACTERS, SHOWN_ITEMS = 72, 8  # of a metadata value


class Fate(NamedTuple):
    """What becomes of a tensor: "packed", "dense" or "refused", and why."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


def fate(file: GGUFFile, tensor: GGUFTensor) -> Fate:
    """Whether a tensor can stay packed in a module, as far as its type, shape and name tell."""
    if not isinstance(tensor.quant_type, gguf.GGMLQuantizationType):
        return Fate("refused", f"GGUF type id {tensor.quant_type} is unknown")
    name = tensor.quant_type.name
    if not tensor.is_packed:
        return Fate("dense", f"{name} is no packed type")
    if name not in quant_types():
        return Fate("refused", f"{name} is none of {', '.join(quant_types())}")
    if not tensor.name.endswith("weight"):
        return Fate("dense", "no weight by its name")
    shape = original_shape(file, tensor)
    if shape[-1:] and shape[-1] % gguf.GGML_QUANT_SIZES[tensor.quant_type][0]:
        return Fate("dense", f"its rows of {shape[-1]} hold no whole {name} blocks")
    if len(shape) == 2:
        return Fate("packed", "")
    if len(shape) == 3 and "_exps." in tensor.name:
        return Fate("packed", f"{shape[0]} experts, where the model packs them")
    return Fate("dense", "no matrix: a QuantLinear has two dimensions")


def describe(file: GGUFFile, names: str = "") -> str:
    """The whole report on a file; of tensors and metadata only what has `names` in its name."""
    metadata = {key: value for key, value in file.metadata.items() if names in key}
    tensors = [tensor for name, tensor in file.items() if names in name]
    parts = [_summary(file)]
    if metadata:
        parts.append("Metadata\n" + _table(("key", "value"), [(key, _value(v)) for key, v in metadata.items()], "<<"))
    if tensors:
        parts.append(
            "Tensors\n"
            + _table(("name", "type", "shape", "bytes", "loaded"), [_row(file, t) for t in tensors], "<<<><")
        )
    return "\n\n".join([*parts, "Types\n" + _types(file), "Loaded\n" + _fates(file)])


def _summary(file: GGUFFile) -> str:
    weights, size = _weights(file.values()), _bytes(file.values())
    about = [f"architecture {file.metadata.get('general.architecture', 'not said')}"]
    about += [f"name {_cut(str(file.metadata['general.name']))}"] if "general.name" in file.metadata else []
    counts = [f"{len(file)} tensors", f"{weights:,} weights", f"{size:,} bytes"]
    counts += [f"{8 * size / weights:.2f} bits per weight"] if weights else []
    return f"{file.path}: {_shown(', '.join(about))}\n{', '.join(counts)}"


def _row(file: GGUFFile, tensor: GGUFTensor) -> tuple[str, ...]:
    shape = str(list(original_shape(file, tensor)))
    return tensor.name, _type_name(tensor), shape, _size(tensor), str(fate(file, tensor))


def _types(file: GGUFFile) -> str:
    return _counts("type", _grouped(file, _type_name))


def _fates(file: GGUFFile) -> str:
    return _counts("tensors that are", _grouped(file, lambda tensor: str(fate(file, tensor))))


def _grouped(file: GGUFFile, key: Any) -> dict[str, list[GGUFTensor]]:
    groups: dict[str, list[GGUFTensor]] = {}
    for tensor in file.values():
        groups.setdefault(key(tensor), []).append(tensor)
    return dict(sorted(groups.items(), key=lambda item: -_bytes(item[1])))


def _counts(title: str, groups: Mapping[str, list[GGUFTensor]]) -> str:
    total = sum(map(_bytes, groups.values())) or 1
    rows = [
        (name, f"{len(group):,}", f"{_weights(group):,}", f"{_bytes(group):,}", f"{100 * _bytes(group) / total:.1f} %")
        for name, group in groups.items()
    ]
    return _table((title, "tensors", "weights", "bytes", "share"), rows, "<>>>>")


def _type_name(tensor: GGUFTensor) -> str:
    return getattr(tensor.quant_type, "name", f"id {tensor.quant_type}")


def _size(tensor: GGUFTensor) -> str:
    return "unknown" if tensor.nbytes is None else f"{tensor.nbytes:,}"


def _bytes(tensors: Iterable[GGUFTensor]) -> int:
    return sum(tensor.nbytes or 0 for tensor in tensors)


def _weights(tensors: Iterable[GGUFTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _value(value: Any) -> str:
    """A metadata value on one line: of long lists the length and the start."""
    if isinstance(value, list) and len(value) > SHOWN_ITEMS:
        return f"{len(value)} values: {_cut(str(value[:SHOWN_ITEMS])[1:-1])}, ..."
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _shown(text: str) -> str:
    """Without line breaks, control characters and bytes that are not UTF-8, which a terminal might obey."""
    return text if text.isprintable() else repr(text)[1:-1]


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]], alignment: str) -> str:
    rows = [titles, *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


# ---- Command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.gguf", type=Path, help="any part of a split model stands for the whole")
    parser.add_argument("--names", default="", metavar="PART", help="only metadata and tensors with PART in their name")


def run(args: argparse.Namespace) -> int:
    try:
        print(describe(GGUFFile(args.file), args.names))
    except (ValueError, OSError) as error:
        raise SystemExit(f"inspect: {error}") from None
    return 0
