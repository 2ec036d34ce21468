"""Re-encode the float matrices of a GGUF file as packed types.

    python -m torch_qgemv quantize model-F16.gguf model-Q4_K.gguf --type Q4_K --map 'ffn_down=Q6_K,token_embd=Q8_0'

F32, F16 and BF16 matrices become --type, or what --map says; the metadata and all other tensors are copied byte for
byte. Kept too, unless --map names them: tensors of one dimension, norms, routers of experts, convolutions and tables of
positions, which no matrix product reads or which are too small to matter. Where the blocks of a type don't fill the
rows, llama.cpp's replacement is taken (Q5_0 for Q4_K and so on); where that doesn't fill them either, the tensor stays.
A table says what became of what. An importance matrix (--imatrix) is one that llama.cpp's imatrix tool wrote.
"""

from __future__ import annotations

import argparse
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import torch
from tqdm import tqdm

from .gguf import DEFAULT_ALIGNMENT, GGUFFile, GGUFTensor, raw_metadata
from .imatrix import load_imatrix
from .ops import QuantType, quant_types, quantize, resolve_quant_type
from .quantizing import fitting_type

COPY = "copy"  # instead of a type: the tensor stays as it is
_TYPES = gguf.GGMLQuantizationType
_FLOATS = (_TYPES.F32, _TYPES.F16, _TYPES.BF16)
_KEPT = ("norm", "ffn_gate_inp", "conv1d", "shortconv", "position_embd", "token_types")
_STEP = 1 << 24  # weights encoded between two steps of the progress bar
_VERSION_KEY = "general.quantization_version"


