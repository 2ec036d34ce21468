"""csrc/mps/fused_plan.h, compiled by itself: what is compiled and launched for several weights."""

import ctypes
import struct
from types import SimpleNamespace

import msl_check
import pytest
from formats import TYPES, block_size, type_size
from metal_sim import toolchain
from msl_check.opencl import metal_sources
from plans import compile_plan

NAMES = {quant_type.name: quant_type for quant_type in TYPES}
SOURCE = r"""
#include "fused_plan.h"
#include <cstring>
using namespace qgemv::mps;

struct Fused {
  char error[256], definitions[512], kernel[64];
  uint64_t grid[2], threadgroup[2], size;
  unsigned char params[256];
};

// arguments: for each weight its type, N, K, offset and bytes from row to row.
extern "C" void plan(const int64_t (*arguments)[5], int count, int dtype, Fused* r) {
  std::vector<Weight> weights;
  std::vector<uint32_t> biases;
  for (int i = 0; i < count; ++i) {
    const int64_t* a = arguments[i];
    weights.push_back({format_index(a[0]), a[1], a[2], uint64_t(a[3]), uint64_t(a[4])});
    biases.push_back(uint32_t(i));
  }
  try {
    const auto plan = plan_fused(weights, {1, 0, Dtype(dtype)}, biases, {});
    strcpy(r->definitions, plan.kernel.definitions().c_str());
    strcpy(r->kernel, plan.kernel.name());
    r->grid[0] = plan.grid.x, r->grid[1] = plan.grid.y;
    r->threadgroup[0] = plan.threadgroup.x, r->threadgroup[1] = plan.threadgroup.y;
    memcpy(r->params, &plan.params, r->size = sizeof plan.params);
  } catch (const std::length_error& e) {
    strncpy(r->error, e.what(), sizeof r->error - 1);
  }
}
extern "C" int cases_are_gemvs() {
  int right = 0;
  for (int i = first_kernel(gemv); i < first_kernel(dequantize); ++i) right += gemv_kernel(i).index() == i;
  return right == first_kernel(dequantize) - first_kernel(gemv);
}
"""


class Fused(ctypes.Structure):
    _fields_ = (
        *(("error", ctypes.c_char * 256), ("definitions", ctypes.c_char * 512), ("kernel", ctypes.c_char * 64)),
        *(("grid", ctypes.c_uint64 * 2), ("threadgroup", ctypes.c_uint64 * 2), ("size", ctypes.c_uint64)),
        ("params", ctypes.c_ubyte * 256),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_plan(SOURCE, tmp_path_factory.mktemp("fused_plan"))


@pytest.fixture(scope="module")
def plan(library):
    """plan((type, N, K[, offset]), ...): the launch of these weights."""

    def plan(*weights, dtype=1):
        rows = []
        for name, N, K, *offset in weights:
            row_bytes = K // block_size(NAMES[name]) * type_size(NAMES[name])
            rows += [int(NAMES[name]), N, K, *(offset or [0]), row_bytes]
        result = Fused()
        library.plan((ctypes.c_int64 * len(rows))(*rows), len(weights), dtype, ctypes.byref(result))
        if result.error:
            raise OverflowError(result.error.decode())
        parts = [struct.unpack_from("<QQIIIIII", bytes(result.params), 40 * i) for i in range(result.size // 40)]
        fields = ("row_bytes", "x_stride", "N", "K", "bias", "M", "groups", "case")
        return SimpleNamespace(
            kernel=result.kernel.decode(),
            definitions=result.definitions.decode(),
            grid=tuple(result.grid),
            threadgroup=tuple(result.threadgroup),
            parts=[SimpleNamespace(**dict(zip(fields, part, strict=True))) for part in parts],
        )

    return plan


def test_cases_name_gemv_kernels(library):
    assert library.cases_are_gemvs() == 1


def test_two_types(plan):
    launch = plan(("Q5_K", 1024, 4096), ("Q4_K", 4096, 4096), ("Q5_K", 5, 4096))
    assert launch.definitions == (
        "#define QGEMV_SIMDGROUPS 4\n#define QGEMV_CASES(_) _(0, Q4_K, Aligned, 8, 2) _(1, Q5_K, Aligned, 8, 4)\n"
    )
    assert launch.kernel == "fused_half" and launch.threadgroup == (128, 1)
    groups = [1024 // 8, 4096 // 16, 1]
    assert [part.groups for part in launch.parts] == [*groups, 0]
    assert [part.case for part in launch.parts[:3]] == [1, 0, 1]
    assert [part.bias for part in launch.parts[:3]] == [0, 1, 2]
    assert [(part.N, part.K, part.row_bytes) for part in launch.parts[:3]] == [
        *((1024, 4096, 2816), (4096, 4096, 2304), (5, 4096, 2816))
    ]
    assert launch.grid == (128 * sum(groups), 1)


def test_the_order_of_weights_makes_no_other_library(plan):
    weights = ("Q6_K", 9, 512), ("Q4_K", 9, 512), ("Q8_0", 9, 512, 1)
    assert plan(*weights).definitions == plan(*reversed(weights)).definitions == plan(*weights, weights[0]).definitions
    assert plan(*weights).definitions.count("_(") == len(weights)


@pytest.mark.parametrize("dtype, name", [*enumerate(("fused_float", "fused_half", "fused_bfloat"))])
def test_type_of_x(plan, dtype, name):
    assert plan(("Q4_0", 1, 32), ("Q4_0", 2, 32), dtype=dtype).kernel == name


def test_limits(plan):
    with pytest.raises(OverflowError, match=r"number of threadgroups = .* is more than"):
        plan(*[("Q4_0", 2**28, 32)] * 4)
    with pytest.raises(OverflowError, match="linear: N = "):
        plan(("Q4_0", 1, 32), ("Q4_0", 2**31, 32))


def test_metal_accepts_what_is_compiled(plan):
    try:
        msl_check.libclang()
        toolchain.clang()
    except (msl_check.Unavailable, toolchain.Unavailable) as error:
        pytest.skip(str(error))
    weights = ("IQ4_XS", 4096, 4096), ("Q5_K", 64, 4096), ("Q8_0", 9, 4096, 1), ("Q4_K", 9, 4096)
    source = plan(*weights).definitions + metal_sources()["fused"]
    assert msl_check.check(source, {"QGEMV_TYPE": "half"}) == []
