"""Times the product y = x W^T of every contestant, all in turn, and measures how far each is from the exact one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any, Protocol

import gguf
import torch
from torch.nn import functional as F

from .. import ops
from ..testing import random_packed
from .memory import copies_for, repeat

MIN_SAMPLE_NS = 200_000  # calls that are shorter are timed several at once
CALIBRATIONS = 6  # at most, for the number of calls in a sample
MIN_ROUNDS = 5
REFERENCE_ROWS = 256  # the distinct rows of a weight; the others repeat them
REFERENCE_TOKENS = 4  # rows of x whose error is measured


@dataclass(frozen=True)
class Problem:
    """A weight [N, K] to multiply by: `rows`, packed, over and over."""

    quant_type: gguf.GGMLQuantizationType
    K: int
    N: int
    rows: torch.Tensor  # uint8 [at most REFERENCE_ROWS, row_bytes]

    @classmethod
    def random(cls, quant_type: gguf.GGMLQuantizationType, K: int, N: int, device: str) -> Problem:
        return cls(quant_type, K, N, random_packed(quant_type, min(N, REFERENCE_ROWS), K).to(device))

    @property
    def packed(self) -> torch.Tensor:
        """uint8 [N, row_bytes]."""
        return self.rows.repeat(-(-self.N // len(self.rows)), 1)[: self.N]

    @property
    def matrix(self) -> torch.Tensor:
        """The distinct rows as float32 [n, K]."""
        return ops.dequantize(self.rows, self.quant_type)

    def __str__(self) -> str:
        return f"{self.quant_type.name} {self.K}x{self.N}"


class Contestant(Protocol):
    """One way to multiply by copies of one weight."""

    name: str
    group: str  # the fastest of a group is what a ratio is taken to
    dtype: torch.dtype  # of its x and y
    weight_bytes: int  # of one copy

    def takes(self, M: int) -> bool:
        """Whether it can multiply M rows of x."""

    def calls(self, x: torch.Tensor) -> list[Callable[[], Any]]:
        """The product of x [M, K] with each copy."""

    def difference(self, x: torch.Tensor, tokens: list[int], exact: torch.Tensor) -> torch.Tensor:
        """y - exact in float64 for rows `tokens` of x and the first outputs; exact: [len(tokens), outputs]."""


class Ours:
    """torch_qgemv.linear, by the best kernels or by those of one instruction set, on plain or interleaved weights."""

    name = group = "torch_qgemv"

    def __init__(
        self, problem: Problem, dtype: torch.dtype, isa: str | None, rotate: int, huge: bool, interleaved: bool = False
    ):
        self.dtype, self.weight_bytes = dtype, problem.N * problem.rows.shape[1]
        self.ring = repeat(problem.rows, problem.N, copies_for(self.weight_bytes, rotate), huge)
        self._quant_type, self._isa = int(problem.quant_type), isa
        self._N = problem.N
        if interleaved:
            weight = torch.ops.torch_qgemv.interleave(self.ring[0], self._quant_type)
            self.ring = [plain.view(weight.shape).copy_(weight) for plain in self.ring]

    def takes(self, M: int) -> bool:
        return True

    def calls(self, x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        return [self._call(x, weight) for weight in self.ring]

    def difference(self, x: torch.Tensor, tokens: list[int], exact: torch.Tensor) -> torch.Tensor:
        # The bias is added before y is rounded: with -exact as bias, y is the error itself.
        errors = []
        for token, expected in zip(tokens, exact, strict=True):
            bias = torch.zeros(self._N, device=x.device)
            bias[: len(expected)] = -expected.float()
            y = self._call(x, self.ring[0], bias)()[token, : len(expected)].cpu()
            errors.append(y.double() + (expected.float().double() - expected))
        return torch.stack(errors)

    def _call(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable:
        x = x.to(self.dtype)
        if self._isa is None:
            return partial(torch.ops.torch_qgemv.linear, x, weight, self._quant_type, bias)
        return partial(torch.ops.torch_qgemv._linear_isa, x, weight, self._quant_type, bias, self._isa)


class Published:
    """The published mapping for Q4_K and one row of x, as a Metal kernel: a baseline."""

    name = group = "published"

    def __init__(self, problem: Problem, dtype: torch.dtype, ring: list[torch.Tensor]):
        self.dtype, self._ring, self.weight_bytes = dtype, ring, problem.N * problem.rows.shape[1]

    def takes(self, M: int) -> bool:
        return M == 1

    def calls(self, x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        return [partial(torch.ops.torch_qgemv._published, x.to(self.dtype), weight) for weight in self._ring]

    def difference(self, x: torch.Tensor, tokens: list[int], exact: torch.Tensor) -> torch.Tensor:
        y = torch.ops.torch_qgemv._published(x.to(self.dtype), self._ring[0])
        return y[:, : exact.shape[1]].cpu().double() - exact


class Dense:
    """torch's F.linear with the dequantized weight in `dtype`. Its y is judged as it is, rounded."""

    def __init__(self, problem: Problem, dtype: torch.dtype, rotate: int, huge: bool):
        self.name = self.group = dense_name(dtype)
        self.dtype, self._rows = dtype, problem.matrix.to(dtype)
        self.weight_bytes = problem.N * problem.K * dtype.itemsize
        self._ring = repeat(self._rows, problem.N, copies_for(self.weight_bytes, rotate), huge)

    def takes(self, M: int) -> bool:
        return True

    def calls(self, x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        return [partial(F.linear, x.to(self.dtype), weight) for weight in self._ring]

    def difference(self, x: torch.Tensor, tokens: list[int], exact: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.dtype), self._rows)[tokens].cpu().double() - exact