@dataclass
class Requantization:
    """What requantize did: tensors' names by what became of them. print() shows a table.

    replaced: name -> the new type's name. kept: name -> why it stayed. bytes_before and bytes_after: of all tensors.
    without_importance: replaced tensors that the importance matrix doesn't know.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    without_importance: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        lines = [f"{count:6} tensors now {name}" for name, count in Counter(self.replaced.values()).items()]
        lines += [f"{count:6} tensors kept: {why}" for why, count in Counter(self.kept.values()).items()]
        if self.without_importance:
            lines.append(f"{len(self.without_importance):6} tensors encoded without importance: not in the matrix")
        return "\n".join([*lines, f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"])


def requantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    quant_type: QuantType,
    types: Mapping[str, QuantType] | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Requantization:
    """Writes the GGUF file `target`: `source` with its float matrices encoded as quant_type.

    types: parts of tensors' names to their type, or "copy"; the first part that a name contains decides. imatrix: a
    file for load_imatrix. Raises ValueError if a part of `types` is in no tensor's name, if source is split in parts or
    is target, and what torch_qgemv.quantize raises, with the tensor's name; then nothing is written, and a file that
    was at target stays.
    """
    source, target = Path(source), Path(target)
    if target.exists() and target.samefile(source):
        raise ValueError(f"target {target} is the source; another name is needed")
    file = GGUFFile(source)
    if file.metadata.get("split.count", 1) != 1:
        raise ValueError(f"{source} is a part of a split model; merge it first (llama.cpp: llama-gguf-split --merge)")
    importance = load_imatrix(imatrix) if imatrix is not None else {}
    chosen, result = _plan(file, resolve_quant_type(quant_type), types or {})
    if imatrix is not None:
        result.without_importance = [name for name in result.replaced if name not in importance]
    partial = target.with_name(target.name + ".part")
    try:
        with partial.open("wb") as out, _progress_bar(file, progress) as bar:
            _write_header(out, file, chosen)
            for name, tensor in file.items():
                for part in _encoded(tensor, chosen.get(name), importance.get(name), bar):
                    out.write(part)
                out.write(bytes(-out.tell() % _alignment(file)))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return result


def _plan(file: GGUFFile, default: _TYPES, types: Mapping[str, QuantType]) -> tuple[dict[str, _TYPES], Requantization]:
    """The new types of the tensors that are encoded, and the report."""
    for part in types:
        if not any(part in name for name in file):
            raise ValueError(f"types: no tensor of {file.path} has {part!r} in its name")
    resolved = {part: None if given == COPY else resolve_quant_type(given) for part, given in types.items()}
    chosen, result = {}, Requantization()
    for name, tensor in file.items():
        named = next((part for part in resolved if part in name), None)
        wanted = default if named is None else resolved[named]
        reason = _reason_to_keep(tensor, wanted, named is not None)
        if reason is None:
            chosen[name] = fitting_type(wanted, tensor.shape[-1], fallback=True)
            result.replaced[name] = chosen[name].name
        else:
            result.kept[name] = reason
        result.bytes_before += tensor.data.nbytes
        result.bytes_after += _nbytes(tensor, chosen.get(name, tensor.quant_type))
    return chosen, result


def _reason_to_keep(tensor: GGUFTensor, wanted: _TYPES | None, named: bool) -> str | None:
    if tensor.quant_type not in _FLOATS:
        return f"{getattr(tensor.quant_type, 'name', 'of an unknown type')} already"
    if wanted is None:
        return "by the map"
    if len(tensor.shape) < 2:
        return "no matrix"
    if not named and any(part in tensor.name for part in _KEPT):
        return "norm, router, convolution or table"
    if not tensor.shape[-1] or fitting_type(wanted, tensor.shape[-1], fallback=True) is None:
        return f"rows of {tensor.shape[-1]} are filled by no blocks of {wanted.name} or its replacement"
    return None


def _nbytes(tensor: GGUFTensor, quant_type: _TYPES) -> int:
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    return _elements(tensor) // block_size * type_size


def _elements(tensor: GGUFTensor) -> int:
    return torch.Size(tensor.shape).numel()


def _progress_bar(file: GGUFFile, shown: bool) -> tqdm:
    total = sum(_elements(tensor) for tensor in file.values())
    return tqdm(total=total, unit=" weights", unit_scale=True, disable=not shown, desc="quantize")


def _alignment(file: GGUFFile) -> int:
    return file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _write_header(out, file: GGUFFile, chosen: Mapping[str, _TYPES]) -> None:
    """The metadata as they are, and the tensors' names, shapes, new types and places.

    Not by gguf.GGUFWriter: it puts keys of its own first, refuses empty arrays and strings that are not UTF-8.
    """
    count, metadata = raw_metadata(file.path)
    if chosen and _VERSION_KEY not in file.metadata:
        count += 1
        metadata += _string(_VERSION_KEY)
        metadata += struct.pack("<II", gguf.GGUFValueType.UINT32, gguf.GGML_QUANT_VERSION)
    out.write(struct.pack("<4sIQQ", b"GGUF", gguf.GGUF_VERSION, len(file), count) + metadata)
    alignment, offset = _alignment(file), 0
    for name, tensor in file.items():
        quant_type = chosen.get(name, tensor.quant_type)
        out.write(_string(name) + struct.pack("<I", len(tensor.shape)))
        out.write(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        out.write(struct.pack("<IQ", quant_type, offset))
        offset += -(-_nbytes(tensor, quant_type) // alignment) * alignment
    out.write(bytes(-out.tell() % alignment))


def _encoded(
    tensor: GGUFTensor, quant_type: _TYPES | None, importance: torch.Tensor | None, bar: tqdm
) -> Iterator[memoryview]:
    """The bytes of a tensor in its new type, or as they are."""
    if quant_type is None:
        yield memoryview(tensor.data.contiguous().view(-1).view(torch.uint8).numpy())
        bar.update(_elements(tensor))
        return
    columns = tensor.shape[-1]
    rows = tensor.data.reshape(-1, columns)
    matrices = 1 if importance is None else len(importance)
    if importance is not None and (importance.shape[1] != columns or len(rows) % matrices):
        raise ValueError(
            f"{tensor.name}: importance of {list(importance.shape)} values doesn't fit a tensor {list(tensor.shape)}"
        )
    step = max(1, _STEP // columns)
    for e, matrix in enumerate(rows.tensor_split(matrices)):
        for part in matrix.split(step):
            try:
                packed = quantize(part, quant_type, None if importance is None else importance[e])
            except ValueError as error:
                raise ValueError(f"{tensor.name}: {error}") from None
            yield memoryview(packed.view(-1).numpy())
            bar.update(part.numel())


# ---- Command line
def _type_name(text: str) -> str:
    if text not in quant_types():
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(quant_types())}")
    return text


def _type_map(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(part for part, _, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not PART=TYPE,...")
    return {part: value if value == COPY else _type_name(value) for part, _, value in pairs}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN.gguf")
    parser.add_argument("target", metavar="OUT.gguf")
    parser.add_argument("--type", required=True, type=_type_name, help=f"one of {', '.join(quant_types())}")
    parser.add_argument(
        "--map",
        type=_type_map,
        default={},
        metavar="PART=TYPE,...",
        help="other types for tensors by a part of their names, first match; 'copy' for none",
    )
    parser.add_argument("--imatrix", metavar="FILE", help="importance matrix, as written by llama.cpp's tool")


def run(args: argparse.Namespace) -> int:
    try:
        print(requantize(args.source, args.target, args.type, args.map, args.imatrix, progress=True))
    except (ValueError, OSError) as error:
        raise SystemExit(f"quantize: {error}") from None
    return 0
