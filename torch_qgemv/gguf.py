"""Read GGUF files: metadata, and every tensor as a view of the mapped file.

The header is parsed here, on a memory map, with every count, length, offset and size checked against the file before
it is used. `gguf.GGUFReader` takes seconds on a large vocabulary and trusts the offsets it reads.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

DEFAULT_ALIGNMENT = 32
_MAX_NAME_BYTES = 65535  # the specification's limit for metadata keys
_MAX_DIMS = 8  # ggml stops at 4, but files of diffusion models hold 5-D convolution weights
_MAX_ELEMENTS = 2**56  # keeps sizes and strides in bytes within int64, also beside a dimension of 0
_MAX_VALUE_BYTES = 2**28  # of one metadata value: a lying length must not copy gigabytes of weights
_MAX_NESTING = 8
# MAP_NORESERVE (in the mmap module from Python 3.13): Linux refuses private maps over memory + swap without it.
_MAP_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_NUMBER_DTYPES = {gguf.GGUFValueType.BOOL: np.dtype("uint8")} | {
    gguf.GGUFValueType[name.upper()]: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
}

_PLAIN_DTYPES = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
    gguf.GGMLQuantizationType.F64: torch.float64,
    gguf.GGMLQuantizationType.I8: torch.int8,
    gguf.GGMLQuantizationType.I16: torch.int16,
    gguf.GGMLQuantizationType.I32: torch.int32,
    gguf.GGMLQuantizationType.I64: torch.int64,
}


class GGUFError(ValueError):
    """A file that is not a GGUF file, is damaged, or contradicts itself; names the file and the tensor or key."""


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """One tensor of a GGUF file, by its `name` there.

    quant_type: a gguf.GGMLQuantizationType; the bare type id (int) if the installed gguf package doesn't know it.
    shape: the logical shape in torch order (reversed GGUF dimensions), e.g. (N, K) for a linear layer.
    """

    name: str
    quant_type: gguf.GGMLQuantizationType | int
    shape: tuple[int, ...]
    _memory: memoryview | None = field(repr=False)  # the tensor's bytes; None when the type, so the size, is unknown
    _path: Path = field(repr=False)

    @classmethod
    def of(
        cls,
        name: str,
        data: torch.Tensor,
        shape: tuple[int, ...],
        quant_type: gguf.GGMLQuantizationType | None,
        path: Path,
    ) -> GGUFTensor:
        """A tensor that was in the file at `path`, changed since: numbers, or the bytes of a packed quant_type."""
        if quant_type is None:
            quant_type = next(known for known, dtype in _PLAIN_DTYPES.items() if dtype == data.dtype)
        raw = data.contiguous().reshape(-1).view(torch.uint8)
        return cls(name, quant_type, shape, memoryview(raw.numpy()), path)

    @property
    def nbytes(self) -> int | None:
        """The size of the data; None for a type id that the installed gguf package doesn't know."""
        return None if self._memory is None else self._memory.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether `data` are blocks of a packed type, not numbers. Of an unknown type's data nobody can say."""
        return self.quant_type in gguf.GGML_QUANT_SIZES and self.quant_type not in _PLAIN_DTYPES

    @cached_property
    def data(self) -> torch.Tensor:
        """The tensor's bytes, not copied; made at the first use.

        Plain types (F32, F16, BF16, F64, I8 to I64) give that dtype and `shape`; packed types give uint8
        [*shape[:-1], row_bytes]. The storage holds this tensor alone. Writes stay private to this process' map and
        never reach the file. Raises GGUFError for a type id that the installed gguf package doesn't know.
        """
        if self._memory is None:
            raise GGUFError(f"{self._path}: tensor {self.name!r}: GGUF type id {self.quant_type} is unknown")
        dtype, shape = _PLAIN_DTYPES.get(self.quant_type), self.shape
        if dtype is None:
            block_size, type_size = gguf.GGML_QUANT_SIZES[self.quant_type]
            dtype, shape = torch.uint8, (*shape[:-1], shape[-1] // block_size * type_size)
        if not self._memory.nbytes:  # frombuffer refuses empty buffers
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype).view(shape)


