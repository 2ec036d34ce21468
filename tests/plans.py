"""The plans of csrc/mps as libraries for Python."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

from formats import block_size, type_size

ROOT = Path(__file__).parent.parent
SOURCE = r"""
#include "experts_plan.h"
#include "metal_sources.inc"
#include <cstring>
using namespace qgemv::mps;

struct Result {
  char error[256], kernel[64];
  uint64_t grid[2], threadgroup[2], size;
  unsigned char params[64];
};

template <typename P>
void fill(Result* r, const Plan<P>& plan) {
  strcpy(r->kernel, plan.kernel.name());
  r->grid[0] = plan.grid.x, r->grid[1] = plan.grid.y;
  r->threadgroup[0] = plan.threadgroup.x, r->threadgroup[1] = plan.threadgroup.y;
  r->size = sizeof(P);
  memcpy(r->params, &plan.params, sizeof(P));
}

Tuning tuning;

struct Arguments {
  int64_t family, quant_type, N, K, offset, row_bytes, count, x_stride, dtype, extra;
};

enum { linear = 100, linear_of_unknown_lanes, linear_transposed };

extern "C" void plan(const Arguments* a, Result* r) {
  const Weight w{format_index(a->quant_type), a->N, a->K, uint64_t(a->offset), uint64_t(a->row_bytes)};
  const Dtype dtype = Dtype(a->dtype);
  try {
    const Rows x{a->count, a->x_stride, dtype};
    const int variant = choose_variant(w, w.N, dtype, tuning);
    if (a->family == gemv) fill(r, plan_gemv(w, a->count, a->x_stride, dtype, uint32_t(a->extra), variant));
    if (a->family == linear) fill(r, plan_linear(w, x, uint32_t(a->extra), true, tuning));
    if (a->family == linear_of_unknown_lanes) fill(r, plan_linear(w, x, uint32_t(a->extra), false, tuning));
    if (a->family == expert_gemv) fill(r, plan_expert_gemv({w, a->extra, 0}, {a->count, 1, 8}, x, tuning));
    if (a->family == linear_transposed) fill(r, plan_transposed(w, x));
    if (a->family == dequantize) fill(r, plan_dequantize(w, dtype));
    if (a->family == embedding) fill(r, plan_embedding(w, a->count, uint32_t(a->extra), dtype));
  } catch (const std::length_error& e) {
    strncpy(r->error, e.what(), sizeof r->error - 1);
  }
}
extern "C" const char* source(int i) {
  const char* const sources[] = {gemv_metal,   dequantize_metal, rows_metal,        tiles_metal,
                                 matmul_metal, transposed_metal, expert_gemv_metal, experts_metal};
  return i < source_count ? sources[i] : nullptr;
}
extern "C" const char* name(int i) { return i < kernel_count ? kernel_names[i] : nullptr; }
extern "C" int needs_order(int64_t M) { return needs_lane_order(M); }
extern "C" int64_t columns(int64_t N) { return grad_y_columns(N); }
extern "C" int wanted(uint32_t most_rows, int64_t N, int64_t K, uint32_t cores) {
  return choose_gemv(most_rows, N, K, cores);
}
extern "C" int tune(int64_t quant_type, int dtype, int64_t N, int64_t K, int variant) {
  return tuning.add(format_index(quant_type), dtype, N, K, variant);
}
extern "C" int tuned(int64_t quant_type, int dtype, int64_t N, int64_t K) {
  return tuning.find(format_index(quant_type), dtype, N, K).value_or(-1);
}
extern "C" void forget() { tuning = {}; }
extern "C" const char* shape_name(int i) { return i < gemv_variants ? gemv_names[i] : nullptr; }
extern "C" const uint32_t* shape(int i) { return i < gemv_variants ? &gemv_shapes[i].rows : nullptr; }
extern "C" int aligned(uint64_t offset, uint64_t row_bytes) { return x_is_aligned(offset, row_bytes); }
"""

FAMILIES = [
    "gemv",
    "dequantize",
    "embedding",
    "rows2",
    "rows3",
    "rows4",
    "tiles",
    "matmul32",
    "matmul64",
    "transposed32",
    "transposed64",
    "expert_gemv",
    "routes",
    "expert_tiles",
    "expert_matmul",
    "expert_transposed",
]
OPERATORS = ("linear", "linear of unknown lanes", "linear_transposed")


def compile_plan(source: str, folder: Path) -> ctypes.CDLL:
    """A library of C++ that includes plans; `folder` may hold generated headers."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler, "a C++ compiler has built the extension; now there is none"
    path, out = folder / "plan.cpp", folder / "plan.so"
    path.write_text(source)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'csrc/mps'}", f"-I{folder}"]
    subprocess.run([compiler, *flags, path, "-o", out], check=True)
    return ctypes.CDLL(str(out))


def load_embed():
    """metal/embed.py as a module."""
    spec = importlib.util.spec_from_file_location("embed", ROOT / "metal/embed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch_plan(folder: Path) -> ctypes.CDLL:
    """The library of SOURCE."""
    load_embed().write(folder / "metal_sources.inc")
    library = compile_plan(SOURCE, folder)
    library.name.restype = library.source.restype = library.shape_name.restype = ctypes.c_char_p
    library.columns.restype = ctypes.c_int64
    library.columns.argtypes = library.needs_order.argtypes = [ctypes.c_int64]
    library.shape.restype = ctypes.POINTER(ctypes.c_uint32)
    library.tune.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    library.tuned.argtypes = library.tune.argtypes[:4]
    library.wanted.argtypes = [ctypes.c_uint32, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32]
    library.aligned.argtypes = [ctypes.c_uint64] * 2
    return library


class Result(ctypes.Structure):
    _fields_ = [
        ("error", ctypes.c_char * 256),
        ("kernel", ctypes.c_char * 64),
        ("grid", ctypes.c_uint64 * 2),
        ("threadgroup", ctypes.c_uint64 * 2),
        ("size", ctypes.c_uint64),
        ("params", ctypes.c_ubyte * 64),
    ]


def plan_launch(
    library, family, quant_type, N, K, *, offset=0, row_bytes=None, count=1, x_stride=0, dtype=1, extra=0
) -> SimpleNamespace:
    """One launch, by launch_plan()'s library. Raises OverflowError for what the plan refuses."""
    row_bytes = K // block_size(quant_type) * type_size(quant_type) if row_bytes is None else row_bytes
    family = FAMILIES.index(family) if family in FAMILIES else 100 + OPERATORS.index(family)
    arguments = (ctypes.c_int64 * 10)(family, int(quant_type), N, K, offset, row_bytes, count, x_stride, dtype, extra)
    result = Result()
    library.plan(arguments, ctypes.byref(result))
    if result.error:
        raise OverflowError(result.error.decode())
    return SimpleNamespace(
        kernel=result.kernel.decode(),
        grid=tuple(result.grid),
        threadgroup=tuple(result.threadgroup),
        params=bytes(result.params[: result.size]),
    )
