"""ggml's CPU backend as a peer of the benchmark, called through ctypes. `make ggml` builds it.

Only its public C interface is used: a graph of one ggml_mul_mat per copy of the weight. A weight lies in the plain GGUF
layout, where ggml itself chooses among its kernels (tiled ones for many rows), and in each of the CPU's extra buffer
types that takes it (repacked, AMX).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_void_p,
)
from functools import partial
from pathlib import Path

import torch

from .measure import Problem
from .memory import advise_huge_pages

# What ggml must have been built with for a fair comparison with our kernels of one instruction set, as ggml names it.
NEEDED_FEATURES = {
    "avx512_vnni": ("AVX2", "FMA", "AVX512", "AVX512_VNNI"),
    "avx_vnni": ("AVX2", "FMA", "AVX_VNNI"),
    "avx2": ("AVX2", "FMA"),
    "neon_dotprod": ("NEON", "DOTPROD"),
    "portable": (),
}

_F32 = 0  # ggml_type
_LOG_ERROR = 4  # ggml_log_level
_GRAPH_SIZE = 8  # nodes and leaves; a product has one node and two leaves


@CFUNCTYPE(None, c_int, c_char_p, c_void_p)
def _log_errors(level: int, text: bytes, _) -> None:
    """Instead of ggml's own log, which has a line for every weight that is repacked."""
    if level == _LOG_ERROR:
        sys.stderr.write(text.decode())


