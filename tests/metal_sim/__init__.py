"""A simulated Apple GPU for PyTorch on Linux: `device="mps"` runs the shipped launcher and the shipped Metal kernels.

    import metal_sim
    metal_sim.install()                                # from now on torch has a device "mps"
    metal_sim.load(metal_sim.build([launcher_mm], ...))  # registers the launcher's operators

The launcher's Objective-C++ is compiled against stub headers (stubs/) and a small runtime (runtime/). Kernels are
compiled by clang when the launcher asks the device for them, and run thread by thread on the CPU, with every memory
access checked. It says nothing of speed, nor of Apple's own compiler. README.md says what is supported.
"""

import contextlib
import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from . import kernels
from .build import build_launcher, build_runtime
from .kernels import compile_metal
from .toolchain import ZIGLANG, CompileError, Unavailable

__all__ = [
    "ZIGLANG",
    "Binding",
    "CompileError",
    "Dispatch",
    "Unavailable",
    "build",
    "clear",
    "counters",
    "dispatches",
    "flushing_half_subnormals",
    "install",
    "install_or_skip",
    "launch",
    "load",
    "other_matrix_lanes",
    "without_selectors",
]

_NAME = "metal_sim_runtime"


def install():
    """Makes the "mps" device the simulated one, building what is out of date. Returns the runtime's module.

    Raises Unavailable, with one line that says why, where it can't be built; CompileError where a build fails.
    """
    if _NAME in sys.modules:  # whatever name this package was imported under
        return sys.modules[_NAME]
    if torch.backends.mps.is_built():
        raise Unavailable("this torch has an MPS device of its own")
    from .toolchain import clang

    clang()  # a missing compiler is better told now than at the first kernel
    spec = importlib.util.spec_from_file_location(_NAME, build_runtime())
    # Launchers and kernel libraries are resolved against the module's symbols.
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | ctypes.RTLD_GLOBAL)
    try:
        runtime = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(runtime)
    finally:
        sys.setdlopenflags(flags)
    runtime.set_compiler(compile_metal)
    sys.modules[_NAME] = runtime
    torch.UntypedStorage.mps = _storage_to_mps
    torch.backends.mps.is_available.cache_clear()  # it remembers what it was told before
    torch._C._has_mps = True  # torch.backends.mps.is_built(), and with it torch.mps and torch.accelerator
    torch._C._mps_get_name = lambda: "simulated Metal device"  # torch.backends.mps.get_name()
    return runtime


def install_or_skip():
    """install() for a test module: where it can't be, skips the module with one line. In CI that is a failure."""
    import pytest

    try:
        install()
    except Unavailable as error:
        if os.environ.get("CI") and not torch.backends.mps.is_built():
            pytest.fail(f"no simulated Metal device: {error}", pytrace=False)
        pytest.skip(f"no simulated Metal device: {error}", allow_module_level=True)


def _storage_to_mps(storage):
    """UntypedStorage.mps(), which torch.load and pickle call; torch's own knows MPS in macOS builds only."""
    data = torch.empty(storage.nbytes(), dtype=torch.uint8, device="mps")
    data.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return data.untyped_storage()


def build(sources, include_dirs=(), embedded=None, defines=None, libraries=()) -> Path:
    """Compiles a launcher's .mm (and .cpp) files into a shared library and returns its path; cached by content.

    include_dirs: searched for the sources' own headers. embedded: {file name: text} of generated headers, such as the
    one that holds the Metal source. defines: {macro: value}. libraries: shared libraries to link with, such as the
    extension that has the operators' schemas. Raises CompileError with the compiler's messages.
    """
    return build_launcher(
        [Path(s) for s in sources],
        [Path(d) for d in include_dirs],
        embedded or {},
        defines or {},
        [Path(p) for p in libraries],
    )


def load(library: Path):
    """Loads what build() made: its TORCH_LIBRARY blocks register their operators."""
    install()
    torch.ops.load_library(str(library))


@dataclass(frozen=True)
class Binding:
    """A bound buffer: its storage's data_ptr(), the offset bound, and the bytes from there to the buffer's end."""

    storage: int
    offset: int
    size: int


@dataclass(frozen=True)
class Dispatch:
    """One launch that a launcher made. Sizes are (x, y, z); `grid` counts threads, `groups` threadgroups."""

    kernel: str
    groups: tuple[int, int, int]
    threads: tuple[int, int, int]
    grid: tuple[int, int, int]
    buffers: dict[int, Binding]
    bytes: dict[int, bytes]
    threadgroup_memory: dict[int, int]


def dispatches() -> list[Dispatch]:
    """The launches since the last clear(), in order."""
    return [
        Dispatch(kernel, groups, threads, grid, {i: Binding(*b) for i, b in buffers.items()}, raw, memory)
        for kernel, groups, threads, grid, buffers, raw, memory in install().dispatches()
    ]


def counters() -> dict:
    """{"encoders", "commits": made by launchers since the last clear(); "dispatches"; "live": {class: objects}}."""
    runtime = install()
    return {**runtime.stream_counters(), "dispatches": len(runtime.dispatches()), "live": runtime.live_objects()}


def clear():
    """Forgets the dispatches and counts, and empties autorelease pools of this thread that an exception left."""
    install().clear()


@contextlib.contextmanager
def without_selectors(*names: str):
    """Inside, objects don't respond to these selectors: an older macOS. E.g. "setMathMode:", new in macOS 15."""
    runtime = install()
    for name in names:
        runtime.hide_selector(name, True)
    try:
        yield
    finally:
        for name in names:
            runtime.hide_selector(name, False)


@contextlib.contextmanager
def other_matrix_lanes(order: int = 1):
    """Inside, lane i holds the elements of 8x8 matrices that are lane i ^ order's on Apple's GPUs so far."""
    runtime = install()
    runtime.set_matrix_lane_order(order)
    try:
        yield
    finally:
        runtime.set_matrix_lane_order(0)


def flushing_half_subnormals():
    """Inside, kernels are compiled for a device that takes subnormal halfs for 0, which no known GPU of Apple's does.

    Pipelines that exist stay as they are. Raises Unavailable on other processors than x86-64.
    """
    if os.uname().machine != "x86_64":
        raise Unavailable("a device that flushes half subnormals is simulated on x86-64 only")
    return _flushing_half_subnormals()


@contextlib.contextmanager
def _flushing_half_subnormals():
    kernels.flush_half_subnormals = True
    try:
        yield
    finally:
        kernels.flush_half_subnormals = False


def launch(
    source: str, kernel: str, buffers, groups=None, threads=32, *, grid=None, threadgroup_memory=None, **options
):
    """Runs one kernel of a Metal source on MPS tensors, as torch.mps.compile_shader would: for tests of kernels.

    buffers: a list of tensors, or {argument index: tensor}; bound with their storage offset. groups: threadgroups, or
    grid: threads in all. Sizes are numbers or tuples. options: macros, language_version, constants of compile_metal.
    """
    runtime = install()

    def extent(n):
        n = n if isinstance(n, tuple) else (n,)
        return [*n, *[1] * (3 - len(n))]

    threads = extent(threads)
    grid = extent(grid) if grid is not None else [g * t for g, t in zip(extent(groups or 1), threads, strict=True)]
    buffers = buffers if isinstance(buffers, dict) else dict(enumerate(buffers))
    where = {i: (t.untyped_storage().data_ptr(), t.storage_offset() * t.element_size()) for i, t in buffers.items()}
    path = compile_metal(source, **options)
    runtime.launch(path, kernel, where, grid, threads, threadgroup_memory or {})
