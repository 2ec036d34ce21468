"""linear against float64, for every type, dtype, shape and instruction set."""

import itertools
import os

import pytest
import torch
from formats import TYPES, assert_linear_close, block_size, dequantized, random_packed, random_x, type_size

import torch_qgemv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = torch.ops.torch_qgemv._cpu_isas()
by_name = {"ids": lambda t: getattr(t, "name", None) or str(t).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_all_types_and_dtypes(quant_type, dtype, device):
    for N in (1, 5, 16, 31, 97):
        for K in (block_size(quant_type), 3 * block_size(quant_type), 2304):
            packed = random_packed(quant_type, N, K)
            matrix, weight = dequantized(packed, quant_type), packed.to(device)
            for M in (1, 3, 17):
                x = random_x((M, K), dtype, seed=M)
                y = torch_qgemv.linear(x.to(device), weight, quant_type)
                assert_linear_close(y, x, matrix, context=f"N={N} K={K} M={M}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, **by_name)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_every_instruction_set(quant_type, dtype, isa):
    for N, K, M in ((1, block_size(quant_type), 1), (35, 2304, 1), (35, 768, 2), (35, 768, 7), (35, 1280, 11)):
        packed, bias = random_packed(quant_type, N, K), random_x((N,), seed=9)
        weights = [packed]
        if N > 1:
            weights.append(torch.ops.torch_qgemv.interleave(packed, quant_type))
        for weight, positive in itertools.product(weights, (False, True)):
            x = random_x((M, K), dtype, seed=N, positive=positive)
            y = torch.ops.torch_qgemv._linear_isa(x, weight, quant_type, bias, isa)
            context = f"N={N} K={K} M={M} {weight.dim()}-D"
            assert_linear_close(y, x, dequantized(packed, quant_type), bias, positive, context)


@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_outliers_in_x(quant_type, device):
    packed = random_packed(quant_type, 64, 4096)
    matrix = dequantized(packed, quant_type).double()
    for dtype, bound in ((torch.float32, 7e-7), (torch.bfloat16, 2e-4)):
        x = random_x((1, 4096))
        x[0, ::100] *= 50
        x = x.to(dtype)
        y = torch_qgemv.linear(x.to(device), packed.to(device), quant_type).cpu().double()
        exact = x.double() @ matrix.T
        rounding = (exact.to(dtype).double() - exact).norm()
        assert (y - exact).norm() <= bound * exact.norm() + 1.1 * rounding


@pytest.mark.parametrize("M", [4, 127, 128, 129, 260])
def test_many_rows_of_x(M, device):
    packed, quant_type = random_packed(TYPES[0], 33, 576), TYPES[0]
    x = random_x((M, 576))
    assert_linear_close(
        torch_qgemv.linear(x.to(device), packed.to(device), quant_type), x, dequantized(packed, quant_type)
    )


@pytest.mark.parametrize("shape", [(256,), (0, 256), (2, 0, 256), (1, 256), (2, 3, 4, 256)])
def test_leading_dimensions(shape, device):
    packed, bias = random_packed(TYPES[7], 9, 256), random_x((9,))
    x = random_x(shape)
    y = torch_qgemv.linear(x.to(device), packed.to(device), TYPES[7], bias.to(device))
    assert_linear_close(y, x, dequantized(packed, TYPES[7]), bias)
    assert y.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_strided_x(dtype, device):
    packed = random_packed(TYPES[7], 9, 256)
    matrix, weight = dequantized(packed, TYPES[7]), packed.to(device)
    base = random_x((6, 520), dtype).to(device)
    for x in (
        base[:, 3:259],
        base[::2, 1:513:2],
        base[2:3, :256].expand(4, 256),
        base[:, :256].reshape(2, 3, 256).transpose(0, 1),
    ):
        assert_linear_close(torch_qgemv.linear(x, weight, TYPES[7]), x, matrix)


@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_views_of_weight(quant_type, device):
    packed, size = random_packed(quant_type, 40, 1024), type_size(quant_type)
    matrix, weight = dequantized(packed, quant_type), packed.to(device)
    x = random_x((2, 1024)).to(device)
    half = 512 // block_size(quant_type) * size
    odd = torch.empty(packed.numel() + 1, dtype=torch.uint8, device=device)[1:].view(packed.shape).copy_(weight)
    assert_linear_close(torch_qgemv.linear(x, weight[3:], quant_type), x, matrix[3:])
    assert_linear_close(torch_qgemv.linear(x, weight[::3], quant_type), x, matrix[::3])
    assert_linear_close(torch_qgemv.linear(x[:, :512], weight[:, half:], quant_type), x[:, :512], matrix[:, 512:])
    assert_linear_close(torch_qgemv.linear(x, odd, quant_type), x, matrix)
    assert_linear_close(torch_qgemv.linear(x, weight[:1].expand(7, -1), quant_type), x, matrix[:1].expand(7, -1))
    assert_linear_close(torch_qgemv.linear(x, weight.T.contiguous().T, quant_type), x, matrix)


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_bias_of_any_float_dtype(dtype, device):
    packed, x = random_packed(TYPES[4], 19, 64), random_x((3, 64), dtype)
    for bias_dtype in (*DTYPES, torch.float64) if device == "cpu" else DTYPES:  # MPS has no float64
        bias = (torch.arange(38) / 7).to(bias_dtype)[::2]
        y = torch_qgemv.linear(x.to(device), packed.to(device), TYPES[4], bias.to(device))
        assert_linear_close(y, x, dequantized(packed, TYPES[4]), bias.float())


def test_empty_weight(device):
    x = torch.ones(2, 256, device=device)
    assert torch_qgemv.linear(x, torch.empty(0, 144, dtype=torch.uint8, device=device), "Q4_K").shape == (2, 0)
    no_columns = torch.empty(3, 0, dtype=torch.uint8, device=device)
    bias = torch.tensor([1.0, 2.0, 3.0], device=device)
    assert torch.equal(torch_qgemv.linear(x[:, :0], no_columns, "Q4_K", bias), bias.expand(2, 3))
    assert torch.equal(torch_qgemv.linear(x[:, :0], no_columns, "Q4_K"), torch.zeros(2, 3, device=device))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_infinities_and_nans_in_x_stay_in_their_row(dtype, isa):
    packed = random_packed(TYPES[7], 21, 512)
    matrix = dequantized(packed, TYPES[7])
    x = random_x((4, 512), dtype)
    x[1, 300], x[2, 5] = float("inf"), float("nan")
    y = torch.ops.torch_qgemv._linear_isa(x, packed, TYPES[7], None, isa)
    assert_linear_close(y[[0, 3]], x[[0, 3]], matrix)
    assert torch.equal(y[1], (matrix[:, 300] * float("inf")).to(dtype))
    assert y[2].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exponent", [-44, -37, -31, -29, -20, 20, 30, 35])
def test_tiny_and_huge_x(exponent, isa):
    """Each chunk of x has its own scale, down to the smallest floats."""
    packed = random_packed(TYPES[7], 5, 512)
    x = random_x((1, 512)) * 10.0**exponent
    x[0, 256:] = random_x((256,), seed=1) * 10.0 ** min(exponent, 0)
    y = torch.ops.torch_qgemv._linear_isa(x, packed, TYPES[7], None, isa)
    exact = x.double() @ dequantized(packed, TYPES[7]).double().T
    assert (y - exact).norm() <= 1e-6 * exact.norm() + 2e-45 * 5


def test_infinite_and_nan_weights_stay_in_their_row(device):
    packed = random_packed(TYPES[4], 20, 64)
    packed[3, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # inf
    packed[18, 34:36] = torch.tensor([0x01, 0x7C], dtype=torch.uint8)  # NaN
    x = random_x((2, 64)).abs()
    y = torch_qgemv.linear(x.to(device), packed.to(device), TYPES[4]).cpu()
    assert not y[:, 3].isfinite().any() and y[:, 18].isnan().all()
    keep = [n for n in range(20) if n not in (3, 18)]
    assert_linear_close(y[:, keep], x, dequantized(packed[keep], TYPES[4]), positive=True)


@pytest.mark.parametrize("isa", ISAS)
def test_part_of_a_chunk_meets_nothing_left_over(isa):
    """x has zeros where K ends within a chunk of 256; what an earlier product left in memory there must not matter."""
    linear = torch.ops.torch_qgemv._linear_isa
    bad = torch.full((40, 256 // 32 * 34), 255, dtype=torch.uint8)  # Q8_0 with NaN for scales
    for M in (1, 4, 12, 40):
        assert linear(random_x((M, 256)), bad, 8, None, isa).isnan().all()
        for K in (32, 96, 288):
            packed, x = random_packed(TYPES[4], 40, K), random_x((M, K))
            assert_linear_close(linear(x, packed, 8, None, isa), x, dequantized(packed, TYPES[4]), context=f"{M} {K}")


@pytest.mark.parametrize("M", [1, 40])
def test_same_result_on_any_number_of_threads(M):
    packed, x = random_packed(TYPES[7], 515, 2048), random_x((M, 2048))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch_qgemv.linear(x, packed, TYPES[7]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_more_than_one_thread_works():
    """parallel_for silently runs on one thread in files compiled without OpenMP."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.ops.torch_qgemv._threads_at_work(2) == 2
    finally:
        torch.set_num_threads(threads)


def test_errors(device):
    x, weight = torch.zeros(2, 256, device=device), torch.zeros(64, 144, dtype=torch.uint8, device=device)
    linear = torch_qgemv.linear
    with pytest.raises(
        ValueError, match=r"x has K = 100 \(shape \[2, 100\]\), but weight \[64, 144\] of Q4_K has N = 64, K = 256"
    ):
        linear(x[:, :100], weight, "Q4_K")
    with pytest.raises(ValueError, match="0-d"):
        linear(x[0, 0], weight, "Q4_K")
    with pytest.raises(ValueError, match=r"rows of 143 bytes"):
        linear(x, weight[:, :143], "Q4_K")
    with pytest.raises(ValueError, match=r"weight must be \[N, row_bytes\]"):
        linear(x, weight[None], "Q4_K")
    if device == "cpu":  # MPS has no float64
        with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16, got Double"):
            linear(x.double(), weight, "Q4_K")
    with pytest.raises(TypeError, match=r"x must be .* got Int"):
        linear(x.int(), weight, "Q4_K")
    with pytest.raises(TypeError, match=r"uint8.*got Char"):
        linear(x, weight.to(torch.int8), "Q4_K")
    with pytest.raises(ValueError, match=r"bias must be \[N\] = \[64\], got \[63\]"):
        linear(x, weight, "Q4_K", torch.zeros(63, device=device))
    with pytest.raises(ValueError, match=r"bias must be \[N\] = \[64\], got \[1, 64\]"):
        linear(x, weight, "Q4_K", torch.zeros(1, 64, device=device))
    with pytest.raises(TypeError, match="bias must be floating point, got Long"):
        linear(x, weight, "Q4_K", torch.zeros(64, dtype=torch.long, device=device))
    for bad in (0, 1, 30, -1, 2**40):
        with pytest.raises(ValueError, match=f"quant_type {bad} is not a supported GGUF type; supported are Q4_0, "):
            torch.ops.torch_qgemv.linear(x, weight, bad)
    with pytest.raises(ValueError, match="isa 'sse9'"):
        torch.ops.torch_qgemv._linear_isa(x.cpu(), weight.cpu(), 12, None, "sse9")


def test_wrong_device(device):
    x, weight = torch.zeros(2, 256, device=device), torch.zeros(64, 144, dtype=torch.uint8, device=device)
    with pytest.raises((ValueError, RuntimeError), match=r"is on|device"):
        torch_qgemv.linear(x.to("meta"), weight, "Q4_K")
    with pytest.raises((ValueError, RuntimeError), match=r"is on|device"):
        torch_qgemv.linear(x, weight, "Q4_K", torch.zeros(64, device="meta"))


@pytest.mark.skipif(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 << 30, reason="takes 5 GB of memory")
@pytest.mark.slow
def test_sizes_past_32_bits():
    """More than 2^31 bytes of weight and 2^32 weights: the last rows are the right ones."""
    quant_type, K = TYPES[0], 2**16
    rows = 2**31 // (K // 32 * 18) + 5
    last = random_packed(quant_type, 5, K)
    packed = torch.zeros(rows, last.shape[1], dtype=torch.uint8)
    packed[-5:] = last
    x = random_x((1, K))
    y = torch_qgemv.linear(x, packed, quant_type)
    assert_linear_close(y[:, -5:], x, dequantized(last, quant_type))
    assert not y[:, :-5].any()
