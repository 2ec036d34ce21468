"""The Metal kernels for an NVIDIA GPU (tests/simt): they compile, and the host part launches and judges them rightly.

Without a GPU: the CUDA driver is a stand-in whose launches Python computes.
"""

import ctypes
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from metal_sim import toolchain
from msl_check.opencl import metal_sources
from simt import build, cases, cuda, nvptx, run

DRIVER = r"""
#include <stdlib.h>
#include <string.h>
typedef void (*Launch)(const char* kernel, const unsigned* sizes, void* const* arguments);
static Launch launch;
static char names[256][96];
static int count, launches;
void fake_launch(Launch f) { launch = f; }
int fake_launches(void) { return launches; }
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int* d, int i) { return *d = 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { *c = names; return 0; }
int cuCtxSetCurrent(void* c) { return c != names; }
int cuDeviceGetName(char* s, int n, int d) { strcpy(s, "stand-in"); return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = a; return 0; }
int cuStreamCreate(void** s, unsigned f) { *s = names; return 0; }
int cuEventCreate(void** e, unsigned f) { *e = names; return 0; }
int cuModuleLoadData(void** m, const char* image) { *m = names; return memcmp(image, "\177ELF", 4); }
int cuModuleGetFunction(void** f, void* m, const char* name) { *f = strcpy(names[count++], name); return 0; }
int cuMemAlloc_v2(unsigned long* p, size_t n) {
  *p = (unsigned long)aligned_alloc(256, (n + 255) / 256 * 256);
  return 0;
}
int cuMemFree_v2(unsigned long p) { free((void*)p); return 0; }
int cuMemcpyHtoD_v2(unsigned long to, const void* from, size_t n) { memcpy((void*)to, from, n); return 0; }
int cuMemcpyDtoH_v2(void* to, unsigned long from, size_t n) { memcpy(to, (void*)from, n); return 0; }
int cuMemcpyDtoD_v2(unsigned long to, unsigned long from, size_t n) { memcpy((void*)to, (void*)from, n); return 0; }
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  const unsigned sizes[] = {gx, gy, gz, tx, ty, tz, shared};
  ++launches;
  launch(f, sizes, arguments);
  return stream != names;
}
int cuStreamSynchronize(void* s) { return 0; }
int cuStreamBeginCapture_v2(void* s, int mode) { return mode != 1; }
int cuStreamEndCapture(void* s, void** g) { *g = names; return 0; }
int cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long f) { *e = g; return 0; }
int cuGraphExecDestroy(void* e) { return 0; }
int cuGraphDestroy(void* g) { return 0; }
int cuGraphLaunch(void* e, void* s) { return 0; }
int cuEventRecord(void* e, void* s) { return 0; }
int cuEventSynchronize(void* e) { return 0; }
int cuEventElapsedTime(float* ms, void* a, void* b) { *ms = 1; return 0; }
int cuGetErrorString(int status, const char** text) { *text = "an illegal address"; return 0; }
"""
LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))
TYPES = ("Q4_K", "IQ4_XS")
SHAPES = ((512, 70), (1024, 5))


def skip_without(tool):
    try:
        tool()
    except toolchain.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def compiler():
    skip_without(toolchain.clang)


@pytest.fixture(scope="module")
def built(tmp_path_factory, compiler):
    """What `build` writes, for two formats and small shapes."""
    skip_without(nvptx.ptxas)
    folder = tmp_path_factory.mktemp("simt") / "built"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "format_names", lambda: list(TYPES))
        patch.setattr(cases, "CHECKED_SHAPES", ((768, 37),))
        assert build.build(folder, "sm_90", list(TYPES), list(SHAPES)) == 0
    return folder


