"""embedding: rows of dequantize."""

import pytest
import torch
from formats import TYPES, block_size, dequantized, random_packed

import torch_qgemv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_rows(quant_type, dtype, device):
    packed = random_packed(quant_type, 37, 3 * block_size(quant_type))
    indices = torch.tensor([[36, 0, 7], [7, 1, 35]])
    out = torch_qgemv.embedding(indices.to(device), packed.to(device), quant_type, dtype)
    assert torch.equal(out.cpu(), dequantized(packed, quant_type)[indices].to(dtype))


@pytest.mark.parametrize("indices", [torch.tensor(3), torch.zeros(0, dtype=torch.long), torch.arange(8).int()[::2]])
def test_index_shapes_and_dtypes(indices, device):
    packed = random_packed(TYPES[0], 8, 32)
    out = torch_qgemv.embedding(indices.to(device), packed.to(device), TYPES[0])
    assert torch.equal(out.cpu(), dequantized(packed, TYPES[0])[indices.long()])


@pytest.mark.parametrize("index", [-1, 8, 2**40, -(2**63)])
def test_index_out_of_range(index, device):
    """An error on the CPU; a kernel on a GPU can't raise one, and gives a row of NaN."""
    packed = random_packed(TYPES[0], 8, 32)
    indices = torch.tensor([0, index], device=device)
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"index {index} is out of range for 8 rows"):
            torch_qgemv.embedding(indices, packed, TYPES[0])
        with pytest.raises(IndexError, match="out of range for 0 rows"):
            torch_qgemv.embedding(indices[:1], packed[:0], TYPES[0])
    else:
        out = torch_qgemv.embedding(indices, packed.to(device), TYPES[0]).cpu()
        assert torch.equal(out[0], dequantized(packed, TYPES[0])[0])
        assert out[1].isnan().all()
        assert torch_qgemv.embedding(indices[:1], packed[:0].to(device), TYPES[0]).isnan().all()


def test_errors(device):
    packed = random_packed(TYPES[0], 8, 32).to(device)
    with pytest.raises(TypeError, match="indices must be int64 or int32, got Float"):
        torch_qgemv.embedding(torch.zeros(2, device=device), packed, TYPES[0])
    with pytest.raises(TypeError, match="dtype must be"):
        torch_qgemv.embedding(torch.zeros(2, dtype=torch.long, device=device), packed, TYPES[0], torch.int8)
