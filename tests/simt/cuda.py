"""The part of CUDA's driver interface that is needed here, through ctypes: no toolkit, only the driver's libcuda."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from statistics import median

MULTIPROCESSORS, L2_BYTES = 16, 38  # of CUdevice_attribute
CAPTURE_THREAD_LOCAL = 1
WARM_UP_MS = 20  # before anything is timed: clocks rise
BUFFERS, PARAMETER_BYTES = 13, 160  # msl/entry.h has the same


class CudaError(RuntimeError):
    """A call of the driver failed."""


class Unavailable(RuntimeError):
    """There is no driver or no GPU."""


class Gpu:
    """The first GPU. Memory lives until free_all()."""

    def __init__(self, library: str = "libcuda.so.1"):
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise Unavailable(f"no NVIDIA driver: {error}") from None
        if self._cuda.cuInit(0):
            raise Unavailable("no NVIDIA GPU")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.multiprocessors, self.l2_bytes = (self._attribute(n, device) for n in (MULTIPROCESSORS, L2_BYTES))
        self._stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._stream), 0)  # waits for the default stream, which copies
        self._events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in self._events:
            self._call("cuEventCreate", ctypes.byref(event), 0)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._memory: list[ctypes.c_uint64] = []

    def load(self, cubin: Path, kernels: list[str]) -> None:
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin.read_bytes())
        for name in kernels:
            self._functions[name] = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(self._functions[name]), module, name.encode())

    def allocate(self, nbytes: int) -> int:
        """An address of so many bytes, aligned to 256; there is nothing usable behind them."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._memory.append(address)
        return address.value

    def free_all(self) -> None:
        while self._memory:
            self._call("cuMemFree_v2", self._memory.pop())

    def write(self, address: int, array) -> None:
        """Copies a contiguous numpy array to the GPU."""
        source = array.ctypes.data_as(ctypes.c_void_p)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(array.nbytes))

    def read(self, address: int, array) -> None:
        """Copies from the GPU into a contiguous numpy array."""
        target = array.ctypes.data_as(ctypes.c_void_p)
        self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))

    def copy(self, to: int, address: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoD_v2", *map(ctypes.c_uint64, (to, address)), ctypes.c_size_t(nbytes))

    def launch(self, kernel: str, groups, threads, buffers: list[int], parameters: bytes) -> None:
        """Starts a kernel: groups and threads of a group are (x, y); buffers as Metal numbers them."""
        pointers = (ctypes.c_uint64 * BUFFERS)(*buffers)
        data = ctypes.create_string_buffer(parameters, PARAMETER_BYTES)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(pointers), ctypes.addressof(data))
        self._call(
            "cuLaunchKernel", self._functions[kernel], *map(ctypes.c_uint, (*groups, 1, *threads, 1, 0)),
            self._stream, arguments, None,
        )  # fmt: skip

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def time(self, launch: Callable[[int], None], launches: int, replays: int) -> tuple[float, float]:
        """Microseconds of one launch, median and minimum: of a graph of launch(0) .. launch(launches - 1)."""
        graph, runnable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, CAPTURE_THREAD_LOCAL)
        for i in range(launches):
            launch(i)
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(runnable), graph, ctypes.c_ulonglong(0))
        warm = 0.0
        while warm < WARM_UP_MS:
            warm += self._replay(runnable)
        us = [self._replay(runnable) * 1e3 / launches for _ in range(replays)]
        self._call("cuGraphExecDestroy", runnable)
        self._call("cuGraphDestroy", graph)
        return median(us), min(us)

    def _replay(self, graph: ctypes.c_void_p) -> float:
        """Milliseconds of one replay."""
        milliseconds = ctypes.c_float()
        begin, end = self._events
        self._call("cuEventRecord", begin, self._stream)
        self._call("cuGraphLaunch", graph, self._stream)
        self._call("cuEventRecord", end, self._stream)
        self._call("cuEventSynchronize", end)
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value

    def _attribute(self, number: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def _call(self, function: str, *arguments) -> None:
        status = getattr(self._cuda, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise CudaError(f"{function}: {text.value.decode() if text.value else status}")
