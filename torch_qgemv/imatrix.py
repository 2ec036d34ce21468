"""Importance matrices of llama.cpp: for each weight tensor, the mean square of what its columns were multiplied by."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .gguf import GGUFError, GGUFFile

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME_BYTES = 65535


def load_imatrix(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """An importance matrix made by llama.cpp's imatrix tool, GGUF or the older binary form.

    Returns for each tensor's name float32 [matrices, K]: one row, or one for each expert. An expert that met no token
    counts all its columns alike. Raises GGUFError for a file that is neither, or damaged.
    """
    path = Path(path)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    return _from_gguf(path) if is_gguf else _from_binary(path)


def _from_gguf(path: Path) -> dict[str, torch.Tensor]:
    file, found = GGUFFile(path), {}
    for name in file:
        if not name.endswith(_SUMS):
            continue
        base = name.removesuffix(_SUMS)
        if base + _COUNTS not in file:
            raise GGUFError(f"{path}: tensor {name!r} has no {base + _COUNTS!r} beside it")
        counts, sums = file[base + _COUNTS].data.reshape(-1, 1), file[name].data
        if not counts.numel() or sums.numel() % counts.numel() or sums.dtype != torch.float32:
            raise GGUFError(f"{path}: tensor {name!r} {list(sums.shape)} doesn't fit {counts.numel()} counts")
        found[base] = _mean(sums.reshape(counts.numel(), -1), counts)
    if not found:
        raise GGUFError(f"{path}: not an importance matrix, for no tensor's name ends in {_SUMS!r}")
    return found


def _mean(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.where(counts > 0, sums / counts.clamp(min=1), 1.0).float()


def _from_binary(path: Path) -> dict[str, torch.Tensor]:
    """int32 count; then for each tensor int32 length, name, int32 calls, int32 values, and the values as float32."""
    raw, position, found = memoryview(path.read_bytes()), 0, {}

    def take(nbytes: int, limit: int) -> memoryview:
        nonlocal position
        if not 0 < nbytes <= min(limit, len(raw) - position):
            raise GGUFError(f"{path}: not an importance matrix, or cut short at offset {position} of {len(raw)}")
        position += nbytes
        return raw[position - nbytes : position]

    def int32() -> int:
        return int.from_bytes(take(4, 4), "little", signed=True)

    for _ in range(int32()):
        name = bytes(take(int32(), _MAX_NAME_BYTES)).decode("utf-8", "surrogateescape")
        calls = int32()
        values = torch.frombuffer(bytearray(take(4 * int32(), len(raw))), dtype=torch.float32)
        found[name] = _mean(values.reshape(1, -1), torch.tensor([[calls]]))
    if not found:
        raise GGUFError(f"{path}: the importance matrix is empty")
    return found
