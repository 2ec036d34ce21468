"""Several rows of x on MPS: the kernels rows, tiles and matmul, and the transposed product of gradients."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from formats import TYPES, assert_linear_close, block_size, dequantized, odd_view, random_packed, random_x

import torch_qgemv

DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
Q4_0, Q8_0, Q4_K, IQ4_XS = TYPES[0], TYPES[4], TYPES[7], TYPES[11]
by_name = {"ids": lambda t: getattr(t, "name", str(t))}


@pytest.fixture
def launches(simulator):
    """A function of no arguments to the launches of a call, and its result."""

    def launches(call):
        simulator.clear()
        result = call()
        return simulator.dispatches(), result

    return launches


# ---- Numerics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_every_kernel(quant_type, dtype, mps):
    """Usual and plain kernels; K of one block, of blocks that don't fill a step of the SIMD-group, and of many."""
    size = block_size(quant_type)
    for N, K, rows in ((1, size, (2, 8, 9)), (5, 3 * size, (3, 4, 5, 33)), (69, 544 // size * size, (2, 4, 7, 65))):
        packed, bias = random_packed(quant_type, N, K), random_x((N,), seed=9)
        matrix, weight = dequantized(packed, quant_type), packed.to(mps)
        for M in rows:
            for w, positive in ((weight, False), (odd_view(weight), True)):
                x = random_x((M, K), DTYPES[dtype], seed=M, positive=positive)
                y = torch_qgemv.linear(x.to(mps), w, quant_type, bias.to(mps))
                assert_linear_close(y, x, matrix, bias, positive, f"N={N} K={K} M={M} {w.storage_offset()}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_eight_simdgroups_that_share_rows(quant_type, dtype, mps, launches):
    """With a last step that not all of them have."""
    packed = random_packed(quant_type, 5, 4352)
    x, matrix = random_x((3, 4352), DTYPES[dtype]), dequantized(packed, quant_type)
    (launch,), y = launches(lambda: torch_qgemv.linear(x.to(mps), packed.to(mps), quant_type))
    assert launch.kernel == f"rows3_{quant_type.name}_{dtype}_s8"
    assert_linear_close(y, x, matrix)


@pytest.mark.parametrize("K", [4096, pytest.param(14336, marks=pytest.mark.slow)])
@pytest.mark.parametrize("quant_type", [Q8_0, Q4_K, IQ4_XS], **by_name)
def test_sums_over_long_rows(quant_type, K, mps):
    packed = random_packed(quant_type, 33, K)
    matrix, weight = dequantized(packed, quant_type).double(), packed.to(mps)
    for M in (4, 8, 33):
        x = random_x((M, K), seed=M)
        exact = x.double() @ matrix.T
        y = torch_qgemv.linear(x.to(mps), weight, quant_type).cpu().double()
        assert (y - exact).norm() <= 5e-7 * exact.norm(), M


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_every_transposed_kernel(quant_type, dtype, mps):
    size = block_size(quant_type)
    for N, K, M in ((1, size, 1), (31, 3 * size, 5), (64, 576 // size * size, 33), (70, size, 65)):
        packed = random_packed(quant_type, N, K)
        matrix, weight = dequantized(packed, quant_type), packed.to(mps)
        grad_y = random_x((M, N), DTYPES[dtype], seed=M)
        for w in (weight, odd_view(weight)):
            grad_x = torch.ops.torch_qgemv.linear_transposed(grad_y.to(mps), w, int(quant_type))
            assert_linear_close(grad_x, grad_y, matrix.T, context=f"N={N} K={K} M={M} {w.storage_offset()}")


def test_transposed_sums_over_many_rows(mps):
    packed, grad_y = random_packed(Q4_K, 4100, 256), random_x((3, 4100))
    exact = grad_y.double() @ dequantized(packed, Q4_K).double()
    grad_x = torch.ops.torch_qgemv.linear_transposed(grad_y.to(mps), packed.to(mps), int(Q4_K)).cpu().double()
    assert (grad_x - exact).norm() <= 5e-7 * exact.norm()


@pytest.mark.parametrize("M", [3, 8, 40])
def test_a_nan_in_x_stays_in_its_row(M, mps):
    packed, x = random_packed(Q8_0, 9, 288), random_x((M, 288))
    x[1, 287] = float("nan")
    y = torch_qgemv.linear(x.to(mps), packed.to(mps), Q8_0).cpu()
    others = [m for m in range(M) if m != 1]
    assert y[1].isnan().all()
    assert_linear_close(y[others], x[others], dequantized(packed, Q8_0))


@pytest.mark.parametrize("M", [3, 8, 40])
def test_infinite_and_nan_weights_stay_in_their_output(M, mps):
    packed, x = random_packed(Q8_0, 20, 288), random_x((M, 288)).abs()
    packed[3, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # inf
    packed[18, -34:-32] = torch.tensor([0x01, 0x7C], dtype=torch.uint8)  # NaN
    y = torch_qgemv.linear(x.to(mps), packed.to(mps), Q8_0).cpu()
    assert not y[:, 3].isfinite().any() and y[:, 18].isnan().all()
    keep = [n for n in range(20) if n not in (3, 18)]
    assert_linear_close(y[:, keep], x, dequantized(packed[keep], Q8_0), positive=True)


@pytest.mark.parametrize("exponent", [-25, 25])
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_tiny_and_huge_x(exponent, quant_type, mps):
    packed = random_packed(quant_type, 5, 256)
    matrix, weight = dequantized(packed, quant_type), packed.to(mps)
    for M in (2, 5, 9):
        x = random_x((M, 256)) * 10.0**exponent
        assert_linear_close(torch_qgemv.linear(x.to(mps), weight, quant_type), x, matrix)


# ---- Launches


# Outputs of a threadgroup, rows of x of one.
KERNELS = {
    **{M: (f"rows{M}", 16, M) for M in (2, 3, 4)},
    **{M: ("tiles", 32, M) for M in (5, 6, 7, 8)},
    **dict.fromkeys((9, 32), ("matmul32", 64, 32)),
    **dict.fromkeys((33, 65), ("matmul64", 64, 64)),
}


@pytest.mark.parametrize("M", KERNELS)
def test_one_launch_whatever_the_rows(M, mps, launches):
    family, outputs, rows = KERNELS[M]
    packed, x = random_packed(Q4_K, 67, 256), random_x((M, 256), torch.half)
    weight, on_mps = packed.to(mps), x.to(mps)
    for w, plain in ((weight, ""), (odd_view(weight), "_plain")):
        (launch,), y = launches(lambda w=w: torch_qgemv.linear(on_mps, w, Q4_K))
        usual = "_s4" if family.startswith("rows") else ""
        assert launch.kernel == f"{family}_Q4_K_half{plain or usual}"
        groups = [-(-67 // outputs), -(-M // rows)]
        if family.startswith("matmul"):
            groups.reverse()
        assert launch.groups == (*groups, 1)
        assert_linear_close(y, x, dequantized(packed, Q4_K))


@pytest.mark.parametrize("M", [3, 6, 40])
def test_views_are_bound_in_place(M, mps, launches):
    packed, base = random_packed(Q4_K, 40, 512), random_x((2 * M, 1024), torch.half)
    weight, on_mps, bias = packed.to(mps), base.to(mps), torch.arange(50, dtype=torch.bfloat16, device=mps)
    x = on_mps[1::2, 512:]
    (launch,), y = launches(lambda: torch_qgemv.linear(x, weight[4::3], Q4_K, bias[3:15]))
    for index, (tensor, offset) in enumerate([(weight, 4 * 288), (on_mps, 2 * 1536), (bias, 6), (y, 0)]):
        assert launch.buffers[index].storage == tensor.untyped_storage().data_ptr()
        assert launch.buffers[index].offset == offset
    assert_linear_close(y, x, dequantized(packed, Q4_K)[4::3], bias[3:15].float())


@pytest.mark.parametrize("N, copied", [(64, False), (48, True)])
@pytest.mark.parametrize("M, family", [(1, "transposed32"), (32, "transposed32"), (33, "transposed64")])
def test_one_launch_for_a_gradient(M, family, N, copied, mps, launches):
    """grad_y is read in place where its rows are whole steps of 32."""
    packed, grad_y = random_packed(Q4_K, N, 256).to(mps), random_x((M, N)).to(mps)
    (launch,), _ = launches(lambda: torch.ops.torch_qgemv.linear_transposed(grad_y, packed, int(Q4_K)))
    assert launch.kernel == f"{family}_Q4_K_float" and launch.groups == (-(-M // int(family[-2:])), 4, 1)
    assert copied == (launch.buffers[1].storage != grad_y.untyped_storage().data_ptr())


def test_a_strided_gradient(mps):
    packed, base = random_packed(Q4_0, 64, 96), random_x((10, 130))
    for grad_y in (base[:, 1:65], base[::2, :64], base[:, 2:130:2], base[:1, :64].expand(5, 64)):
        on_mps = torch.as_strided(base.to(mps), grad_y.shape, grad_y.stride(), grad_y.storage_offset())
        grad_x = torch.ops.torch_qgemv.linear_transposed(on_mps, packed.to(mps), int(Q4_0))
        assert_linear_close(grad_x, grad_y, dequantized(packed, Q4_0).T)


# A process of its own, as the lanes' order is found out once. There the lanes hold other elements of a matrix.
OTHER_LANES = """
import sys
sys.path.insert(0, {tests!r})
import conftest, metal_sim, torch
from formats import assert_linear_close, dequantized, random_packed, random_x
conftest.load_launcher()
import torch_qgemv
packed, matrix = random_packed("Q4_0", 37, 96), None
matrix = dequantized(packed, 2)
with metal_sim.other_matrix_lanes({order}):
    for M in (4, 5, 8, 33):
        x = random_x((M, 96))
        metal_sim.clear()
        assert_linear_close(torch_qgemv.linear(x.to("mps"), packed.to("mps"), "Q4_0"), x, matrix)
        print(*(launch.kernel for launch in metal_sim.dispatches()))
    grad_x = torch.ops.torch_qgemv.linear_transposed(random_x((5, 37)).to("mps"), packed.to("mps"), 2)
    assert_linear_close(grad_x, random_x((5, 37)), matrix.T)
"""


@pytest.mark.parametrize("order, family", [(0, "tiles"), (1, "matmul32"), (16, "matmul32")])
def test_tiles_run_only_where_the_order_of_the_lanes_is_known(order, family, simulator):
    script = OTHER_LANES.format(tests=str(Path(__file__).parent), order=order)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        f"{name}_Q4_0_float{end}" for name, end in (("rows4", "_s4"), (family, ""), (family, ""), ("matmul64", ""))
    ]


def test_the_self_test_leaves_no_metal_object(mps, simulator):
    weight, x = random_packed(Q4_0, 3, 32).to(mps), random_x((5, 32)).to(mps)
    torch_qgemv.linear(x, weight, Q4_0)
    live = simulator.counters()["live"]
    assert not {"MTLCommandQueue", "MTLCommandBuffer"} & set(live)
