"""The simulated Metal device finds each fault it is there to find, and names its place.

Metal on a real GPU lets nearly all of these kernels pass. Not run where torch has an MPS device of its own.
"""

import threading

import metal_sim
import pytest
import torch

metal_sim.install_or_skip()

HEADER = '#include <metal_stdlib>\nusing namespace metal;\n#line 1 "metal/test.metal"\n'
LANE = "uint i [[thread_index_in_simdgroup]]"
THREAD = "uint i [[thread_index_in_threadgroup]]"
POSITION = "uint i [[thread_position_in_grid]]"
Y = "device float* y [[buffer(0)]]"


def run(source, kernel="k", buffers=(), groups=None, threads=32, **kwargs):
    metal_sim.launch(HEADER + source, kernel, buffers, groups, threads, **kwargs)


def fault(source, *args, **kwargs) -> str:
    with pytest.raises(RuntimeError) as error:
        run(source, *args, **kwargs)
    return str(error.value)


def floats(n):
    return torch.zeros(n, device="mps")


# ---- Bounds --------------------------------------------------------------------------------------------------------


def test_write_past_the_end():
    text = fault(f"kernel void k({Y}, {POSITION}) {{\n  y[i] = 1;\n}}", buffers=[floats(63)], groups=2)
    assert "kernel k, thread 31 of threadgroup (1, 0, 0): write of 4 bytes" in text
    assert "0 bytes past the end of buffer 0 (252 bytes)" in text
    assert text.endswith("at metal/test.metal:2")


def test_read_far_past_the_end():
    text = fault(f"kernel void k({Y}) {{ y[0] = y[100000]; }}", buffers=[floats(1)], threads=1)
    assert "read of 4 bytes, 399996 bytes past the end of buffer 0 (4 bytes)" in text


def test_a_view_is_bounded_below():
    text = fault(f"kernel void k({Y}, {POSITION}) {{ y[int(i) - 1] = 1; }}", buffers=[floats(33)[1:]])
    assert "write of 4 bytes, 4 bytes before buffer 0 (128 bytes)" in text


def test_position_in_a_called_function():
    source = f"static void put(device float* p) {{\n  *p = 1;\n}}\nkernel void k({Y}, {POSITION}) {{\n  put(y + i);\n}}"
    text = fault(source, buffers=[floats(8)])
    assert text.endswith("at metal/test.metal:2\n    at metal/test.metal:5")


def test_write_to_a_const_buffer():
    source = "kernel void k(device const float* x [[buffer(0)]]) { *(device float*)x = 1; }"
    assert "write of 4 bytes, to memory that is const: 0 bytes into buffer 0" in fault(source, buffers=[floats(4)])


@pytest.mark.parametrize("index", [0, 7, -3])
def test_unbound_buffer(index):
    text = fault(f"kernel void k(device float* y [[buffer(2)]]) {{ y[{index}] = 1; }}", buffers=[floats(1)])
    assert "write of 4 bytes, buffer 2, which is not bound" in text


def test_unbound_threadgroup_memory():
    text = fault(f"kernel void k({Y}, threadgroup float* t [[threadgroup(1)]]) {{ y[0] = t[3]; }}", buffers=[floats(1)])
    assert "read of 4 bytes, threadgroup memory 1, which is not bound" in text


def test_index_outside_an_array():
    source = f"kernel void k({Y}, {LANE}) {{ float t[4] = {{1, 2, 3, 4}};\n y[i] = t[i]; }}"
    text = fault(source, buffers=[floats(32)])
    assert "thread 4 of" in text and "index outside an array\n    at metal/test.metal:2" in text


# ---- Alignment -----------------------------------------------------------------------------------------------------


