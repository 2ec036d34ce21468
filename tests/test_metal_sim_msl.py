"""What the simulated device makes of the Metal Shading Language, against numpy and plain Python."""

import os

import metal_sim
import numpy as np
import pytest
import torch

metal_sim.install_or_skip()

HEADER = '#include <metal_stdlib>\nusing namespace metal;\n#line 1 "metal/test.metal"\n'
DTYPES = {"half": torch.float16, "bfloat": torch.bfloat16, "float": torch.float32}


def run(source, buffers, kernel="k", groups=None, threads=32, **kwargs):
    metal_sim.launch(HEADER + source, kernel, buffers, groups, threads, **kwargs)


def lanes(expression, kind="float", x=None, dtype=torch.float32, threads=32, prepare=""):
    """[threads]: the expression's value in each lane of one threadgroup; `v` is x[i], `i` the thread's index."""
    x = torch.arange(threads, dtype=torch.float32) if x is None else x
    y = torch.empty(threads, dtype=dtype, device="mps")
    source = f"""kernel void k(device {kind}* y [[buffer(0)]], device const float* x [[buffer(1)]],
                 uint i [[thread_index_in_threadgroup]]) {{ const float v = x[i]; {prepare} y[i] = {expression}; }}"""
    run(source, [y, x.to("mps")], threads=threads)
    return y.cpu()


def value(expression, kind="float", dtype=torch.float32, prepare=""):
    return lanes(expression, kind, dtype=dtype, threads=1, prepare=prepare)[0].item()


# ---- Numbers -------------------------------------------------------------------------------------------------------


