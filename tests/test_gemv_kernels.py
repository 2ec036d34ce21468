"""Every gemv kernel that there is, also those that the launch plan picks for large matrices, run by themselves."""

import re
from pathlib import Path

import metal_sim
import pytest
import torch
from faults.kernels import DTYPES, NAMES, Variant, gemv_problem, gemv_variants, make_case
from formats import dequantized, random_packed, random_x, type_size
from metal_sim.kernels import compile_metal
from msl_check.opencl import metal_sources

from torch_qgemv.testing import half_fields, linear_error

metal_sim.install_or_skip()

SOURCE = metal_sources()["gemv"]
VARIANTS = {variant.suffix: variant for variant in gemv_variants()}
SHAPES = [(1, 1, 1), (2, 3, 2), (3, 9, 1), (9, 33, 1), (17, 1, 3), (17, 64, 1), (33, 5, 1)]  # N, blocks, M


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", NAMES)
def test_every_kernel(quant_type, dtype):
    """Nothing is read or written beyond the tensors, lanes don't race, and y is as exact as it has to be."""
    for variant in VARIANTS.values():
        for number, (N, blocks, M) in enumerate(SHAPES):
            case = make_case(quant_type, DTYPES[dtype], variant, N, blocks, M, number)
            assert gemv_problem(SOURCE, case, QGEMV_TYPE=dtype) is None


def error(quant_type, variant, positive=False, **macros):
    """The relative L2 error of y at N = 96, K = 4096, float32."""
    packed, x = random_packed(NAMES[quant_type], 96, 4096), random_x((1, 4096), seed=96, positive=positive)
    y, exact = torch.empty(96, device="mps"), dequantized(packed, NAMES[quant_type]).double() @ x[0].double()
    launch(quant_type, variant, packed, x, y, **macros)
    return ((y.cpu() - exact).norm() / exact.norm()).item()


def launch(quant_type, variant, packed, x, y, **macros):
    words = [packed.shape[1], 0, x.numel(), 0, y.numel(), x.numel(), 0, 0]
    params = torch.tensor(words, dtype=torch.int32).view(torch.uint8).to("mps")
    weight = packed.to("mps")
    metal_sim.launch(SOURCE, f"gemv_{quant_type}_float_{variant.suffix}", [weight, x.to("mps"), weight, y, params],
                     groups=-(-y.numel() // variant.outputs), threads=variant.threads,
                     macros={"QGEMV_FORMAT": quant_type, "QGEMV_TYPE": "float", **macros})  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quant_type", NAMES)
def test_error_at_K_4096(quant_type, variant):
    assert error(quant_type, VARIANTS[variant]) <= 2.5e-7
    assert error(quant_type, VARIANTS[variant], positive=True) <= 7.5e-7, "offsets and minimums cancel here"


def with_subnormal_scales(quant_type, rows, K):
    packed = random_packed(NAMES[quant_type], rows, K)
    blocks = packed.view(rows, -1, type_size(NAMES[quant_type]))
    for field in half_fields(NAMES[quant_type]):
        blocks[..., field + 1] &= 0x83  # the exponent of a half
    return packed


@pytest.mark.parametrize("quant_type", NAMES)
def test_converted_halfs_give_the_same(quant_type):
    """The kernels for a device that takes subnormal halfs for 0."""
    x = random_x((1, 512))
    for packed in (random_packed(NAMES[quant_type], 9, 512), with_subnormal_scales(quant_type, 9, 512)):
        assert dequantized(packed, NAMES[quant_type]).any()
        for variant in (VARIANTS["r4_s2_k1"], VARIANTS["plain"]):
            y, converted = torch.empty(9, device="mps"), torch.empty(9, device="mps")
            launch(quant_type, variant, packed, x, y)
            with flushing():
                launch(quant_type, variant, packed, x, converted, QGEMV_CONVERT_HALFS="1")
            assert torch.equal(y.cpu(), converted.cpu())


@pytest.mark.parametrize("quant_type", NAMES)
def test_a_device_that_flushes_needs_them(quant_type):
    packed, x, y = random_packed(NAMES[quant_type], 9, 512), random_x((1, 512)), torch.empty(9, device="mps")
    with flushing():
        launch(quant_type, VARIANTS["r4_s2_k1"], packed, x, y)
    error = linear_error(y[None], x, dequantized(packed, NAMES[quant_type]))
    assert error > 100 or quant_type == "IQ4_NL", "of its halfs none is subnormal"


def flushing():
    try:
        return metal_sim.flushing_half_subnormals()
    except metal_sim.Unavailable as error:
        pytest.skip(str(error))


def test_a_threadgroup_is_no_larger_than_declared():
    """Metal gives a kernel more registers if it knows that its threadgroups are small."""
    packed, x, y = random_packed(NAMES["Q4_0"], 4, 32), random_x((1, 32)), torch.empty(4, device="mps")
    for name, variant in VARIANTS.items():
        larger = Variant(name, variant.rows, variant.simdgroups + 1, variant.splits)
        most = variant.threads
        with pytest.raises(RuntimeError, match=f"threadgroups of {most + 32} threads, more than the {most} there may"):
            launch("Q4_0", larger, packed, x, y)


def test_a_library_for_one_type_has_only_its_kernels():
    text = Path(compile_metal(SOURCE, {"QGEMV_FORMAT": "Q4_0", "QGEMV_TYPE": "half"})).read_bytes()
    names = set(re.findall(rb"gemv_Q4_0_(\w+?)_(r\d_s\d_k\d|plain)\0", text))
    assert names == {(b"half", suffix.encode()) for suffix in VARIANTS}
