"""What is special to MPS: which kernels run and what they are given, Metal objects, threads, limits."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from formats import TYPES, assert_linear_close, block_size, dequantized, odd_view, random_packed, random_x

import torch_qgemv

ROOT = Path(__file__).parent.parent
DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
Q4_0, Q4_K, Q6_K = TYPES[0], TYPES[7], TYPES[9]
by_name = {"ids": lambda t: getattr(t, "name", str(t))}


# ---- Numerics


SHAPES = [(N, blocks) for blocks in (1, 3, 17) for N in (1, 2, 3, 5, 7, 8, 31, 33, 65, 96, 127)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_every_kernel_in_every_shape(quant_type, dtype, mps):
    """N rows of K = `blocks` blocks: the format's usual kernel, and the plain one for an odd address."""
    for N, blocks in SHAPES:
        packed, x = random_packed(quant_type, N, blocks * block_size(quant_type)), None
        weight, matrix, bias = packed.to(mps), dequantized(packed, quant_type), random_x((N,), seed=9)
        for positive in (False, True):
            x = random_x((1, matrix.shape[1]), DTYPES[dtype], seed=N, positive=positive)
            for w in (weight, odd_view(weight)):
                y = torch_qgemv.linear(x.to(mps), w, quant_type, bias.to(mps))
                assert_linear_close(y, x, matrix, bias, positive, f"N={N} blocks={blocks} {w.storage_offset()}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_the_kernel_that_runs(quant_type, dtype, mps, record):
    weight = random_packed(quant_type, 9, 256).to(mps)
    x, indices = random_x((1, 256), DTYPES[dtype]).to(mps), torch.tensor([3], device=mps)
    for w, plain in ((weight, ""), (odd_view(weight), "_plain")):
        record()
        torch_qgemv.linear(x, w, quant_type)
        torch_qgemv.dequantize(w, quant_type, DTYPES[dtype])
        torch_qgemv.embedding(indices, w, quant_type, DTYPES[dtype])
        gemv = f"gemv_{quant_type.name}_{dtype}{plain or '_r4_s2_k1'}"
        expected = [gemv, *(f"{family}_{quant_type.name}_{dtype}{plain}" for family in ("dequantize", "embedding"))]
        assert [launch.kernel for launch in record()] == expected


def test_a_nan_in_x_stays_in_its_row(mps):
    packed, x = random_packed(Q4_K, 9, 512), random_x((3, 512))
    x[1, 300] = float("nan")
    y = torch_qgemv.linear(x.to(mps), packed.to(mps), Q4_K).cpu()
    assert y[1].isnan().all()
    assert_linear_close(y[[0, 2]], x[[0, 2]], dequantized(packed, Q4_K))


@pytest.mark.parametrize("quant_type", TYPES, **by_name)
@pytest.mark.parametrize("exponent", [-25, 25])
def test_tiny_and_huge_x(exponent, quant_type, mps):
    """Codes are multiplied as subnormal halfs: their scale must not push the products out of float's range."""
    packed, x = random_packed(quant_type, 5, 512), random_x((1, 512)) * 10.0**exponent
    y = torch_qgemv.linear(x.to(mps), packed.to(mps), quant_type)
    assert_linear_close(y, x, dequantized(packed, quant_type))


@pytest.mark.parametrize("rows", [32769, 65537])
def test_more_rows_than_16_bits_count(rows, mps):
    packed = random_packed(Q4_0, rows, 32)
    weight, matrix = packed.to(mps), dequantized(packed, Q4_0)
    x = random_x((1, 32))
    assert_linear_close(torch_qgemv.linear(x.to(mps), weight, Q4_0), x, matrix)
    x = random_x((rows, 32))
    assert_linear_close(torch_qgemv.linear(x.to(mps), weight[:3], Q4_0), x, matrix[:3], positive=True)
    last = torch.tensor([rows - 1], device=mps)
    assert torch.equal(torch_qgemv.embedding(last, weight, Q4_0).cpu(), matrix[-1:])


# ---- Launches


@pytest.mark.parametrize(
    "quant_type, N, K, kernel",
    [
        *((Q4_K, 500, 4096, "r8_s4_k4"), (Q4_K, 500, 2048, "r8_s2_k2")),
        *((Q6_K, 500, 2048, "r4_s2_k2"), (Q6_K, 9, 1792, "r4_s2_k1")),
    ],
    **by_name,
)
def test_every_gemv_kernel_is_launched(quant_type, N, K, kernel, mps, record):
    """But for r8_s2_k1, which only a table chooses."""
    packed, x, bias = random_packed(quant_type, N, K), random_x((1, K), torch.half), random_x((N,), seed=9)
    weight, on_mps, on_mps_bias = packed.to(mps), x.to(mps), bias.to(mps)
    record()
    y = torch_qgemv.linear(on_mps, weight, quant_type, on_mps_bias)
    (launch,) = record()
    assert launch.kernel == f"gemv_{quant_type.name}_half_{kernel}"
    assert_linear_close(y, x, dequantized(packed, quant_type), bias)


def test_one_row_is_one_launch(mps, record):
    packed, x = random_packed(Q4_K, 19, 512), random_x((1, 512))
    weight, on_mps = packed.to(mps), x.to(mps)
    record()
    y = torch_qgemv.linear(on_mps, weight, Q4_K)
    (launch,) = record()
    assert launch.kernel == "gemv_Q4_K_float_r4_s2_k1"
    assert launch.groups == (3, 1, 1) and launch.threads == (64, 1, 1)
    assert_linear_close(y, x, dequantized(packed, Q4_K))


def test_buffers_are_bound_in_place(mps, record):
    weight, x = random_packed(Q6_K, 40, 512).to(mps), random_x((6, 1024), torch.half).to(mps)
    bias = torch.zeros(50, dtype=torch.bfloat16, device=mps)
    record()
    y = torch_qgemv.linear(x[1::2, 512:], weight[4::3], Q6_K, bias[3:15])
    (launch,) = record()
    for index, (tensor, offset) in enumerate([(weight, 4 * 420), (x, 2 * 1536), (bias, 6), (y, 0)]):
        assert launch.buffers[index].storage == tensor.untyped_storage().data_ptr()
        assert launch.buffers[index].offset == offset


@pytest.mark.parametrize("start, width, copied", [(0, 528, 0), (8, 528, 0), (3, 528, 1), (4, 528, 1), (0, 524, 1)])
def test_x_is_copied_only_where_it_is_not_aligned(start, width, copied, mps, record):
    packed, base = random_packed(Q4_K, 5, 256), random_x((3, width), torch.half)
    weight, on_mps = packed.to(mps), base.to(mps)
    record()
    y = torch_qgemv.linear(on_mps[:, start : start + 256], weight, Q4_K)
    (launch,) = record()
    assert copied == (launch.buffers[1].storage != on_mps.untyped_storage().data_ptr())
    assert_linear_close(y, base[:, start : start + 256], dequantized(packed, Q4_K))


def test_empty_tensors_launch_nothing(mps, record):
    weight = torch.zeros(5, 144, dtype=torch.uint8, device=mps)
    record()
    torch_qgemv.linear(torch.ones(0, 256, device=mps), weight, Q4_K)
    torch_qgemv.linear(torch.ones(2, 256, device=mps), weight[:0], Q4_K)
    torch_qgemv.linear(torch.ones(2, 0, device=mps), weight[:, :0], Q4_K)
    torch_qgemv.dequantize(weight[:0], Q4_K)
    torch_qgemv.embedding(torch.zeros(0, dtype=torch.long, device=mps), weight, Q4_K)
    assert record() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_that_is_no_row_gives_nan(dtype, mps):
    packed = random_packed(Q4_K, 8, 256)
    bad = [-1, 8, 2**31 - 1, -(2**31)] + [2**32, 2**40, -(2**63)] * (dtype == torch.int64)
    indices = torch.tensor([7, *bad, 0], dtype=dtype)
    out = torch_qgemv.embedding(indices.to(mps), packed.to(mps), Q4_K).cpu()
    assert torch.equal(out[[0, -1]], dequantized(packed, Q4_K)[[7, 0]])
    assert out[1:-1].isnan().all()


def test_devices_are_not_mixed(mps):
    weight, x = torch.zeros(5, 144, dtype=torch.uint8), torch.zeros(1, 256)
    with pytest.raises(ValueError, match="x is on cpu, but weight is on mps:0"):
        torch_qgemv.linear(x, weight.to(mps), Q4_K)
    with pytest.raises(ValueError, match="x is on mps:0, but weight is on cpu"):
        torch_qgemv.linear(x.to(mps), weight, Q4_K)
    with pytest.raises(ValueError, match="bias is on cpu, but weight is on mps:0"):
        torch_qgemv.linear(x.to(mps), weight.to(mps), Q4_K, torch.zeros(5))
    with pytest.raises(ValueError, match="indices is on cpu, but weight is on mps:0"):
        torch_qgemv.embedding(torch.zeros(1, dtype=torch.long), weight.to(mps), Q4_K)
    with pytest.raises(ValueError, match="indices is on mps:0, but weight is on cpu"):
        torch_qgemv.embedding(torch.zeros(1, dtype=torch.long, device=mps), weight, Q4_K)


# ---- Metal objects


def test_a_thousand_calls_share_an_encoder_and_leave_nothing(mps, simulator):
    weight, x, bias = random_packed(Q4_0, 3, 32).to(mps), random_x((1, 32)).to(mps), torch.zeros(3, device=mps)
    torch_qgemv.linear(x, weight, Q4_0, bias)
    simulator.clear()
    before = simulator.counters()["live"]
    for _ in range(1000):
        torch_qgemv.linear(x, weight, Q4_0, bias)
    after = simulator.counters()
    assert after["dispatches"] == 1000 and after["encoders"] <= 1 and after["commits"] == 0
    assert after["live"] == before


def test_a_pipeline_is_made_once(mps, simulator):
    def live(*names):
        counts = simulator.counters()["live"]
        return [counts.get(name, 0) for name in names]

    def pipelines():
        return live("MTLComputePipelineState", "MTLLibrary")

    simulator.clear()  # drops what an exception in an earlier test has left in a pool
    passing = live("MTLFunction", "MTLCompileOptions")
    weight, x = random_packed(Q6_K, 3, 256).to(mps), random_x((1, 256)).to(mps)
    before = pipelines()
    for dtype in DTYPES.values():
        torch_qgemv.linear(x.to(dtype), weight, Q6_K)
    made = pipelines()
    assert made[0] >= 3 and made[1] <= before[1] + 3, "a library for each type of one format"
    for dtype in DTYPES.values():
        torch_qgemv.linear(x.to(dtype), weight, Q6_K)
    assert pipelines() == made
    assert live("MTLFunction", "MTLCompileOptions") == passing


def test_threads(mps):
    """Four threads at once, on kernels that are not made yet."""
    packed, x = [random_packed(t, 9, 768) for t in TYPES], random_x((2, 768), torch.half)
    weights, on_mps, results = [w.to(mps) for w in packed], x.to(mps), [{} for _ in range(4)]

    def work(result):
        for i, quant_type in enumerate(TYPES):
            result[i] = torch_qgemv.linear(on_mps, odd_view(weights[i]), quant_type)

    threads = [threading.Thread(target=work, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        for i, quant_type in enumerate(TYPES):
            assert_linear_close(result[i], x, dequantized(packed[i], quant_type))


# Each in a process of its own, as a launcher with another Metal source or an older system.
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import conftest, metal_sim, torch
{before}
conftest.load_launcher()
import torch_qgemv
weight, x = torch.arange(90, dtype=torch.uint8).view(5, 18).to("mps"), torch.ones(1, 32, device="mps")
for _ in range(2):
    try:
        print(torch_qgemv.linear(x, weight, "Q4_0").sum().item())
    except RuntimeError as error:
        print(error)
"""


def run_apart(before: str) -> str:
    script = SCRIPT.format(tests=str(Path(__file__).parent), before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def runs_right(text: str) -> bool:
    """Whether run_apart() printed the right results."""
    exact = dequantized(torch.arange(90, dtype=torch.uint8).view(5, 18), Q4_0).sum().item()
    return [float(line) for line in text.splitlines()] == pytest.approx([exact, exact], rel=1e-5)


def change_source(old: str, new: str) -> str:
    return f"""
build = metal_sim.build
def changed(*args, embedded, **kwargs):
    text = embedded["metal_sources.inc"].replace({old!r}, {new!r})
    assert text != embedded["metal_sources.inc"]
    return build(*args, embedded={{"metal_sources.inc": text}}, **kwargs)
metal_sim.build = changed
"""


def test_an_error_of_the_metal_compiler_is_told(simulator):
    text = run_apart(change_source("simd_sum(total[r])", "simd_sums(total[r])"))
    assert text.count("torch_qgemv: the Metal source of Q4_0 does not compile: ") == 2  # and again at the next call
    assert "metal/gemv.h:" in text and "simd_sums" in text


def test_a_missing_kernel_is_told(simulator):
    assert "torch_qgemv: there is no Metal kernel gemv_Q4_0_float_r4_s2_k1" in run_apart(
        change_source('"gemv_" #F', '"gem_" #F')
    )


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="such a device is simulated on x86-64 only")
def test_a_device_that_flushes_half_subnormals(simulator):
    """A look at the device before the first call finds it out; else the result would be wrong."""
    flush = "flush = metal_sim.flushing_half_subnormals(); flush.__enter__()"
    assert runs_right(run_apart(flush))
    blind = "".join(f"+ float((codes[lane] >> {8 * k}) & 255u) * {2**k}.0f" for k in range(4))
    assert not runs_right(run_apart(flush + change_source("dot_bytes(codes[lane], x, 0.0f) * tiny_unit", blind)))


def test_the_look_at_the_device_is_made_once(mps, simulator):
    """On a command queue of its own, of which nothing is left."""
    live = simulator.counters()["live"]
    assert not live.get("MTLCommandQueue") and not live.get("MTLCommandBuffer")


def test_an_older_macos_turns_fast_math_off(simulator):
    older = 'older = metal_sim.without_selectors("setMathMode:"); older.__enter__()'
    assert runs_right(run_apart(older))