LOADS = {
    "vector": "uint4 v = *(device const uint4*)(x + 8); y[0] = float(v.y);",
    "element": "y[0] = float(((device const uint4*)(x + 8))[0].y);",
    "swizzle": "y[0] = float(((device const uint4*)(x + 8))->zw.y);",
    "reference": "device const uint4& v = *(device const uint4*)(x + 8); y[0] = v.w;",
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_misaligned_wide_load(load):
    source = f"kernel void k({Y}, device const uchar* x [[buffer(1)]]) {{\n  {load}\n}}"
    buffers = [floats(1), torch.zeros(64, dtype=torch.uint8, device="mps")]
    text = fault(source, buffers=buffers, threads=1)
    assert "misaligned access" in text and "16 bytes" in text
    assert "8 bytes into buffer 1 (64 bytes)" in text and "at metal/test.metal:2" in text
    run(source, buffers=[buffers[0], buffers[1][8:]], threads=1)  # the same address, counted from the buffer: aligned


def test_packed_vectors_need_their_elements_alignment():
    source = f"""kernel void k({Y}, device const uchar* x [[buffer(1)]]) {{
      packed_float4 v = *(device const packed_float4*)(x + OFFSET); y[0] = v.y; }}"""
    buffers = [floats(1), torch.zeros(64, dtype=torch.uint8, device="mps")]
    run(source.replace("OFFSET", "4"), buffers=buffers, threads=1)
    assert "needs 4 bytes' alignment" in fault(source.replace("OFFSET", "2"), buffers=buffers, threads=1)


# ---- Races ---------------------------------------------------------------------------------------------------------

REVERSE = f"""kernel void k({Y}, {THREAD}) {{
  threadgroup float part[64];
  part[i] = i;
  BARRIER
  y[i] = part[63 - i];
}}"""


def test_barrier_orders_threadgroup_memory():
    y = floats(64)
    run(REVERSE.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);"), buffers=[y], threads=64)
    assert y.tolist() == list(range(63, -1, -1))


BARRIERS = {
    "none": "",
    "simdgroup only": "simdgroup_barrier(mem_flags::mem_threadgroup);",
    "wrong memory": "threadgroup_barrier(mem_flags::mem_device);",
    "no memory": "threadgroup_barrier(mem_flags::mem_none);",
}


@pytest.mark.parametrize("barrier", BARRIERS.values(), ids=BARRIERS)
def test_race_in_threadgroup_memory(barrier):
    text = fault(REVERSE.replace("BARRIER", barrier), buffers=[floats(64)], threads=64)
    assert "of threadgroup variable part, byte" in text and "no barrier between them" in text
    assert text.endswith(("at metal/test.metal:3", "at metal/test.metal:5"))


def test_write_after_read_is_a_race():
    source = f"""kernel void k({Y}, {THREAD}) {{
  threadgroup float part[32];
  part[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float v = part[31];
  BARRIER
  part[i] = v;
  y[i] = part[i];
}}"""
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    assert "races with a read by thread" in fault(source.replace("BARRIER", ""), buffers=[floats(32)])
    run(source.replace("BARRIER", barrier), buffers=[floats(32)])


def test_race_between_threadgroups():
    source = f"kernel void k({Y}, uint g [[threadgroup_position_in_grid]]) {{ y[g / 2] = 1; }}"
    text = fault(source, buffers=[floats(2)], groups=3, threads=1)
    assert "write of buffer 0, byte 0, races with a write by thread 0 of threadgroup number 0" in text


def test_race_of_a_read_in_place():
    source = f"kernel void k({Y}, uint g [[threadgroup_position_in_grid]]) {{ y[g] = y[0]; }}"
    assert "races with a write" in fault(source, buffers=[floats(2)], groups=2, threads=1)


@pytest.mark.parametrize("read, written", [(1, 0), (0, 1)])
def test_race_through_a_second_binding(read, written):
    source = f"""kernel void k(device float* y [[buffer({written})]], device const float* x [[buffer({read})]],
      {LANE}) {{ y[i] = x[31 - i]; }}"""
    both = floats(32)
    assert "races" in fault(source, buffers=[both, both])


def test_atomics_do_not_race():
    source = (
        "kernel void k(device atomic_uint* n [[buffer(0)]]) { atomic_fetch_add_explicit(n, 2u, memory_order_relaxed); }"
    )
    n = torch.zeros(1, dtype=torch.int32, device="mps")
    run(source, buffers=[n], groups=3, threads=40)
    assert n.item() == 240
    assert "past the end of buffer 0" in fault(source.replace("(n,", "(n + 1,"), buffers=[n])


# ---- Threadgroup memory --------------------------------------------------------------------------------------------


def test_threadgroup_arrays_are_apart():
    source = f"""kernel void k({Y}) {{ threadgroup float a[8]; threadgroup float b[8];
      a[0] = b[0] = 0; int n = y[0]; (&a[0])[n] = 1; }}"""
    text = fault(source, buffers=[torch.full((1,), 8.0, device="mps")], threads=1)
    assert "past the end of threadgroup variable a (32 bytes)" in text


def test_threadgroup_memory_starts_undefined():
    y = floats(2)
    source = f"kernel void k({Y}, uint g [[threadgroup_position_in_grid]]) {{ threadgroup float t; y[g] = t; t = 1; }}"
    run(source, buffers=[y], groups=2, threads=1)
    assert y.isnan().all()


def test_threadgroup_memory_by_argument():
    source = f"kernel void k({Y}, threadgroup float* t [[threadgroup(0)]], {LANE}) {{ t[i] = i; y[i] = t[i]; }}"
    y = floats(32)
    run(source, buffers=[y], threadgroup_memory={0: 128})
    assert y.tolist() == list(range(32))
    assert "past the end of threadgroup memory 0 (64 bytes)" in fault(source, buffers=[y], threadgroup_memory={0: 64})


def test_too_much_threadgroup_memory():
    source = f"kernel void k({Y}) {{\n  threadgroup float t[N]; t[0] = 1; y[0] = t[0];\n}}"
    run(source, buffers=[floats(1)], threads=1, macros={"N": "8192"})
    text = fault(source, buffers=[floats(1)], threads=1, macros={"N": "8193"})
    assert "32772 bytes of threadgroup memory with t, more than the 32768 there are" in text
    assert "at metal/test.metal:2" in text
    text = fault(source, buffers=[floats(1)], threads=1, macros={"N": "8192"}, threadgroup_memory={0: 16})
    assert "32784 bytes of threadgroup memory" in text


# ---- Divergence ----------------------------------------------------------------------------------------------------


def test_divergent_simd_operation():
    text = fault(f"kernel void k({Y}, {LANE}) {{\n  if (i < 16)\n    y[i] = simd_sum(1.0f);\n}}", buffers=[floats(32)])
    assert "not every thread of the SIMD-group reaches the same operation: thread 0 waits in simd_sum" in text
    assert "at metal/test.metal:3;\n  thread 16 has returned" in text


@pytest.mark.parametrize("other", ["simd_max", "simd_sum"])
def test_different_simd_operations(other):
    source = f"kernel void k({Y}, {LANE}) {{\n  if (i < 16) y[i] = simd_sum(1.0f);\n  else y[i] = {other}(2.0f);\n}}"
    text = fault(source, buffers=[floats(32)])
    assert "thread 0 waits in simd_sum\n    at metal/test.metal:2" in text
    assert f"thread 16 waits in {other}\n    at metal/test.metal:3" in text


def test_divergent_barrier():
    source = f"kernel void k({Y}, {THREAD}) {{\n  if (i < 32) threadgroup_barrier(mem_flags::mem_none);\n}}"
    text = fault(source, buffers=[floats(32)], threads=64)
    assert "not every thread of the threadgroup" in text and "threadgroup_barrier\n    at metal/test.metal:2" in text
    assert "thread 32 has returned" in text


def test_matrix_operation_on_differing_memory():
    source = f"kernel void k({Y}, {LANE}) {{ simdgroup_float8x8 m; simdgroup_load(m, y + (i == 5)); }}"
    text = fault(source, buffers=[floats(80)])
    assert "arguments differ between the SIMD-group's threads" in text and "at metal/test.metal:1" in text


def test_a_launch_after_a_fault_is_right():
    y = floats(32)
    fault(f"kernel void k({Y}, {LANE}) {{ if (i < 16) y[i] = simd_sum(1.0f); }}", buffers=[y])
    run(f"kernel void k({Y}, {LANE}) {{ y[i] = simd_sum(1.0f); }}", buffers=[y])
    assert y.tolist() == [32.0] * 32


# ---- Arithmetic that C++ leaves undefined --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression, message",
    [
        ("1 << int(y[0])", "shift by more"),
        ("2147483647 + int(y[0])", "addition overflows"),
        ("7 / (int(y[0]) - 40)", "division by zero"),
    ],
)
def test_undefined_arithmetic(expression, message):
    source = f"kernel void k({Y}) {{\n  y[1] = {expression};\n}}"
    text = fault(source, buffers=[torch.full((2,), 40.0, device="mps")], threads=1)
    assert message in text and "at metal/test.metal:2" in text


