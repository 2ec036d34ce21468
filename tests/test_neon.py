"""The NEON kernels, on an emulated arm64 processor, against gguf's decoder and float64."""

import os
import platform
import sys

import neon
import numpy as np
import pytest
import torch
from formats import TYPES, assert_linear_close, block_size, dequantized, random_packed, random_x
from metal_sim.toolchain import Unavailable

import torch_qgemv  # noqa: F401  (the operators)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="on a Mac the kernels run in the tests of linear"),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="on this processor they run in the tests of linear"),
]
by_name = {"ids": lambda t: getattr(t, "name", None) or str(t).removeprefix("torch.")}
each_type = pytest.mark.parametrize("quant_type", TYPES, **by_name)
each_dtype = pytest.mark.parametrize("dtype", neon.DTYPES, **by_name)
Q8_0, Q4_K = TYPES[4], TYPES[7]


@pytest.fixture(scope="module", autouse=True)
def program():
    try:
        neon.program()
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


def interleaved(packed, quant_type):
    return torch.ops.torch_qgemv.interleave(packed, quant_type).reshape(packed.shape)


def linear_case(packed, quant_type, x, bias=None, in_panels=False):
    weight = interleaved(packed, quant_type) if in_panels else packed
    return neon.Case("linear", quant_type, weight, x.shape[1], in_panels, x=x, bias=bias)


@each_dtype
@each_type
def test_linear(quant_type, dtype):
    cases, expected = [], []
    for N in (1, 16, 35):
        bias = random_x((N,), seed=9)
        for K in (block_size(quant_type), 768, 2304):
            packed = random_packed(quant_type, N, K)
            matrix = dequantized(packed, quant_type)
            for M in (1, 2, 3, 5, 9, 18):
                x = random_x((M, K), dtype, seed=M, positive=M == 5)
                for in_panels in (False, True) if block_size(quant_type) < K else (False,):
                    cases.append(linear_case(packed, quant_type, x, bias if M % 2 else None, in_panels))
                    expected.append((x, matrix, cases[-1].bias, M == 5, f"N={N} K={K} M={M} in_panels={in_panels}"))
    for (y, could_pack), wanted in zip(neon.run(cases), expected, strict=True):
        assert all(could_pack), wanted[-1]
        assert_linear_close(y, *wanted)


@each_dtype
def test_infinities_and_nans_in_x(dtype):
    packed = random_packed(Q4_K, 21, 512)
    matrix, x = dequantized(packed, Q4_K), random_x((5, 512), dtype)
    x[1, 300], x[2, 5], x[4, 511] = float("inf"), float("nan"), -float("inf")
    ((y, could_pack),) = neon.run([linear_case(packed, Q4_K, x)])
    assert could_pack == [True, False, False, True, False]
    assert_linear_close(y[[0, 3]], x[[0, 3]], matrix)
    assert torch.equal(y[1], (matrix[:, 300] * float("inf")).to(dtype))
    assert y[2].isnan().all()


def test_tiny_huge_and_zero_x():
    """Each chunk of x has its own scale; integers can't stand for the tiniest."""
    packed, exponents = random_packed(Q4_K, 16, 512), [-44, -37, -31, -29, -20, 20, 30, 35]
    x = random_x((1, 512)).repeat(len(exponents) + 1, 1)
    for m, exponent in enumerate(exponents):
        x[m] *= 10.0**exponent
    x[-1] = 0
    ((y, could_pack),) = neon.run([linear_case(packed, Q4_K, x)])
    exact = x.double() @ dequantized(packed, Q4_K).double().T
    assert could_pack == [exponent > -30 for exponent in exponents] + [True]
    assert ((y - exact).norm(dim=1) <= 1e-6 * exact.norm(dim=1) + 2e-45 * 16).all()


@each_type
def test_dequantize(quant_type):
    packed = random_packed(quant_type, 19, 3 * block_size(quant_type))
    packed[3] = torch.randint(256, packed[3].shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    weights = [(packed, False), (interleaved(packed, quant_type), True)]
    columns = 3 * block_size(quant_type)
    with np.errstate(all="ignore"):  # row 3 has any bits as its scales
        matrix = dequantized(packed, quant_type)
    cases = [
        neon.Case("dequantize", quant_type, weight, columns, in_panels, dtype=dtype)
        for weight, in_panels in weights
        for dtype in neon.DTYPES
    ]
    for case, out in zip(cases, neon.run(cases), strict=True):
        wanted = matrix.to(case.dtype)
        numbers = ~wanted.isnan()
        assert torch.equal(out.isnan(), ~numbers)
        bits = torch.int32 if case.dtype == torch.float32 else torch.int16
        assert torch.equal(out.view(bits)[numbers], wanted.view(bits)[numbers])


@each_type
@pytest.mark.parametrize("N", [15, 16, 35])
def test_panels_are_the_same_on_every_processor(quant_type, N):
    columns = 3 * block_size(quant_type)
    packed = random_packed(quant_type, N, columns)
    panels = interleaved(packed, quant_type)
    there, back = neon.run(
        [
            neon.Case("interleave", quant_type, packed, columns),
            neon.Case("deinterleave", quant_type, panels, columns, True),
        ]
    )
    assert torch.equal(there, panels)
    assert torch.equal(back, packed)


@pytest.mark.parametrize("rows", [1, 4, 4097])
def test_read(rows):
    """Every byte is read: the exclusive or of all words."""
    packed = random_packed(Q8_0, rows, 64)
    words = np.pad(packed.numpy().ravel(), (0, -packed.numel() % 4)).view(np.int32)
    (out,) = neon.run([neon.Case("read", Q8_0, packed, 64)])
    assert out.item() == np.bitwise_xor.reduce(words)


def test_processors_without_the_dot_product():
    case = linear_case(random_packed(Q4_K, 16, 256), Q4_K, random_x((1, 256)))
    with pytest.raises(RuntimeError, match="ended with 3: no neon_dotprod here"):
        neon.run([case], processor="cortex-a72")
    ((y, _),) = neon.run([case], "portable", "cortex-a72")
    assert_linear_close(y, case.x, dequantized(case.weight, Q4_K))


@each_type
def test_quantize_gives_the_bytes_of_the_other_instruction_sets(quant_type):
    N, K = 5, 2 * block_size(quant_type) + (768 if block_size(quant_type) == 256 else 32)
    cases, expected = [], []
    for dtype in neon.DTYPES:
        for importance in (None, random_x((K,), seed=3).abs()):
            x = random_x((N, K), dtype)
            packed = torch.ops.torch_qgemv.quantize(x, quant_type, importance)
            relative = None if importance is None else (importance.double() / importance.double().mean()).float()
            cases.append(neon.Case("quantize", quant_type, torch.zeros_like(packed), K, x=x, bias=relative))
            expected.append(packed)
    for given, wanted in zip(neon.run(cases), expected, strict=True):
        assert torch.equal(given, wanted)
