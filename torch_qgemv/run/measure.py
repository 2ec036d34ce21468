"""What a model costs while it talks: memory, load time, tokens per second; and the dequantized model beside it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..modules import PackedModule, QuantLinear
from .text import generate, load, logits_of, unpack

REPEATS, STEPS = 5, 16  # the best of so many runs of so many tokens is measured
COMPARED_TOKENS = 64


class Clock:
    """A streamer that notes when generation began and when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass
class Column:
    """One column of the table. speed: tokens per second of the decode. lines: what is measured -> its text."""

    speed: float
    lines: dict[str, str]


@dataclass
class Comparison:
    """A packed model and its dequantized float32 one. print() says how they differ.

    speedup: how many times as fast the decode is. packed, dequantized: ids of the greedy texts. difference: the largest
    between the logits over so many `positions`, the prompt and the packed model's text.
    """

    speedup: float
    packed: list[int]
    dequantized: list[int]
    positions: int
    difference: float
    tokenizer: Any

    @property
    def equal(self) -> bool:
        return self.packed == self.dequantized

    def __str__(self) -> str:
        lines = [
            f"decode: {self.speedup:.2f} times the speed of the dequantized model",
            f"logits over {self.positions} tokens: at most {self.difference:.1e} from those of the dequantized float32 "
            "model",
        ]
        if self.equal:
            lines.append(f"The greedy text of {len(self.packed)} tokens equals that of the dequantized float32 model.")
        else:
            where = next(i for i, (a, b) in enumerate(zip(self.packed, self.dequantized, strict=True)) if a != b)
            ours, theirs = (self.tokenizer.decode(ids[where : where + 8]) for ids in (self.packed, self.dequantized))
            lines.append(f"The greedy texts differ from token {where} on: packed {ours!r}, dequantized {theirs!r}")
        return "\n".join(lines)


def best_seconds(function: Callable[[], Any]) -> float:
    """The shortest of several runs: other programs only ever add to it."""
    seconds = []
    for _ in range(4 * REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def read_bandwidth(size: int) -> float:
    """Bytes per second of a pure read of `size` bytes of memory, with the threads that the operators use."""
    data = torch.ones(size, dtype=torch.uint8)
    return size / best_seconds(lambda: torch.ops.torch_qgemv._read(data))


def linear_seconds(layers: list[nn.Module], dtype: torch.dtype, device: torch.device) -> float:
    """Time that the linear layers alone take for one token."""
    calls = [(layer, torch.randn(1, 1, layer.in_features, dtype=dtype, device=device)) for layer in layers]

    def run() -> None:
        outputs = [layer(x) for layer, x in calls]
        outputs[-1].sum().item()  # waits until the device is done

    return best_seconds(run)


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def resident_bytes() -> int:
    """Memory of this process, mapped files included."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) * 1024


def packed_modules(model: nn.Module) -> list[PackedModule]:
    return [module for module in model.modules() if isinstance(module, PackedModule)]


def describe_layers(model: nn.Module) -> str:
    types = Counter(module.quant_type.name for module in packed_modules(model))
    return ", ".join(f"{count} {name}" for name, count in types.items())


@torch.inference_mode()
def measure(name: str, model: Any, ids: torch.Tensor, load_seconds: float) -> Column:
    """Decodes STEPS tokens after the prompt `ids`, REPEATS times."""
    clocks = [Clock() for _ in range(REPEATS)]
    for clock in clocks:
        generate(model, ids, STEPS + 1, clock, eos_token_id=None)
    resident = resident_bytes()
    prefill = min(clock.times[1] - clock.times[0] for clock in clocks)
    step = min(clock.times[-1] - clock.times[1] for clock in clocks) / STEPS
    layers = [module for module in model.modules() if isinstance(module, (QuantLinear, nn.Linear))]
    read = sum((layer.stored if isinstance(layer, QuantLinear) else layer.weight).nbytes for layer in layers)
    bandwidth = read_bandwidth(read) if model.device.type == "cpu" else None
    lines = {
        "": f"{name} {str(model.dtype).removeprefix('torch.')}",
        "packed weights": f"{unique_bytes(module.stored for module in packed_modules(model)) / 1e6:.1f} MB",
        "other weights": f"{unique_bytes(model.parameters()) / 1e6:.1f} MB",
        "resident memory": f"{resident / 1e6:.0f} MB",
        "load": f"{load_seconds:.2f} s",
        "prefill": f"{ids.shape[1] / prefill:.1f} tokens/s",
        "decode": f"{1 / step:.1f} tokens/s",
        "weights read while decoding": f"{read / step / 1e9:.2f} GB/s",
        "a pure read of as many bytes": f"{bandwidth / 1e9:.2f} GB/s" if bandwidth else "not measured",
        "percent of the pure read": f"{100 * read / step / bandwidth:.1f} %" if bandwidth else "not measured",
        "share of a step in linear layers": f"{100 * linear_seconds(layers, model.dtype, model.device) / step:.0f} %",
    }
    return Column(1 / step, lines)


def measure_dequantized(
    path: Path, device: torch.device, ids: torch.Tensor, text: list[int]
) -> tuple[Column, list[int], torch.Tensor]:
    """The column of the dtype in which the dequantized model decodes fastest; the greedy text of the float32 one, and
    its logits over `text`."""
    columns = []
    for dtype in (torch.bfloat16, torch.float32):
        start = time.perf_counter()
        model = unpack(load(path, device, dtype)[0])
        columns.append(measure("dequantized", model, ids, time.perf_counter() - start))
        if dtype == torch.float32:
            own, logits = generate(model, ids, COMPARED_TOKENS, eos_token_id=None), logits_of(model, ids, text)
        del model
        gc.collect()
    return max(columns, key=lambda column: column.speed), own, logits


def compare(
    path: Path, device: torch.device, tokenizer: Any, ids: torch.Tensor, packed: Column
) -> tuple[Column, Comparison]:
    """The dequantized model's column, and how the packed float32 model differs from it after the prompt `ids`."""
    model = load(path, device, torch.float32)[0]
    text = generate(model, ids, COMPARED_TOKENS, eos_token_id=None)
    logits = logits_of(model, ids, text)
    del model
    gc.collect()  # its memory would count as the dequantized model's
    column, expected, exact = measure_dequantized(path, device, ids, text)
    difference = (logits - exact).abs().max().item()
    return column, Comparison(packed.speed / column.speed, text, expected, len(logits), difference, tokenizer)


def print_table(columns: list[Column]) -> None:
    for name in columns[0].lines:
        print(f"{name:34}" + "".join(f"{column.lines[name]:>24}" for column in columns))