class _InitParams(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Feature(Structure):
    _fields_ = (("name", c_char_p), ("value", c_char_p))


_SIGNATURES = {  # result, arguments
    "ggml_version": (c_char_p,),
    "ggml_commit": (c_char_p,),
    "ggml_log_set": (None, c_void_p, c_void_p),
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_free": (None, c_void_p),
    "ggml_backend_get_default_buffer_type": (c_void_p, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_get_base": (c_void_p, c_void_p),
    "ggml_backend_buffer_get_size": (c_size_t, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_cpu_reg": (c_void_p,),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
}


class Ggml:
    """A built ggml.

    folder: where `libggml-cpu` lies, at any depth. threads: for each product. Raises FileNotFoundError without one.
    """

    name = "ggml"

    def __init__(self, folder: Path, threads: int):
        libraries = sorted(path for end in ("so", "dylib") for path in Path(folder).rglob(f"libggml-cpu.{end}"))
        if not libraries:
            raise FileNotFoundError(f"no libggml-cpu in {folder}")
        self.library = CDLL(str(libraries[0]))
        for function, (result, *arguments) in _SIGNATURES.items():
            getattr(self.library, function).restype = result
            getattr(self.library, function).argtypes = arguments
        self.library.ggml_log_set(_log_errors, None)
        self.version = self.library.ggml_version().decode()
        self.commit = self.library.ggml_commit().decode()
        self._registry = self.library.ggml_backend_cpu_reg()
        self.features = {feature.name.decode(): feature.value.decode() for feature in self._features()}
        self.backend = self.library.ggml_backend_cpu_init()
        self.library.ggml_backend_cpu_set_n_threads(self.backend, threads)

    def __del__(self):
        if getattr(self, "backend", None):
            self.library.ggml_backend_free(self.backend)

    def describe(self) -> dict:
        """What the report says about this peer."""
        return {"version": self.version, "commit": self.commit, "features": self.features}

    def refusal(self, isa: str) -> str | None:
        """Why a ratio to this ggml would be unfair when our kernels are those of `isa`; None if it is fair."""
        if isa not in NEEDED_FEATURES:
            return f"nothing is known of what ggml needs beside our {isa} kernels"
        lacking = [name for name in NEEDED_FEATURES[isa] if self.features.get(name, "0") == "0"]
        return f"this ggml lacks {', '.join(lacking)}, which our {isa} kernels use" if lacking else None

    def contestants(self, problem: Problem, copies: int, huge: bool) -> Iterator[Weights]:
        """The weight in every buffer type that can multiply it."""
        types = [self.library.ggml_backend_get_default_buffer_type(self.backend), *self._extra_buffer_types()]
        for buffer_type in types:
            weights = Weights(self, buffer_type, problem, copies)
            if weights.supported():
                weights.fill(problem.packed, huge)
                yield weights

    def _features(self) -> Iterator[_Feature]:
        yield from _until_null(
            self._procedure("ggml_backend_get_features", POINTER(_Feature))(self._registry), lambda item: item.name
        )

    def _extra_buffer_types(self) -> list[int]:
        device = self.library.ggml_backend_reg_dev_get(self._registry, 0)
        return list(_until_null(self._procedure("ggml_backend_dev_get_extra_bufts", POINTER(c_void_p))(device)))

    def _procedure(self, name: str, result: type) -> Callable:
        """A function of one pointer that the CPU backend offers by name."""
        address = self.library.ggml_backend_reg_get_proc_address(self._registry, name.encode())
        if not address:
            raise RuntimeError(f"ggml {self.version} has no {name}")
        return CFUNCTYPE(result, c_void_p)(address)


class Weights:
    """Copies of one weight [N, K] in one buffer type of ggml: a contestant of the benchmark."""

    group = Ggml.name
    dtype = torch.float32  # of x and y

    def __init__(self, ggml: Ggml, buffer_type: int, problem: Problem, copies: int):
        self.ggml, self.library, self.K, self.N = ggml, ggml.library, problem.K, problem.N
        self.name = f"ggml {self.library.ggml_backend_buft_name(buffer_type).decode()}"
        self._context = _Context(ggml, tensors=copies)
        self._weights = [self._context.tensor(problem.quant_type, self.K, self.N) for _ in range(copies)]
        self._context.allocate(buffer_type)

    def takes(self, M: int) -> bool:
        # From M = 2 on, ggml multiplies AMX buffers in tile registers that it sets up once and for all; torch, in the
        # same process, sets them up differently. (GCC 12 also compiles that set-up wrongly.)
        return M == 1 or self.name != "ggml AMX"

    def supported(self) -> bool:
        context = _Context(self.ggml, tensors=2)
        product = self.library.ggml_mul_mat(context.pointer, self._weights[0], context.tensor(_F32, self.K, 1))
        return self.library.ggml_backend_supports_op(self.ggml.backend, product)

    def fill(self, packed: torch.Tensor, huge: bool) -> None:
        """Writes the weight into every copy; ggml rearranges it for this buffer type."""
        self.weight_bytes = packed.nbytes
        if huge:
            advise_huge_pages(*self._context.memory())
        for weight in self._weights:
            self.library.ggml_backend_tensor_set(weight, packed.data_ptr(), 0, packed.nbytes)

    def calls(self, x: torch.Tensor) -> list[Callable[[], int]]:
        """One product x W^T for each copy; each returns ggml's status."""
        return self._products(x, self._weights)[0]

    def difference(self, x: torch.Tensor, tokens: list[int], exact: torch.Tensor) -> torch.Tensor:
        """y - exact in float64 for rows `tokens` of x and the first outputs; exact: [len(tokens), outputs]."""
        (multiply,), y = self._products(x, self._weights[:1])
        if multiply() != 0:
            raise RuntimeError(f"{self.name} failed to multiply [{x.shape[0]}, {self.K}] x [{self.K}, {self.N}]")
        values = torch.empty(x.shape[0], self.N)
        self.library.ggml_backend_tensor_get(y, values.data_ptr(), 0, values.nbytes)
        return values[tokens, : exact.shape[1]].double() - exact

    def _products(self, x: torch.Tensor, weights: list[int]) -> tuple[list[Callable[[], int]], int]:
        context = _Context(self.ggml, tensors=1 + len(weights), graphs=len(weights))
        tokens = context.tensor(_F32, self.K, x.shape[0])
        products = [self.library.ggml_mul_mat(context.pointer, weight, tokens) for weight in weights]
        graphs = [context.graph(product) for product in products]
        context.allocate(self.library.ggml_backend_get_default_buffer_type(self.ggml.backend))
        values = x.float().contiguous()
        self.library.ggml_backend_tensor_set(tokens, values.data_ptr(), 0, values.nbytes)
        calls = [partial(self.library.ggml_backend_graph_compute, self.ggml.backend, graph) for graph in graphs]
        for call in calls:
            call.context = context  # keeps the graph alive
        return calls, products[0]


class _Context:
    """A ggml context: descriptions of tensors and graphs, and the buffer that holds the tensors' data."""

    def __init__(self, ggml: Ggml, tensors: int, graphs: int = 0):
        self.library, self.buffer = ggml.library, None
        size = tensors * self.library.ggml_tensor_overhead()
        size += graphs * (self.library.ggml_graph_overhead_custom(_GRAPH_SIZE, False) + 64)
        self.pointer = self.library.ggml_init(_InitParams(size, None, True))

    def __del__(self):
        if self.buffer:
            self.library.ggml_backend_buffer_free(self.buffer)
        self.library.ggml_free(self.pointer)

    def tensor(self, ggml_type: int, columns: int, rows: int) -> int:
        return self.library.ggml_new_tensor_2d(self.pointer, ggml_type, columns, rows)

    def graph(self, result: int) -> int:
        graph = self.library.ggml_new_graph_custom(self.pointer, _GRAPH_SIZE, False)
        self.library.ggml_build_forward_expand(graph, result)
        return graph

    def allocate(self, buffer_type: int) -> None:
        self.buffer = self.library.ggml_backend_alloc_ctx_tensors_from_buft(self.pointer, buffer_type)
        if not self.buffer:
            raise MemoryError(f"ggml can't allocate in {self.library.ggml_backend_buft_name(buffer_type).decode()}")

    def memory(self) -> tuple[int, int]:
        """Address and size of the tensors' data."""
        library = self.library
        return library.ggml_backend_buffer_get_base(self.buffer), library.ggml_backend_buffer_get_size(self.buffer)


def _until_null(array, value=lambda item: item) -> Iterator:
    """The items of a C array that ends with a null one."""
    index = 0
    while value(array[index]):
        yield array[index]
        index += 1