@pytest.fixture
def gpu(tmp_path):
    """A GPU whose launches `computes` makes; gpu.computes may be replaced."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    (tmp_path / "cuda.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "cuda.so", tmp_path / "cuda.c"], check=True)
    gpu = cuda.Gpu(str(tmp_path / "cuda.so"))
    gpu.computes = multiply
    gpu.seen = []

    def launch(kernel, sizes, arguments):
        buffers = list((ctypes.c_uint64 * cuda.BUFFERS).from_address(arguments[0]))
        parameters = ctypes.string_at(arguments[1], cuda.PARAMETER_BYTES)
        gpu.seen.append((kernel.decode(), tuple(sizes[:7]), buffers, parameters))
        gpu.computes(*gpu.seen[-1])

    gpu.callback = LAUNCH(launch)  # kept alive
    gpu._cuda.fake_launch(gpu.callback)
    return gpu


def array(address, dtype, shape):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype).reshape(shape)


def multiply(kernel, sizes, buffers, parameters):
    """y = x W^T + bias as the kernel of that name computes it, from what it finds in memory."""
    if kernel == "read":
        return
    operator, quant_type, dtype = (kernel.removesuffix("_plain").replace("IQ4_XS", "IQ4-XS").replace("Q4_K", "Q4-K")
                                   .split("_")[:3])  # fmt: skip
    quant_type = gguf.GGMLQuantizationType[quant_type.replace("-", "_")]
    row_bytes, x_stride = np.frombuffer(parameters, np.uint64, 2)
    N, _, bias_type, rows = np.frombuffer(parameters, np.uint32, 4, 16)
    M = max(sizes[1], int(rows))  # a row of the grid each, or all in one launch
    weight = array(buffers[0], np.uint8, (int(N), int(row_bytes)))
    matrix = gguf.quants.dequantize(weight, quant_type).astype(np.float64)
    x = run.values(array(buffers[1], run.ITEM[dtype], (M, int(x_stride))), dtype)
    exact = x @ matrix.T
    if bias_type:
        exact = exact + array(buffers[2], np.float32, (int(N),))
    y = array(buffers[2 if operator == "published" else 3], run.ITEM[dtype], exact.shape)
    y[:] = cases.rounded(exact.astype(np.float32), dtype)[0]


@pytest.mark.parametrize("source", metal_sources())
def test_sources_compile_for_another_gpu(compiler, source):
    text = nvptx.preprocess(metal_sources()[source], "Q4_K", "half")
    names = nvptx.kernel_names(text)
    assert names
    ptx = nvptx.compile_ptx(text, names, "sm_90")
    assert {name for name in names if f".visible .entry {name}(" in ptx} == names


def test_threadgroup_memory_is_shared_memory(compiler):
    text = nvptx.preprocess(metal_sources()["gemv"], "IQ4_XS", "half")
    ptx = nvptx.compile_ptx(text, {name for name in nvptx.kernel_names(text) if "plain" not in name}, "sm_90")
    assert "ld.shared" in ptx and "st.shared" in ptx and "bar.sync" in ptx


def test_only_the_kernels_asked_for_are_compiled(compiler):
    text = nvptx.preprocess(metal_sources()["bench"], "Q4_K", "half")
    ptx = nvptx.compile_ptx(text, {"read"}, "sm_90")
    assert ptx.count(".entry") == 1
    assert "ld.global.v4.u32" in ptx or "ld.global.v4.b32" in ptx, "16 bytes a load, and known to be of global memory"
    assert "shfl.sync" in ptx


def test_what_ptxas_reports_is_read():
    report = (
        "ptxas info : Compiling entry function 'a' for 'sm_90'\nptxas info : Function properties for a\n"
        "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info : Used 95 registers, used 1 barriers, 1028 bytes smem, 128 bytes cmem[0]\n"
        "ptxas info : Compiling entry function 'b' for 'sm_90'\n    0 bytes stack frame\n"
        "ptxas info : Used 7 registers\n"
    )
    assert nvptx.parse_report(report) == {
        "a": {"registers": 95, "stack_bytes": 8, "shared_bytes": 1028},
        "b": {"registers": 7, "stack_bytes": 0, "shared_bytes": 0},
    }


def test_every_launch_has_a_kernel_of_the_plan(built):
    plan = json.loads((built / "launches.json").read_text())
    kernels = {kernel for cubin in plan["cubins"].values() for kernel in cubin}
    assert {case["kernel"] for case in plan["cases"]} < kernels
    assert all((built / name).read_bytes().startswith(b"\x7fELF") for name in plan["cubins"])
    names = {case["kernel"] for case in plan["cases"] if not case["timed"]}
    for dtype in cases.DTYPES:
        assert {f"gemv_Q4_K_{dtype}_plain", f"gemv_IQ4_XS_{dtype}_plain", f"published_Q4_K_{dtype}"} <= names


def test_kernels_with_matrices_are_checked_and_not_timed(tmp_path, compiler, monkeypatch, capsys):
    skip_without(nvptx.ptxas)
    monkeypatch.setattr(build, "format_names", lambda: ["Q8_0"])
    monkeypatch.setattr(cases, "CHECKED_SHAPES", ((256, 3),))
    monkeypatch.setattr(cases, "ROWS_OF_X", (1,))
    sources = metal_sources()
    sources["gemv"] += "\ntypedef simdgroup_matrix<float, 8, 8> Unused;\n"
    monkeypatch.setattr(build, "metal_sources", lambda: sources)
    assert build.build(tmp_path / "built", "sm_90", ["Q8_0"], [(256, 3)]) == 0
    assert "as their 8x8 matrices are emulated: gemv_Q8_0_float" in capsys.readouterr().out
    plan = json.loads((tmp_path / "built/launches.json").read_text())
    assert plan["cases"]
    assert not any(case["timed"] for case in plan["cases"])


MATRICES = """
using namespace metal;
kernel void multiply(device const float* a [[buffer(0)]], device const half* b [[buffer(1)]],
                     device float* c [[buffer(2)]]) {
  threadgroup float tile[64];
  simdgroup_matrix<float, 8, 8> left, product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_matrix<half, 8, 8> right;
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8, ulong2(0), true);
  simdgroup_multiply_accumulate(product, left, right, product);
  product.thread_elements()[0] += 1.0f;
  simdgroup_store(product, tile, 8);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(product, tile, 8);
  simdgroup_store(product, c, 8);
}
"""


def test_matrices_are_multiplied_by_shuffles(compiler, tmp_path):
    text = nvptx.preprocess("#include <metal_stdlib>\n" + MATRICES, "Q8_0", "half")
    assert nvptx.has_matrices(text)
    ptx = nvptx.compile_ptx(text, {"multiply"}, "sm_90")
    assert ptx.count("shfl.sync.idx") == (2 + 1) * 8, "words of two floats, and of two halfs, for each k"
    assert ptx.count("fma.rn.f32") == 2 * 8


def test_each_element_of_a_matrix_has_one_lane(tmp_path):
    """msl_row, msl_column and msl_holder, compiled for this machine."""
    text = (Path(nvptx.__file__).parent / "msl/simdgroup_matrix.h").read_text()
    functions = "\n".join(re.findall(r"^MSL_INLINE uint msl_[^}]*}", text, re.M))
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "place.cpp", tmp_path / "place.so"
    source.write_text(f'typedef unsigned uint;\n#define MSL_INLINE extern "C"\n{functions}\n')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    place = ctypes.CDLL(str(library))
    elements = {(place.msl_row(lane), place.msl_column(lane) + i): lane for lane in range(32) for i in range(2)}
    assert len(elements) == 64
    assert all(place.msl_holder(*at) == lane for at, lane in elements.items())
    assert elements[0, 1] == 0 and elements[0, 2] == 1 and elements[1, 0] == 2 and elements[0, 4] == 8


@pytest.mark.parametrize("timed", [True, False])
def test_right_results_are_right_and_timed(built, gpu, monkeypatch, timed):
    monkeypatch.setattr(run, "ROTATE", 10**5)
    printed = []
    result = run.run(built, gpu, timed, printed.append)
    expected = [case for case in json.loads((built / "launches.json").read_text())["cases"] if case["timed"] == timed]
    assert [case["kernel"] for case in result["cases"]] == [case["kernel"] for case in expected]
    assert all(0 <= case["error"] <= 1 for case in result["cases"])
    assert max(case["error"] for case in result["cases"]) > 0.5, "the bound is near what rounding costs"
    for case in result["cases"]:
        assert case["registers"] > 0
        if timed:
            copies = min(max(-(-(10**5) // (case["N"] * case["row_bytes"])), 3), 64)
            assert case["us"] == pytest.approx(1000 / max(run.LAUNCHES, copies))
            assert case["percent_of_read"] == pytest.approx(100)
    if timed:
        assert result["reads"].keys() == {f"{t} {K}x{N}" for t in TYPES for K, N in SHAPES}
        weights = {buffers[0] for kernel, _, buffers, _ in gpu.seen if kernel == result["cases"][0]["kernel"]}
        assert len(weights) > 1, "launches go round the copies"
        text = "\n".join(run.summary(result))
        assert "published" in text and "512x70" in text and "100.0" in text
    else:
        assert printed == []


def test_launches_are_as_planned(built, gpu):
    plan = json.loads((built / "launches.json").read_text())
    run.run(built, gpu, False, print)
    for case, (kernel, sizes, buffers, parameters) in zip(
        (case for case in plan["cases"] if not case["timed"]), gpu.seen, strict=True
    ):
        assert kernel == case["kernel"]
        assert sizes == (*case["groups"], 1, *case["threads"], 1, 0)
        assert buffers[0] % 256 == case["offset"]
        assert parameters.hex().startswith(case["params"])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_wrong_result_is_seen(built, gpu, dtype):
    def wrong(kernel, sizes, buffers, parameters):
        multiply(kernel, sizes, buffers, parameters)
        if f"Q4_K_{dtype}" in kernel and "published" not in kernel:
            y = array(buffers[3], run.ITEM[dtype], (1,))
            y[0] = 0x7FC0 if dtype == "bfloat" else y[0] * type(y[0])(1.01)

    gpu.computes = wrong
    printed = []
    result = run.run(built, gpu, False, printed.append)
    for case in result["cases"]:
        changed = f"Q4_K_{dtype}" in case["kernel"] and case["operator"] != "published"
        assert (case["error"] > 1) == changed, case["kernel"]
    assert printed and all("WRONG" in line for line in printed)


def test_results_that_nothing_wrote_are_wrong(built, gpu):
    gpu.computes = lambda *launch: None
    result = run.run(built, gpu, False, lambda text: None)
    assert all(case["error"] == float("inf") for case in result["cases"])


def test_an_error_of_the_driver_is_told(gpu):
    gpu._cuda.cuStreamSynchronize = lambda stream: 700
    with pytest.raises(cuda.CudaError, match="cuStreamSynchronize: an illegal address"):
        gpu.synchronize()


def test_without_a_driver_the_command_says_so():
    command = [sys.executable, str(Path(run.__file__).parent), "run"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "no NVIDIA" not in done.stderr:
        pytest.skip("there is a GPU here")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
