"""The devices that the benchmark runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..tuning import gpu_name
from .measure import Clock, MpsClock, WallClock

SIMULATED = "simulated Metal device"  # torch.backends.mps.get_name() of tests/metal_sim


@dataclass(frozen=True)
class Device:
    """clock: times calls; dtype: of x, by default; peers: names in PEERS; dense: dtypes of F.linear; read_widths: the
    reads that are tried, by vectors_per_thread of torch.ops.torch_qgemv._read; fma_passes: of _fma_rate, about 1 ms."""

    clock: Callable[[], Clock]
    dtype: str
    peers: tuple[str, ...]
    dense: tuple[torch.dtype, ...]
    read_widths: tuple[int, ...]
    fma_passes: int

    def fma_threads(self, threads: int) -> int:
        """How many threads do multiply-adds: those of the CPU, or enough for the largest GPU."""
        return threads if self.clock is WallClock else 1 << 17


DEVICES = {
    "cpu": Device(WallClock, "bf16", ("ggml",), (torch.bfloat16, torch.float32), (8,), 40_000),
    "mps": Device(MpsClock, "fp16", (), (torch.float16, torch.float32), (2, 8, 32), 200),
}


def check_device(name: str) -> None:
    if name == "mps" and not torch.backends.mps.is_available():
        raise SystemExit("--device mps: torch finds no MPS device here")


def chip_name(name: str) -> str | None:
    """The GPU's name; None for the CPU."""
    return None if name == "cpu" else gpu_name()


def is_simulated(name: str) -> bool:
    """Whether kernels run on the simulated device, whose times mean nothing."""
    return chip_name(name) == SIMULATED
