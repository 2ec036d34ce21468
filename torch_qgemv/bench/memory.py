"""Memory of the benchmark: copies of a weight that together exceed the caches, in huge pages where there are any."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

MB = 10**6
MIN_ROTATE = 64 * MB
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 256  # elements


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_rotate() -> int:
    """Bytes over which the copies of one weight extend: 512 MB, less on a small machine, at least 64 MB.

    Each contestant has such a set of copies and all of them take turns, so a copy is long out of a cache of 512 MB
    when it is used again.
    """
    return max(MIN_ROTATE, min(512 * MB, physical_memory() // 16))


def copies_for(nbytes: int, rotate: int) -> int:
    """How many copies of a weight of `nbytes` bytes extend over `rotate` bytes."""
    return max(1, -(-rotate // nbytes))


def repeat(rows: torch.Tensor, N: int, copies: int, huge: bool) -> list[torch.Tensor]:
    """Copies of a matrix of N rows that are `rows` over and over, one after the other in fresh memory.

    Each is aligned as a tensor of its own would be.
    """
    size = N * rows.shape[1]
    memory = torch.empty(copies, -(-size // _ALIGNMENT) * _ALIGNMENT, dtype=rows.dtype, device=rows.device)
    if huge and memory.device.type == "cpu":
        advise_huge_pages(memory.data_ptr(), memory.nbytes)
    ring = memory[:, :size].unflatten(1, (N, rows.shape[1]))
    for part in ring.split(len(rows), dim=1):
        part.copy_(rows[: part.shape[1]].expand_as(part))
    return list(ring.unbind())


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Asks the system (Linux; others know no such request) for huge pages in memory that was not written to yet."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    end = (address + nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if begin < end:  # what it refuses, it leaves in small pages
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_HUGEPAGE))