def dense_name(dtype: torch.dtype) -> str:
    return f"F.linear {str(dtype).removeprefix('torch.')}"


@dataclass
class Times:
    """What the calls of one contestant took, in microseconds per call."""

    us: list[float]

    @property
    def minimum(self) -> float:
        return min(self.us)

    @property
    def median(self) -> float:
        return median(self.us)


class Clock(Protocol):
    """Times what is started between its two calls."""

    min_sample_ns: int

    def start(self) -> None: ...

    def stop(self) -> float:
        """Waits until all that was started has ended; nanoseconds."""


class WallClock:
    """For devices that have finished when a call returns."""

    min_sample_ns = MIN_SAMPLE_NS

    def start(self) -> None:
        self._begin = time.perf_counter_ns()

    def stop(self) -> float:
        return time.perf_counter_ns() - self._begin


class MpsClock:
    """The GPU's own time, between two events that it passes.

    Calls are encoded before the GPU begins, and torch.mps.synchronize() takes 0.1 ms or more: neither counts. Samples
    are long, so that the events' own jitter doesn't either.
    """

    min_sample_ns = 20_000_000

    def start(self) -> None:
        torch.mps.synchronize()
        self._events = [torch.mps.event.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()

    def stop(self) -> float:
        begin, end = self._events
        end.record()
        torch.mps.synchronize()
        return begin.elapsed_time(end) * 1e6


def time_in_turn(calls: dict[str, Iterable[Callable[[], Any]]], seconds: float, clock: Clock) -> dict[str, Times]:
    """Runs all entries in turn, in random order, for about `seconds`; each goes through its own calls in a circle."""
    rings = {name: cycle(ring) for name, ring in calls.items()}
    order, shuffle = list(rings), random.Random(0).shuffle

    def sample(name: str, repeats: int) -> float:
        batch = list(islice(rings[name], repeats))
        clock.start()
        for call in batch:
            call()
        return clock.stop() / repeats

    def enough(name: str) -> int:
        """How many calls are a sample. The first estimates are of few calls, hence too long each."""
        repeats = 1
        for _ in range(CALIBRATIONS):
            missing = clock.min_sample_ns / max(1.0, sample(name, repeats) * repeats)
            if missing < 1.5:
                break
            repeats = round(repeats * min(missing, 100))
        return repeats

    repeats = {}
    for name in order:
        sample(name, 1)  # the first call allocates
        repeats[name] = enough(name)
    us = {name: [] for name in order}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(us[order[0]]) < MIN_ROUNDS:
        shuffle(order)
        for name in order:
            us[name].append(sample(name, repeats[name]) / 1e3)
    return {name: Times(us[name]) for name in calls}


def relative_errors(contestants: list[Contestant], x: torch.Tensor, matrix: torch.Tensor) -> Iterator[float]:
    """The relative L2 error of each against float64, over some rows of x and the weight's distinct rows [n, K]."""
    M = len(x)
    tokens = sorted({i * (M - 1) // max(1, REFERENCE_TOKENS - 1) for i in range(REFERENCE_TOKENS)})
    exact = x[tokens].cpu().double() @ matrix.cpu().double().T  # MPS has no float64
    for contestant in contestants:
        yield (contestant.difference(x, tokens, exact).norm() / exact.norm()).item()