def random_floats(n=4096):
    bits = np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_narrowing_rounds_to_nearest_even(kind):
    x = torch.cat([random_floats(), torch.arange(4096) * 2.0**-24, 1 + torch.arange(4096) * 2.0**-12])
    x = torch.where((x.abs() < 2.0**-126) & (x != 0), 1.0, x)  # subnormal floats may be flushed
    y = torch.empty(x.numel(), dtype=DTYPES[kind], device="mps")
    source = f"""kernel void k(device {kind}* y [[buffer(0)]], device const float* x [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {{ y[i] = {kind}(x[i]); }}"""
    run(source, [y, x.to("mps")], groups=x.numel() // 32)
    torch.testing.assert_close(y.cpu(), x.to(DTYPES[kind]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_widening_is_exact(kind):
    """Every bit pattern: among them the subnormal halves, which the kernels' decoding rests on."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[kind])
    if kind == "bfloat":
        x = torch.where((x.float().abs() < 2.0**-126) & (x != 0), torch.ones_like(x), x)
    y = torch.empty(65536, device="mps")
    source = f"""kernel void k(device float* y [[buffer(0)]], device const {kind}* x [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {{ y[i] = float(x[i]); }}"""
    run(source, [y, x.to("mps")], groups=2048)
    torch.testing.assert_close(y.cpu(), x.float(), rtol=0, atol=0, equal_nan=True)


def test_half_subnormals_are_kept_in_arithmetic():
    assert value("float(as_type<half2>(0x000f0003u).x) * 16777216.0f") == 3
    assert value("float(as_type<half2>(0x000f0003u).y) * 16777216.0f") == 15
    assert value("fma(float(as_type<half>(ushort(5))), 16777216.0f, 1.0f)") == 6


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="such a device is simulated on x86-64 only")
def test_a_device_that_flushes_half_subnormals():
    def kept():
        return lanes("float(as_type<half>(ushort(bits[i])))", prepare=f"const ushort bits[8] = {{{words}}};", threads=8)

    words = "0, 1, 0x3ff, 0x400, 0x8001, 0xc000, 0x7bff, 0x7c00"
    assert kept().tolist() == [0, 2**-24, 1023 * 2**-24, 2**-14, -(2**-24), -2, 65504, float("inf")]
    with metal_sim.flushing_half_subnormals():
        assert kept().tolist() == [0, 0, 0, 2**-14, 0, -2, 65504, float("inf")]
    assert kept()[1] == 2**-24


def test_float_subnormals_are_flushed():
    assert value("as_type<float>(3u + uint(v)) * 1e38f") == 0


def test_each_half_operation_is_rounded():
    a = "half(x[0]) + half(2048)"
    assert value(f"float(({a} + half(1)) + half(1))") == 2048  # 2049 is no half, and rounds to 2048 each time
    assert value("float(bfloat(256) + bfloat(1))", prepare="") == 256
    assert value("fma(half(x[0]) + half(64), half(64), half(1))", "half", torch.float16) == 4096


def test_fma_is_not_split_and_products_are_not_contracted():
    big = "(x[0] + 16777217.0f)"
    exact = 4097 * 4097 - 16785408
    assert value("fma(x[0] + 4097.0f, 4097.0f, -16785408.0f)") == exact
    assert value(f"(x[0] + 4097.0f) * 4097.0f - 16785408.0f + 0 * {big}") != exact


MATHS = [
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "floor",
    "ceil",
    "round",
    "rint",
    "trunc",
    "tanh",
    "sin",
    "cos",
    "exp2",
    "log2",
    "fabs",
]


def test_maths():
    x = torch.linspace(0.25, 4, 32)
    for name in MATHS:
        reference = {"fabs": torch.abs, "rint": torch.round, "round": torch.round}.get(name) or getattr(torch, name)
        torch.testing.assert_close(lanes(f"{name}(v)", x=x + 0.01), reference(x + 0.01), msg=name)
    assert value("clamp(7, 1, 5) + max(2u, 3u) + min(short(1), short(4)) + abs(-2)") == 11
    assert value("max(NAN, 2.0f) + min(1.0f, NAN)") == 3
    assert value("popcount(255u) + clz(1u) + ctz(8u)") == 42
    assert value("rotate(0x80000001u, 4u)") == 0x18
    assert value("extract_bits(0xabcdu, 4, 8)") == 0xBC
    assert value("extract_bits(int(0xf0), 4, 4)") == -1
    assert value("select(1.0f, 2.0f, x[0] == 0)") == 2
    assert value("precise::exp(0.0f) + float(sign(-3.0f)) + saturate(7.0f)") == 1


# ---- Types ---------------------------------------------------------------------------------------------------------


def test_vectors():
    assert value("float4(1, float2(2, 3), 4).wzyx.x + float4(5).y + float3(half3(1, 2, 3)).z") == 12
    assert value("dot(float4(1, 2, 3, 4), float4(int4(1, 10, 100, 1000)))") == 4321
    assert value("u.zw.y + u.a", prepare="float4 u = float4(1); u.yw = float2(7, 9); ") == 18
    assert value("as_type<float>(as_type<uint>(ushort2(0, 0x3fc0)))") == 1.5
    assert value("float((uchar4(200) + uchar4(100)).x)") == 44
    assert value("float(max(int2(1, 5), int2(3, 2)).y + abs(int2(-4)).x)") == 9
    assert value("float(bfloat4(bfloat2(1), bfloat2(2)).w) + vec<float, 2>(3, 4).y") == 6


def test_packed_vectors_and_layout():
    source = """struct S { packed_float3 a; uchar b; packed_half4 c; };
      static_assert(sizeof(packed_float3) == 12 && sizeof(float3) == 16 && sizeof(S) == 24 && sizeof(bfloat4) == 8);
      static_assert(sizeof(packed_uchar3) == 3 && sizeof(bool) == 1 && sizeof(long) == 8 && alignof(float4) == 16);
      kernel void k(device S* s [[buffer(0)]], device float* y [[buffer(1)]]) {
        s[1].a = float3(1, 2, 3); s[1].c = half4(4); float3 v = s[1].a; y[0] = v.z + s[1].a[1] + float(s[1].c.w); }"""
    s, y = torch.zeros(12, device="mps"), torch.zeros(1, device="mps")
    run(source, [s, y], threads=1)
    assert y.item() == 9 and s[6:9].tolist() == [1, 2, 3]


def test_macros_and_version():
    source = "kernel void k(device float* y [[buffer(0)]]) { y[0] = A + __METAL_VERSION__ / 1000.0f; }"
    y = torch.zeros(1, device="mps")
    run(source, [y], threads=1, macros={"A": "40"}, language_version=320)
    assert y.item() == pytest.approx(40.32)


def test_templates_with_host_names():
    source = """template <typename T, int n> kernel void f(device T* y, constant float& a [[buffer(1)]]) {
        threadgroup T part[n == 3 ? 1 : 2][n]; part[0][0] = T(a); y[0] = T(float(part[0][0]) + n); }
      #define MAKE(T) template [[host_name("f_" #T)]] [[kernel]] decltype(f<T, 3>) f<T, 3>;
      MAKE(half) MAKE(bfloat)
      template [[host_name("f_float")]] kernel void f<float, 4>(device float* y, constant float& a [[buffer(1)]]);"""
    for name, expected in {"half": 5, "bfloat": 5, "float": 6}.items():
        y = torch.zeros(1, dtype=DTYPES[name], device="mps")
        run(source, [y, torch.full((1,), 2.0, device="mps")], kernel=f"f_{name}", threads=1)
        assert y.item() == expected


CONSTANTS = """constant uint n [[function_constant(0)]];
  constant bool flag [[function_constant(3)]];
  constant uint twice = 2 * n;
  kernel void k(device float* y [[buffer(0)]]) {
    y[0] = twice + (is_function_constant_defined(flag) && flag ? 0.5f : 0.0f); }"""
UINT, BOOL, INT = 33, 53, 29  # MTLDataType


def test_the_largest_threadgroup_of_a_kernel():
    source = """
      template <typename T, uint n>
      [[kernel, max_total_threads_per_threadgroup(n * 32)]] void f(device T* y [[buffer(0)]],
                                                                   uint i [[thread_position_in_grid]]) { y[i] = n; }
      template [[host_name("two")]] [[kernel]] decltype(f<float, 2>) f<float, 2>;
      [[kernel, max_total_threads_per_threadgroup(32)]] void one(device float* y [[buffer(0)]],
                                                                 uint i [[thread_position_in_grid]]) { y[i] = 1; }"""
    for n, name in ((1, "one"), (2, "two")):
        y = torch.empty(96, device="mps")
        run(source, [y], name, threads=32 * n)
        assert y[: 32 * n].tolist() == [n] * 32 * n
        with pytest.raises(RuntimeError, match=f"threadgroups of {32 * n + 1} threads, more than the {32 * n} there"):
            run(source, [y], name, threads=32 * n + 1)
    elsewhere = source.replace("[[kernel, max_total_threads_per_threadgroup(32)]]",
                               "kernel [[max_total_threads_per_threadgroup(32)]]")  # fmt: skip
    with pytest.raises(metal_sim.CompileError, match="max_total_threads_per_threadgroup is not written as"):
        run(elsewhere, [y], "two")


def test_function_constants():
    y = torch.zeros(1, device="mps")
    three = (UINT, b"\3\0\0\0")
    run(CONSTANTS, [y], threads=1, constants={0: three})
    assert y.item() == 6
    run(CONSTANTS, [y], threads=1, constants={"n": three, 3: (BOOL, b"\1")})
    assert y.item() == 6.5
    with pytest.raises(metal_sim.CompileError, match=r"function constant n \(index 0\) has no value"):
        run(CONSTANTS, [y], threads=1, constants={3: (BOOL, b"\1")})
    with pytest.raises(metal_sim.CompileError, match="n is of type uint, its value of type int"):
        run(CONSTANTS, [y], threads=1, constants={0: (INT, b"\3\0\0\0")})


# ---- SIMD-groups ---------------------------------------------------------------------------------------------------

SIMD = {
    "simd_sum(v)": lambda x: np.full(32, x.sum()),
    "simd_max(v)": lambda x: np.full(32, x.max()),
    "simd_min(v)": lambda x: np.full(32, x.min()),
    "float(simd_sum(uint(i)))": lambda x: np.full(32, 496),
    "simd_shuffle_xor(v, 5)": lambda x: x[np.arange(32) ^ 5],
    "simd_shuffle(v, 31 - i)": lambda x: x[::-1],
    "simd_shuffle_down(v, 8)": lambda x: np.r_[x[8:], x[24:]],
    "simd_shuffle_up(v, 8)": lambda x: np.r_[x[:8], x[:24]],
    "simd_broadcast(v, 7)": lambda x: np.full(32, x[7]),
    "simd_broadcast_first(v)": lambda x: np.full(32, x[0]),
    "simd_prefix_inclusive_sum(v)": np.cumsum,
    "simd_prefix_exclusive_sum(v)": lambda x: np.cumsum(x) - x,
    "simd_sum(float4(v, 1, 2, 3)).w": lambda x: np.full(32, 96),
    "float(simd_any(v > 30)) + float(simd_all(v < 31))": lambda x: np.full(32, 1),
    "float(simd_sum(half(v)))": lambda x: np.full(32, 496),
    "quad_broadcast(v, 1)": lambda x: np.arange(32) // 4 * 4 + 1,
}


@pytest.mark.parametrize("expression", SIMD)
def test_simdgroup_operation(expression):
    expected = SIMD[expression](np.arange(32, dtype=np.float32))
    assert lanes(expression, threads=64, x=torch.arange(64.0) % 32).tolist() == [*expected, *expected] or (
        "i)" in expression
    )
    assert lanes(expression).tolist() == list(expected)


def test_the_last_simdgroup_may_be_smaller():
    assert lanes("simd_sum(1.0f)", threads=40).tolist() == [32.0] * 32 + [8.0] * 8
    assert lanes("simd_shuffle(v, 20)", threads=40)[32:].isnan().all()  # a lane that does not exist


MATRICES = """template <typename A, typename B, typename D>
  kernel void k(device const A* a [[buffer(0)]], device const B* b [[buffer(1)]], device D* d [[buffer(2)]]) {
    simdgroup_matrix<A, 8, 8> x; simdgroup_matrix<B, 8, 8> y; threadgroup B shared[64];
    simdgroup_load(x, a, 16, ulong2(8, 8)); simdgroup_load(y, b, 8, ulong2(0), true);
    simdgroup_store(y, shared); threadgroup_barrier(mem_flags::mem_threadgroup); simdgroup_load(y, shared);
    simdgroup_matrix<D, 8, 8> sum = make_filled_simdgroup_matrix<D, 8, 8>(D(2));
    simdgroup_multiply_accumulate(sum, x, y, sum);
    thread auto& mine = sum.thread_elements(); mine[0] = D(float(mine[0]) + 1); mine[1] = D(float(mine[1]) + 1);
    simdgroup_store(sum, d, 12); }
  template [[host_name("k")]] [[kernel]] decltype(k<TA, TB, TD>) k<TA, TB, TD>;"""


@pytest.mark.parametrize(
    "kinds", [("float",) * 3, ("half",) * 3, ("bfloat",) * 3, ("half", "half", "float"), ("bfloat", "float", "float")]
)
def test_simdgroup_matrix(kinds):
    a, b, d = (torch.zeros(16, 16).to(DTYPES[k]) for k in kinds)
    a[:] = torch.randint(-4, 5, (16, 16))
    b[:8, :8] = torch.randint(-4, 5, (8, 8))
    on_mps = [a.to("mps"), b[:8, :8].contiguous().to("mps"), d[:8, :12].contiguous().to("mps")]
    run(MATRICES, on_mps, macros=dict(zip(("TA", "TB", "TD"), kinds, strict=True)))
    expected = a[8:, 8:].float() @ b[:8, :8].float().T + 3
    assert torch.equal(on_mps[2][:, :8].cpu().float(), expected)
    assert not on_mps[2][:, 8:].any()


def test_matrix_elements_lie_as_on_apple_gpus():
    """Opaque in the language, but kernels that touch thread_elements() assume this placement."""
    y = torch.zeros(8, 8, device="mps")
    source = """kernel void k(device float* y [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) {
      simdgroup_float8x8 m; m.thread_elements()[0] = 2 * i; m.thread_elements()[1] = 2 * i + 1;
      simdgroup_store(m, y); }"""
    run(source, [y])
    for lane in range(32):
        row, column = (lane // 16) * 4 + lane // 2 % 4, (lane // 8 % 2) * 4 + lane % 2 * 2
        assert y[row, column : column + 2].tolist() == [2 * lane, 2 * lane + 1]


# ---- Grids ---------------------------------------------------------------------------------------------------------


def positions(kind, attribute, **kwargs):
    n = int(np.prod(kwargs["grid"]))
    y = torch.full((n, 3), -1, dtype=torch.int32, device="mps")
    source = f"""kernel void k(device int* y [[buffer(0)]], uint3 p [[thread_position_in_grid]],
        uint3 size [[threads_per_grid]], {kind} a [[{attribute}]]) {{
      device int* out = y + 3 * (p.x + size.x * (p.y + size.y * p.z));
      for (int d = 0; d < 3; ++d) out[d] = {"a[d]" if kind[-1] == "3" else "a"}; }}"""
    run(source, [y], **kwargs)
    return y.cpu().reshape(*reversed(kwargs["grid"]), 3)


def test_a_grid_that_fills_its_threadgroups_partly():
    grid, threads = (10, 3, 2), (4, 2, 2)
    where = positions("ushort3", "threadgroup_position_in_grid", grid=grid, threads=threads)
    assert where[1, 2, 9].tolist() == [2, 1, 0]
    size = positions("uint3", "threads_per_threadgroup", grid=grid, threads=threads)
    assert size[0, 0, 0].tolist() == [4, 2, 2] and size[1, 2, 9].tolist() == [2, 1, 2]
    asked = positions("uint3", "dispatch_threads_per_threadgroup", grid=grid, threads=threads)
    assert asked[1, 2, 9].tolist() == [4, 2, 2]
    groups = positions("uint3", "threadgroups_per_grid", grid=grid, threads=threads)
    assert groups[0, 1, 3].tolist() == [3, 2, 1]
    index = positions("uint", "thread_index_in_threadgroup", grid=grid, threads=threads)
    assert index[1, 2, 9, 0] == 1 + 2 * (0 + 1 * 1)  # in the corner's 2 x 1 x 2 threads
    local = positions("uint3", "thread_position_in_threadgroup", grid=grid, threads=threads)
    assert local[1, 2, 9].tolist() == [1, 0, 1]


def test_simdgroups_of_a_threadgroup():
    kwargs = {"grid": (100, 1, 1), "threads": (96, 1, 1)}
    assert positions("uint", "simdgroup_index_in_threadgroup", **kwargs)[0, 0, 95, 0] == 2
    assert positions("ushort", "thread_index_in_simdgroup", **kwargs)[0, 0, 95, 0] == 31
    assert positions("uint", "simdgroups_per_threadgroup", **kwargs)[0, 0, [0, 99], 0].tolist() == [3, 1]
    assert positions("uint", "dispatch_simdgroups_per_threadgroup", **kwargs)[0, 0, 99, 0] == 3
    assert positions("uint", "threads_per_simdgroup", **kwargs)[0, 0, 99, 0] == 32