class GGUFFile(Mapping):
    """The tensors of a GGUF file by name, in the file's order: a Mapping of str to GGUFTensor.

    path: a little-endian GGUF file, version 2 or 3. Any part of a split model (`-00001-of-00003.gguf`) opens the
        whole; the other parts must lie beside it.
    metadata: dict of key to plain Python value (int, float, bool, str, list). Bytes of a string value that are not
        UTF-8 (some vocabularies hold them) become surrogate escapes: `value.encode("utf-8", "surrogateescape")` gives
        the bytes back. A split model's metadata are those of part 1, with keys that only other parts have added.

    Raises GGUFError for anything wrong with a file, OSError if it can't be opened. Tensors may outlive the GGUFFile.
    As with any mapped file, nothing may truncate the file while its tensors are in use.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.metadata, tensors = _read_part(self.path)
        if self.metadata.get("split.count", 1) != 1:
            self.metadata, tensors = _read_split(self.path)
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def __getitem__(self, name: str) -> GGUFTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {self.metadata.get('general.architecture')}, {len(self)} tensors)"


class _Reader:
    """Reads one file's header front to back. `item` says what is being read, for the error messages."""

    def __init__(self, path: Path):
        self.path, self.item, self.position = path, "header", 0
        if path.exists() and not path.is_file():
            raise self.error("a GGUF file is needed, this is a directory or a device")
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise self.error("the file is empty")
            # mmap.ACCESS_COPY, spelt out to add a flag: writable, and writes never reach the file.
            self.map = mmap.mmap(file.fileno(), 0, flags=_MAP_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.size = len(self.map)

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {self.item}: {message}")

    def require(self, nbytes: int) -> None:
        left = self.size - self.position
        if nbytes > left:
            raise self.error(f"{nbytes} bytes are needed at offset {self.position}, the file has only {left} more")
        if nbytes > _MAX_VALUE_BYTES:
            raise self.error(f"a value of {nbytes} bytes is over the limit of {_MAX_VALUE_BYTES}")

    def take(self, nbytes: int) -> bytes:
        self.require(nbytes)
        self.position += nbytes
        return self.map[self.position - nbytes : self.position]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def name(self) -> str:
        length = self.uint64()
        if length > _MAX_NAME_BYTES:
            raise self.error(f"a name of {length} bytes is over the limit of {_MAX_NAME_BYTES}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the name is not UTF-8: {error}") from None

    def values(self, value_type: int, count: int, depth: int = 0) -> list:
        """The next `count` metadata values of one type."""
        if value_type in _NUMBER_DTYPES:
            return self.numbers(value_type, count)
        if value_type == gguf.GGUFValueType.STRING:
            return self.strings(count)
        if value_type != gguf.GGUFValueType.ARRAY:
            raise self.error(f"metadata value type {value_type} is unknown")
        if depth > _MAX_NESTING:
            raise self.error(f"arrays are nested more than {_MAX_NESTING} deep")
        self.require(12 * count)  # each array has a type and a count at least
        return [self.values(self.uint32(), self.uint64(), depth + 1) for _ in range(count)]

    def numbers(self, value_type: int, count: int) -> list:
        dtype = _NUMBER_DTYPES[value_type]
        numbers = np.frombuffer(self.take(dtype.itemsize * count), dtype)
        if value_type == gguf.GGUFValueType.BOOL:
            if (numbers > 1).any():
                raise self.error(f"a bool is stored as {numbers.max()}, neither 0 nor 1")
            numbers = numbers.astype(bool)
        return numbers.tolist()

    def strings(self, count: int) -> list[str]:
        # Vocabularies have hundreds of thousands of strings: one check per string. A length cut short by the end of
        # the file puts `end` past it too.
        self.require(8 * count)
        data, size, position = self.map, self.size, self.position
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if position > size or position - start > _MAX_VALUE_BYTES:
                raise self.error(f"string {len(strings)} of {count} ends at offset {position}, the file at {size}")
            strings.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return strings


def _read_part(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """Metadata and tensors of one file."""
    reader = _Reader(path)
    tensor_count, metadata_count = _read_counts(reader)
    metadata = _read_metadata(reader, metadata_count)
    return metadata, _read_tensors(reader, tensor_count, _alignment(reader, metadata))


def raw_metadata(path: str | os.PathLike[str]) -> tuple[int, bytes]:
    """How many metadata keys one file has, and their bytes with those of their values, for a faithful copy."""
    reader = _Reader(Path(path))
    _, count = _read_counts(reader)
    start = reader.position
    _read_metadata(reader, count)
    return count, reader.map[start : reader.position]


def _read_counts(reader: _Reader) -> tuple[int, int]:
    """Of tensors and of metadata keys, after the magic bytes and the version."""
    magic = reader.take(min(4, reader.size))
    if magic != b"GGUF":
        raise reader.error(f"not a GGUF file: it starts with {magic!r}")
    version = reader.uint32()
    if version and version % 65536 == 0:
        raise reader.error("a big-endian GGUF file; only little-endian files are supported")
    if version not in (2, 3):
        raise reader.error(f"GGUF version {version} is not supported, only 2 and 3 are")
    return reader.uint64(), reader.uint64()


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    reader.require(13 * count)  # each has a key's length, a type and a value of one byte at least
    metadata = {}
    for index in range(count):
        reader.item = f"metadata key {index} of {count}"
        key = reader.name()
        reader.item = f"metadata key {key!r}"
        if key in metadata:
            raise reader.error("the key occurs twice")
        (metadata[key],) = reader.values(reader.uint32(), 1)
    return metadata


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment % 8:
        reader.item = "metadata key 'general.alignment'"
        raise reader.error(f"{alignment!r} is not a positive multiple of 8")
    return alignment


def _read_tensors(reader: _Reader, count: int, alignment: int) -> list[GGUFTensor]:
    reader.item = "header"
    reader.require(24 * count)  # each has a name's length, a number of dimensions, a type and an offset at least
    infos = {}
    for index in range(count):
        reader.item = f"tensor {index} of {count}"
        name = reader.name()
        reader.item = f"tensor {name!r}"
        if name in infos:
            raise reader.error("the name occurs twice")
        infos[name] = _read_tensor_info(reader)

    data_start = _align(reader.position, alignment)
    tensors, spans = [], []
    for name, (quant_type, shape, offset) in infos.items():
        reader.item = f"tensor {name!r}"
        if offset % alignment:
            raise reader.error(f"offset {offset} is not a multiple of the alignment {alignment}")
        nbytes = _tensor_bytes(reader, quant_type, shape)
        start = data_start + offset
        end = start + (nbytes or 0)
        # No byte of an empty tensor is read, and the padding before it may be missing at the end of the file.
        if end > (reader.size if nbytes else _align(reader.size, alignment)):
            raise reader.error(f"its data end at {end}, the file at {reader.size}")
        if nbytes:
            spans.append((start, end, name))
        memory = None if nbytes is None else memoryview(reader.map)[start:end]
        tensors.append(GGUFTensor(name, quant_type, shape, memory, reader.path))

    for (_, end, name), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            reader.item = f"tensor {other!r}"
            raise reader.error(f"its data overlap those of tensor {name!r}")
    return tensors


def _read_tensor_info(reader: _Reader) -> tuple[gguf.GGMLQuantizationType | int, tuple[int, ...], int]:
    """Type, shape in torch order, and offset from the start of the data."""
    dims = reader.uint32()
    if dims > _MAX_DIMS:
        raise reader.error(f"{dims} dimensions are over the limit of {_MAX_DIMS}")
    shape = tuple(reader.uint64() for _ in range(dims))[::-1]
    if math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise reader.error(f"shape {shape} is too large")
    type_id = reader.uint32()
    known = type_id in gguf.GGML_QUANT_SIZES
    return gguf.GGMLQuantizationType(type_id) if known else type_id, shape, reader.uint64()


def _tensor_bytes(reader: _Reader, quant_type: gguf.GGMLQuantizationType | int, shape: tuple[int, ...]) -> int | None:
    """Size of a tensor's data in bytes; None if the type is unknown."""
    if quant_type not in gguf.GGML_QUANT_SIZES:
        return None
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant_type]
    row = shape[-1] if shape else 1
    if row % block_size:
        raise reader.error(f"K = {row} is not a multiple of the block of {block_size} weights of {quant_type.name}")
    return math.prod(shape) // block_size * type_size


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _read_split(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """Metadata and tensors of a model split into several files, of which `path` is one."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match:
        raise GGUFError(f"{path}: split.count says a part of a split model, the name doesn't (-00001-of-00003.gguf)")
    count = int(match["count"])
    metadata, tensors = {}, {}
    for number in range(1, count + 1):
        part = path.with_name(f"{match['prefix']}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise GGUFError(f"{part}: missing part {number} of {count}, needed by {path.name}")
        part_metadata, part_tensors = _read_part(part)
        for key, expected in (("split.no", number - 1), ("split.count", count)):
            if part_metadata.get(key) != expected:
                raise GGUFError(f"{part}: {key} is {part_metadata.get(key)!r}, expected {expected}")
        metadata = part_metadata | metadata
        for tensor in part_tensors:
            if tensor.name in tensors:
                raise GGUFError(f"{part}: tensor {tensor.name!r} is also in another part")
            tensors[tensor.name] = tensor
    total = metadata.get("split.tensors.count")
    if total != len(tensors):
        raise GGUFError(f"{path}: split.tensors.count is {total!r}, the parts hold {len(tensors)}")
    return metadata, list(tensors.values())
