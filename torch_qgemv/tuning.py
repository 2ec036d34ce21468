"""Which Metal kernel multiplies one row of x, by a table that was measured on the user's own GPU.

`python -m torch_qgemv tune` writes such a table, load_tuning() puts it in use; nothing else does. The file is JSON:

    {"format": 1, "package": "0.1.0", "chip": "Apple M2 Pro", "torch": "2.13.0", "entries": [
      {"type": "Q4_K", "dtype": "float16", "N": 4096, "K": 4096, "variant": "r8_s2_k1"}]}

An entry holds for weights of a GGUF type, x of a dtype, and N and K from these powers of two to below the next ones.
Its variant is one of torch.ops.torch_qgemv._gemv_variants(). Where there is no entry the built-in choice stays.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from . import ops

FORMAT = 1
DTYPES = ("float32", "float16", "bfloat16")
LARGEST = 1 << 31  # the last power of two that an N or K of a kernel can have
RENEW = "`python -m torch_qgemv tune` makes one"


@dataclass(frozen=True)
class Entry:
    """One line of a table; N and K are the powers of two where its sizes begin."""

    type: str
    dtype: str
    N: int
    K: int
    variant: str


@dataclass(frozen=True)
class Table:
    """What a file holds: versions of torch_qgemv and torch, the GPU's name, and the entries."""

    package: str
    chip: str
    torch: str
    entries: tuple[Entry, ...]


def load_tuning(path: str | os.PathLike[str] | None = None) -> int:
    """Puts the kernels that `python -m torch_qgemv tune` has found on this GPU in use, for the whole process.

    path: of the file; without it, the one that `tune` writes without --output. Returns the number of its entries: how
    many combinations of type, dtype, N and K get another kernel than the built-in choice. Results stay as exact, and
    differ in rounding. A table that was in use before is replaced.

    Raises FileNotFoundError if there is no file, ValueError, which names the file, if it is damaged, of another GPU,
    torch or torch_qgemv, or has unknown types or kernels, RuntimeError if there is no MPS device. Nothing changes then.
    """
    if gpu_name() is None:
        raise RuntimeError("load_tuning: torch finds no MPS device here, and only kernels of MPS are tuned")
    path = default_path() if path is None else Path(path)
    table = read_table(path)
    if problem := misfit(table):
        raise ValueError(f"{path} {problem}; {RENEW}")
    _use(table.entries)
    return len(table.entries)


def unload_tuning() -> None:
    """Goes back to the built-in choice of kernels."""
    if gpu_name() is not None:
        _use(())


def gpu_name() -> str | None:
    """What torch calls the GPU; None where it finds no MPS device."""
    if not torch.backends.mps.is_available():
        return None
    return getattr(torch.backends.mps, "get_name", lambda: "unknown")()  # torch 2.10 may have none


def default_path() -> Path:
    """Where `tune` puts the table of this GPU and torch: in torch_qgemv/ of $XDG_CACHE_HOME, or of ~/.cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_qgemv"
    return folder / re.sub(r"[^\w.+-]+", "-", f"tuning-{gpu_name()}-torch-{torch.__version__}.json")


def size_class(size: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (size.bit_length() - 1)


def measured_here(entries: Iterable[Entry]) -> Table:
    """A table of this machine."""
    return Table(**_here(), entries=tuple(entries))


def write_table(table: Table, path: Path) -> None:
    """Writes a file that is whole whenever it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(json.dumps({"format": FORMAT, **asdict(table)}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_table(path: Path) -> Table:
    """The table in a file, of whatever machine. Raises FileNotFoundError, or ValueError that says what is wrong."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no tuning file {path}; {RENEW}") from None
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no tuning file: {error}; {RENEW}") from None


def misfit(table: Table) -> str | None:
    """Why a table must not be used on this machine; None if it may."""
    for name, here in _here().items():
        if (there := getattr(table, name)) != here:
            what = {"chip": "GPU", "torch": "torch", "package": "torch_qgemv"}[name]
            return f"was measured with {what} {there}, but here is {here or 'no MPS device'}"
    return None


def _here() -> dict[str, str | None]:
    from . import __version__  # not there yet while the package is imported

    return {"chip": gpu_name(), "torch": str(torch.__version__), "package": __version__}


def _use(entries: Iterable[Entry]) -> None:
    entries = tuple(entries)
    torch.ops.torch_qgemv._use_tuning(
        [ops.resolve_quant_type(entry.type) for entry in entries],
        *([getattr(entry, name) for entry in entries] for name in ("dtype", "N", "K", "variant")),
    )


def _checked(data: object) -> Table:
    _check_keys("the file", data, {"format", *(field.name for field in fields(Table))})
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise ValueError(f"its format is {data['format']!r}, but this torch_qgemv reads {FORMAT}")
    for name in ("package", "chip", "torch"):
        if not isinstance(data[name], str):
            raise ValueError(f"{name} must be a string, got {data[name]!r}")
    if not isinstance(data["entries"], list):
        raise ValueError(f"entries must be a list, got {data['entries']!r}")
    entries = tuple(_checked_entry(f"entries[{index}]", entry) for index, entry in enumerate(data["entries"]))
    places = [(entry.type, entry.dtype, entry.N, entry.K) for entry in entries]
    if len(set(places)) < len(places):
        repeated = next(place for place in places if places.count(place) > 1)
        raise ValueError(f"there are several entries for {repeated}")
    return Table(data["package"], data["chip"], data["torch"], entries)


def _checked_entry(where: str, data: object) -> Entry:
    _check_keys(where, data, {field.name for field in fields(Entry)})
    known = {"type": ops.quant_types(), "dtype": DTYPES, "variant": torch.ops.torch_qgemv._gemv_variants()}
    for name, values in known.items():
        if data[name] not in values:
            raise ValueError(f"{where} has the {name} {data[name]!r}; known are {', '.join(values)}")
    for name in ("N", "K"):
        size = data[name]
        if type(size) is not int or not 1 <= size <= LARGEST or size & (size - 1):
            raise ValueError(f"{where}: {name} must be a power of two from 1 to {LARGEST}, got {size!r}")
    return Entry(**data)


def _check_keys(what: str, data: object, keys: set[str]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be an object, got {type(data).__name__}")
    if data.keys() != keys:
        raise ValueError(f"{what} must have {', '.join(sorted(keys))}, got {', '.join(sorted(data)) or 'nothing'}")
