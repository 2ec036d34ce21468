"""dequantize: bit-equal to gguf's own decoder."""

import gguf
import numpy as np
import pytest
import torch
from formats import TYPES, block_size, dequantized, random_packed, type_size

import torch_qgemv
from torch_qgemv.testing import half_fields

# Written down, since random data relies on what half_fields finds out.
HALF_FIELDS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def test_half_fields():
    assert {t.name: half_fields(t) for t in TYPES} == HALF_FIELDS


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def test_types_are_the_twelve():
    names = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
    assert sorted(torch_qgemv.quant_types()) == sorted(names)


@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("blocks", [1, 3])
def test_bit_equal_to_gguf_on_random_bytes(quant_type, blocks, device):
    packed = random_packed(quant_type, 67, blocks * block_size(quant_type))
    out = torch_qgemv.dequantize(packed.to(device), quant_type)
    assert torch.equal(bits(out.cpu()), bits(dequantized(packed, quant_type)))


@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_bit_equal_with_any_scale(quant_type, device):
    """Every half as a scale: zeros, subnormals, infinities; NaN only where gguf has one."""
    packed = random_packed(quant_type, 256, 256 * block_size(quant_type)).reshape(65536, type_size(quant_type))
    halfs = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8).reshape(-1, 2)
    for i, offset in enumerate(half_fields(quant_type)):
        packed[:, offset : offset + 2] = halfs.roll(i * 12345, 0)
    out = torch_qgemv.dequantize(packed.to(device), quant_type).cpu()
    with np.errstate(all="ignore"):
        expected = dequantized(packed, quant_type)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(bits(out)[~out.isnan()], bits(expected)[~expected.isnan()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_half_types_are_rounded_from_float32(quant_type, dtype, device):
    packed = random_packed(quant_type, 33, block_size(quant_type))
    out = torch_qgemv.dequantize(packed.to(device), quant_type, dtype)
    assert torch.equal(bits(out.cpu()), bits(dequantized(packed, quant_type).to(dtype)))


@pytest.mark.parametrize("value", [65504.0, 65519.0, 65520.0, 1e-7, 2.9e-8, 3.0e-8, 6e-8, -1e-6, 3.3e38, -0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_at_the_edges(value, dtype, device):
    """A bias alone goes through the same rounding: y = 0 x + bias."""
    packed = torch.zeros(5, 18, dtype=torch.uint8, device=device)
    bias = torch.full((5,), value, device=device)
    y = torch_qgemv.linear(torch.zeros(1, 32, dtype=dtype, device=device), packed, "Q4_0", bias)
    assert torch.equal(y.cpu(), bias.cpu().to(dtype).expand(1, 5))


def test_views_of_a_packed_weight(device):
    quant_type = gguf.GGMLQuantizationType.Q4_K
    packed = random_packed(quant_type, 20, 512)
    matrix, moved = dequantized(packed, quant_type), packed.to(device)
    assert torch.equal(torch_qgemv.dequantize(moved[3:17:2], quant_type).cpu(), matrix[3:17:2])
    assert torch.equal(torch_qgemv.dequantize(moved[:, 144:], quant_type).cpu(), matrix[:, 256:])
    assert torch.equal(torch_qgemv.dequantize(moved.T.contiguous().T, quant_type).cpu(), matrix)
    odd = torch.empty(packed.numel() + 1, dtype=torch.uint8, device=device)[1:].view(packed.shape).copy_(moved)
    assert torch.equal(torch_qgemv.dequantize(odd, quant_type).cpu(), matrix)


@pytest.mark.parametrize("shape", [(0, 144), (5, 0), (0, 0)])
def test_empty(shape, device):
    out = torch_qgemv.dequantize(torch.empty(shape, dtype=torch.uint8, device=device), "Q4_K")
    assert out.shape == (shape[0], shape[1] // 144 * 256)


def test_errors(device):
    weight = torch.zeros(4, 144, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"quant_type 99 .*Q4_K"):
        torch.ops.torch_qgemv.dequantize(weight, 99)
    with pytest.raises(ValueError, match="'Q9_K' is not a supported"):
        torch_qgemv.dequantize(weight, "Q9_K")
    with pytest.raises(ValueError, match=r"rows of 145 bytes .*Q4_K blocks of 144"):
        torch_qgemv.dequantize(torch.zeros(4, 145, dtype=torch.uint8, device=device), "Q4_K")
    with pytest.raises(ValueError, match=r"\[N, row_bytes\], got \[144\]"):
        torch_qgemv.dequantize(weight[0], "Q4_K")
    with pytest.raises(TypeError, match="uint8"):
        torch_qgemv.dequantize(weight.to(torch.int8), "Q4_K")
    with pytest.raises(TypeError, match="dtype must be float32, float16 or bfloat16, got Double"):
        torch_qgemv.dequantize(weight, "Q4_K", torch.float64)
