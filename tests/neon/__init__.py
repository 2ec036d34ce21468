"""Runs the CPU kernels of arm64 on any Linux machine: compiled by a cross compiler, run by qemu's emulation of a user.

    neon.run([neon.Case("linear", quant_type, packed, K, x=x, bias=bias), ...])    # a list of results

It shows that the results are right, and nothing about speed. The file of cases holds, for each case, the nine int64 of
Header in main.cpp and the bytes of weight, x and bias; the file of results what the operation returns, one after the
other.
"""

import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from metal_sim import toolchain

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# As setup.py has it, but linked into one file that needs no libraries of the other system, and with -O1: that compiles
# ten times faster than -O3.
FLAGS = ["-O1", "-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-static"]
OPERATIONS = ("linear", "dequantize", "interleave", "deinterleave", "quantize", "read")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """One call. weight: uint8 [N, row_bytes], or, interleaved, the same bytes in any shape; columns: K; x: [M, K];
    dtype: of the result, if there is no x."""

    operation: str
    quant_type: int
    weight: torch.Tensor
    columns: int
    interleaved: bool = False
    x: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32
    rows: int = 0

    def __post_init__(self):
        self.rows = self.rows or self.weight.shape[0]
        self.dtype = self.dtype if self.x is None else self.x.dtype

    def pack(self) -> bytes:
        header = (
            *(OPERATIONS.index(self.operation), int(self.quant_type), self.rows, self.columns),
            *(self.weight.numel() // self.rows, self.interleaved, DTYPES.index(self.dtype)),
            *(0 if self.x is None else self.x.shape[0], self.bias is not None),
        )
        return struct.pack("<9q", *header) + b"".join(map(to_bytes, (self.weight, self.x, self.bias)))

    def result(self, data: bytearray):
        """Takes its result off the front of the data: a tensor; of linear also whether each row of x was packed."""

        def take(shape: tuple, dtype: torch.dtype) -> torch.Tensor:
            size = torch.Size(shape).numel() * dtype.itemsize
            taken, data[:size] = data[:size], b""
            return torch.frombuffer(taken, dtype=dtype).reshape(shape)

        if self.operation == "linear":
            packed = take((self.x.shape[0],), torch.bool)
            return take((self.x.shape[0], self.rows), self.dtype), packed.tolist()
        if self.operation == "dequantize":
            return take((self.rows, self.columns), self.dtype)
        if self.operation == "read":
            return take((1,), torch.int32)
        return take((self.rows, self.weight.numel() // self.rows), torch.uint8)


def to_bytes(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()


@cache
def program() -> Path:
    """The compiled program; cached by content. Raises toolchain.Unavailable where a tool is missing."""
    for tool, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if not shutil.which(tool):
            raise toolchain.Unavailable(f"no {tool}: on Debian and Ubuntu, apt-get install {package}")
    command = [COMPILER, *FLAGS]
    version = toolchain.run([COMPILER, "--version"])

    def build(source: Path) -> Path:
        digest = toolchain.digest(version, *command, toolchain.run([*command, "-E", "-P", str(source)]))
        return toolchain.make(
            toolchain.cache_dir() / f"neon_{source.stem}_{digest}.o",
            lambda out: toolchain.run([*command, "-c", str(source), "-o", str(out)]),
        )

    cpu = ROOT / "csrc/cpu"
    sources = [HERE / "main.cpp", cpu / "kernels_portable.cpp", cpu / "kernels_neon.cpp"]
    objects = [str(build(source)) for source in sources]
    linked = toolchain.cache_dir() / f"neon_{toolchain.digest(*objects)}"
    return toolchain.make(linked, lambda out: toolchain.run([*command, *objects, "-o", str(out)]))


def execute(cases: Path, results: Path, isa: str, processor: str) -> subprocess.CompletedProcess:
    command = [EMULATOR, "-cpu", processor, str(program()), isa, str(cases), str(results)]
    return subprocess.run(command, capture_output=True, text=True)


def run(cases: list[Case], isa: str = "neon_dotprod", processor: str = "neoverse-n1") -> list:
    """Each case's result. Raises RuntimeError with the program's message where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "cases"), Path(folder, "results")
        given.write_bytes(b"".join(case.pack() for case in cases))
        done = execute(given, made, isa, processor)
        if done.returncode:
            raise RuntimeError(f"{isa} on {processor} ended with {done.returncode}: {done.stderr.strip()}")
        data = bytearray(made.read_bytes())
    results = [case.result(data) for case in cases]
    assert not data, f"{len(data)} bytes more than the results need"
    return results
