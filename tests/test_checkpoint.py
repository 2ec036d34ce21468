"""checkpoint.state_dict: the tensors of a GGUF file, whose rows converters of checkpoints may cut and join."""

import gguf
import pytest
import torch
from gguf_files import QUANT, VALUE, array, build, info, open_bytes, pair, u32

import torch_qgemv
from torch_qgemv import checkpoint
from torch_qgemv.checkpoint import PackedRows, state_dict


def rows(count=8, columns=64, quant_type="Q4_0", seed=0):
    matrix = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    packed = torch_qgemv.quantize(matrix, quant_type)
    return PackedRows(packed, QUANT[quant_type], (count, columns), torch.float32)


def numbers(value):
    return torch_qgemv.dequantize(value._packed, value._quant_type)


@pytest.mark.parametrize(
    "operation",
    [
        lambda w: w[2:5],
        lambda w: w[1::3],
        lambda w: w[3:3],
        lambda w: w.narrow(0, 1, 4),
        lambda w: w.chunk(3),
        lambda w: w.chunk(2, dim=-2),
        lambda w: torch.split(w, (1, 5, 2), dim=0),
        lambda w: w.split(3),
        lambda w: torch.cat([w, w[:2]]),
        lambda w: torch.cat(w.chunk(2)[::-1], dim=0),
        lambda w: torch.cat([torch.split(w, [2, 6])[1], w], 0),
    ],
)
@pytest.mark.parametrize("quant_type", ["Q4_0", "Q8_0"])
def test_rows_that_are_cut_or_joined_stay_packed(operation, quant_type):
    weight = rows(quant_type=quant_type)
    found, expected = operation(weight), operation(numbers(weight))
    for part, values in zip(*[x if isinstance(x, tuple) else (x,) for x in (found, expected)], strict=True):
        assert isinstance(part, PackedRows) and part.shape == values.shape
        assert torch.equal(numbers(part), values)


@pytest.mark.parametrize(
    "operation",
    [
        lambda w: w[:, 3:40],
        lambda w: w.chunk(2, dim=1)[1],
        lambda w: torch.cat([w, w], dim=1),
        lambda w: torch.cat([w, torch.ones(1, 64)]),
        lambda w: w.t()[3:9],
        lambda w: w.reshape(4, 2, 64),
        lambda w: w + 1,
    ],
)
def test_anything_else_gives_the_numbers(operation):
    weight = rows()
    result = operation(weight)
    assert not isinstance(result, PackedRows)
    assert torch.equal(result, operation(numbers(weight)))


def test_rows_of_different_types_are_joined_as_numbers():
    """Q4_0 and Q4_K rows have as many bytes."""
    parts = [rows(columns=256), rows(columns=256, quant_type="Q4_K")]
    assert parts[0]._packed.shape == parts[1]._packed.shape
    joined = torch.cat(parts)
    assert not isinstance(joined, PackedRows)
    assert torch.equal(joined, torch.cat([numbers(part) for part in parts]))


def shape_key(name, *sizes):
    return pair(f"comfy.gguf.orig_shape.{name}", VALUE.ARRAY, array(VALUE.INT32, len(sizes), b"".join(map(u32, sizes))))


def file_of(tmp_path, shape, quant_type, *keys, seed=1):
    """A file with one tensor "w" of random weights; and their values."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if quant_type == QUANT.F32:
        data, values = matrix.numpy().tobytes(), matrix
    else:
        packed = torch_qgemv.quantize(matrix.reshape(-1, shape[-1]), quant_type)
        data, values = packed.numpy().tobytes(), torch_qgemv.dequantize(packed, quant_type)
    return open_bytes(tmp_path, build(keys, [info("w", shape[::-1], quant_type)], data)), values


@pytest.mark.parametrize("quant_type", ["Q8_0", "Q4_0"])
def test_matrix_gets_the_shape_that_its_writer_gave_it_and_stays_packed(tmp_path, quant_type):
    file, values = file_of(tmp_path, (5, 256), QUANT[quant_type], shape_key("w", 4, 320))
    (weight,) = state_dict(file).values()
    assert isinstance(weight, PackedRows) and weight.shape == (4, 320)
    assert torch.equal(numbers(weight), values.reshape(4, 320))


def test_rows_without_whole_blocks_become_numbers(tmp_path):
    file, values = file_of(tmp_path, (5, 256), QUANT.Q4_K, shape_key("w", 4, 320))
    weight = state_dict(file)["w"]
    assert not isinstance(weight, PackedRows) and weight.dtype == torch.float32
    assert torch.equal(weight, values.reshape(4, 320))


@pytest.mark.parametrize("quant_type", ["Q8_0", "F32"])
def test_convolution_gets_its_five_dimensions(tmp_path, quant_type):
    file, values = file_of(tmp_path, (6, 32), QUANT[quant_type], shape_key("w", 2, 4, 3, 2, 4))
    assert torch.equal(state_dict(file)["w"], values.reshape(2, 4, 3, 2, 4))


@pytest.mark.parametrize("sizes", [(5, 31), (0,), (2**31, 2)])
def test_shape_of_other_size_is_an_error(tmp_path, sizes):
    file, _ = file_of(tmp_path, (5, 32), QUANT.Q8_0, shape_key("w", *sizes))
    with pytest.raises(ValueError, match=r"orig_shape\.w'.* is no shape of the 160 weights of that tensor, \[5, 32\]"):
        state_dict(file)


def test_shape_that_is_none_is_an_error(tmp_path):
    key = pair("comfy.gguf.orig_shape.w", VALUE.STRING, b"\x01" + bytes(7) + b"5")
    file, _ = file_of(tmp_path, (5, 32), QUANT.Q8_0, key)
    with pytest.raises(ValueError, match="'5' is no shape of"):
        state_dict(file)


def test_type_that_no_operator_has_is_an_error(tmp_path):
    _, type_size = gguf.GGML_QUANT_SIZES[QUANT.TQ1_0]
    file = open_bytes(tmp_path, build([], [info("w", (256, 1), QUANT.TQ1_0)], bytes(type_size)))
    with pytest.raises(NotImplementedError, match="tensor 'w': type TQ1_0 is none of Q4_0"):
        state_dict(file)


def test_the_bytes_are_those_of_the_file_and_come_back(tmp_path):
    file, _ = file_of(tmp_path, (5, 256), QUANT.Q4_K)
    state = state_dict(file, torch.bfloat16)
    assert state["w"].dtype == torch.bfloat16
    assert state["w"]._packed.data_ptr() == file["w"].data.data_ptr()
    (tensor,) = checkpoint.as_tensors({"new": state["w"][1:]}, file).values()
    assert (tensor.name, tensor.quant_type, tensor.shape) == ("new", QUANT.Q4_K, (4, 256))
    assert torch.equal(tensor.data, file["w"].data[1:])
    assert torch.equal(checkpoint.as_tensors({"t": state["w"].t()}, file)["t"].data, state["w"].float().t())