def test_fresh_memory_and_locals_are_not_zero():
    assert torch.empty(100, device="mps").isnan().all()
    y = floats(1)
    run(f"kernel void k({Y}) {{ float v; float t[4]; y[0] = v + t[0]; }}", buffers=[y], threads=1)
    assert y.isnan().all()


# ---- Sources -------------------------------------------------------------------------------------------------------

REJECTED = {
    "unknown name": (f"kernel void k({Y}) {{ y[0] = nonsense; }}", r"metal/test.metal:1:\d+: error: use of undeclared"),
    "unknown attribute": (f"kernel void k({Y}, uint i [[thread_index]]) {{ y[i] = 1; }}", "is not simulated"),
    "no attribute": (f"kernel void k({Y}, uint i) {{ y[i] = 1; }}", "kernel parameter without an attribute"),
    "index twice": (
        "kernel void k(device int* a [[buffer(0)]], device int* b [[buffer(0)]]) {}",
        "two kernel parameters",
    ),
    "initialised threadgroup variable": (
        f"kernel void k({Y}) {{ threadgroup float t[2] = {{1}}; }}",
        "not a threadgroup",
    ),
    "not ASCII": (f"// \u00b5\nkernel void k({Y}) {{ y[0] = 1; }}", "outside ASCII"),
    "warning": (f"kernel void k({Y}) {{ static_assert(sizeof(bfloat) == 4); }}", "static assertion failed"),
}


@pytest.mark.parametrize("source, message", REJECTED.values(), ids=REJECTED)
def test_source_that_does_not_compile(source, message):
    with pytest.raises(metal_sim.CompileError, match=message):
        run(source, buffers=[floats(1)])


def test_unknown_kernel():
    assert "no kernel named other" in fault(f"kernel void k({Y}) {{ y[0] = 1; }}", kernel="other", buffers=[floats(1)])


# ---- Threads -------------------------------------------------------------------------------------------------------


def test_four_threads():
    """Launches of several threads, with kernels that the device has not seen yet, do not disturb each other."""
    source = f"kernel void k({Y}, {LANE}) {{ threadgroup float t[32]; t[i] = NUMBER; y[i] = simd_sum(t[i]); }}"
    wrong = []

    def work(number):
        y = floats(32)
        for repeat in range(20):
            run(source, buffers=[y], macros={"NUMBER": f"{number + repeat % 2}"})
            if y.tolist() != [32.0 * (number + repeat % 2)] * 32:
                wrong.append((number, y))

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
