"""torch_qgemv.quantize: the encoders of all types, against ggml's (libgguf)."""

import gguf
import libgguf
import numpy as np
import pytest
import torch
from formats import TYPES, block_size, dequantized, type_size

import torch_qgemv

by_name = {"ids": lambda t: getattr(t, "name", None) or str(t).removeprefix("torch.")}
each_type = pytest.mark.parametrize("quant_type", TYPES, **by_name)
K = 768


def normal(rng):
    return rng.standard_normal((96, K))


def uniform(rng):
    return rng.uniform(-1, 1, (96, K))


def heavy_tailed(rng):
    return rng.standard_t(3, (96, K))


def offset(rng):
    return rng.standard_normal((96, K)) + 2


def all_equal(rng):
    return np.repeat(rng.standard_normal((400, 1)), 256, axis=1)


def from_q8_0(rng):
    """As a model has them whose weights were Q8_0 before."""
    weight = torch.from_numpy(rng.standard_t(8, (96, K)).astype(np.float32) / 30)
    packed = libgguf.quantize_rows(weight.numpy(), libgguf.GGMLQuantizationType.Q8_0)
    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)


KINDS = (normal, uniform, heavy_tailed, offset, all_equal, from_q8_0)


def by_ggml(weight: np.ndarray, quant_type, importance=None) -> torch.Tensor:
    raw = libgguf.quantize_rows_raw(int(quant_type), weight, *weight.shape, importance)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(len(weight), -1)


def errors(packed, quant_type, weight, importance) -> np.ndarray:
    """The plain squared error, and the one weighted by the importance, or by |x| where there is none."""
    left = (dequantized(packed, quant_type).numpy().astype(np.float64) - weight) ** 2
    return np.array([left.sum(), (left * (np.abs(weight) if importance is None else importance)).sum()])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@each_type
def test_errors_are_at_most_those_of_ggml(quant_type, kind):
    rng = np.random.default_rng(11)
    weight = np.ascontiguousarray(kind(rng), dtype=np.float32)
    columns = weight.shape[1]
    for importance in (None, rng.chisquare(1, columns), np.exp(1.5 * rng.standard_normal(columns))):
        importance = None if importance is None else importance.astype(np.float32)
        given = None if importance is None else torch.from_numpy(importance)
        ours = torch_qgemv.quantize(torch.from_numpy(weight), quant_type, given)
        mine = errors(ours, quant_type, weight, importance)
        theirs = errors(by_ggml(weight, quant_type, importance), quant_type, weight, importance)
        assert (mine <= theirs).all(), f"{mine / theirs} times ggml's error"


@each_type
def test_every_instruction_set_and_number_of_threads_gives_the_same_bytes(quant_type):
    size, generator = block_size(quant_type), torch.Generator().manual_seed(2)
    for N, blocks in ((1, 1), (3, 5), (16, 3)):
        weight = torch.randn(N, blocks * size, generator=generator)
        for importance in (None, torch.rand(blocks * size, generator=generator)):
            packed = torch_qgemv.quantize(weight, quant_type, importance)
            assert packed.shape == (N, blocks * type_size(quant_type))
            for isa in torch.ops.torch_qgemv._cpu_isas():
                other = torch.ops.torch_qgemv._quantize_isa(weight, quant_type, importance, isa)
                assert torch.equal(packed, other), isa
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(packed, torch_qgemv.quantize(weight, quant_type, importance))
    finally:
        torch.set_num_threads(threads)


@each_type
def test_rows_do_not_depend_on_each_other(quant_type):
    weight = torch.randn(7, 2 * block_size(quant_type), generator=torch.Generator().manual_seed(3))
    together = torch_qgemv.quantize(weight, quant_type)
    for row, packed in zip(weight, together, strict=True):
        assert torch.equal(torch_qgemv.quantize(row[None], quant_type)[0], packed)


@each_type
def test_zeros_stay_zeros(quant_type, device):
    weight = torch.randn(5, 2 * block_size(quant_type), generator=torch.Generator().manual_seed(4))
    weight[2] = 0
    weight[4, : block_size(quant_type)] = 0
    packed = torch_qgemv.quantize(weight.to(device), quant_type)
    assert packed.device.type == torch.device(device).type
    matrix = dequantized(packed, quant_type)
    assert not matrix[2].any()
    assert not matrix[4, : block_size(quant_type)].any()
    assert matrix[4].any()
    assert torch.equal(packed.cpu(), torch_qgemv.quantize(weight, quant_type))


@each_type
def test_magnitudes_from_the_smallest_to_the_largest_scale(quant_type):
    """A power of two changes the scales alone, until float16 ends."""
    weight = 4 * torch.randn(4, block_size(quant_type), generator=torch.Generator().manual_seed(5))
    matrix = dequantized(torch_qgemv.quantize(weight, quant_type), quant_type)
    for exponent in (5, 10):
        packed = torch_qgemv.quantize(weight * 2.0**exponent, quant_type)
        assert torch.equal(dequantized(packed, quant_type) / 2.0**exponent, matrix)
    small = dequantized(torch_qgemv.quantize(weight / 64, quant_type), quant_type) * 64  # its scales have fewer bits
    assert (small - weight).norm() <= 1.1 * (matrix - weight).norm()
    for tiny in (1e-12, 1e-38, 1e-45):
        assert dequantized(torch_qgemv.quantize(weight * tiny, quant_type), quant_type).abs().max() <= 1e-6
    with pytest.raises(ValueError, match=rf"row 3 that are too large for the float16 scales of {quant_type.name}"):
        torch_qgemv.quantize(torch.cat([weight[:3], weight[3:] * 1e30]), quant_type)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], **by_name)
@each_type
def test_dtypes_and_strides(quant_type, dtype):
    size = block_size(quant_type)
    weight = torch.randn(3 * size, 9, generator=torch.Generator().manual_seed(6)).to(dtype).t()[1::2]
    importance = torch.rand(6 * size, generator=torch.Generator().manual_seed(7), dtype=torch.float32).double()[::2]
    expected = torch_qgemv.quantize(weight.float().contiguous(), quant_type, importance.float())
    assert torch.equal(torch_qgemv.quantize(weight, quant_type, importance), expected)


@each_type
def test_nan_and_infinity_are_refused_naming_the_row(quant_type, device):
    weight = torch.ones(40, 2 * block_size(quant_type), device=device)
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight[37, 3] = weight[21, -1] = bad
        with pytest.raises(ValueError, match=r"weight \[40, \d+\] has a NaN or an infinity in row 21"):
            torch_qgemv.quantize(weight, quant_type)
    assert torch_qgemv.quantize(weight[:0], quant_type).shape == (0, 2 * type_size(quant_type))
    assert torch_qgemv.quantize(weight[:, :0], quant_type).shape == (40, 0)


def test_errors(device):
    weight = torch.ones(3, 512, device=device)
    with pytest.raises(ValueError, match=r"weight \[3, 33\] has K = 33, no multiple of the 32 weights of a Q8_0"):
        torch_qgemv.quantize(weight[:, :33], "Q8_0")
    with pytest.raises(ValueError, match="float matrix"):
        torch_qgemv.quantize(weight[0], "Q8_0")
    with pytest.raises(ValueError, match="float matrix"):
        torch_qgemv.quantize(weight.int(), "Q8_0")
    with pytest.raises(ValueError, match=r"importance must be float \[K\] = \[512\], got Float \[2, 512\]"):
        torch_qgemv.quantize(weight, "Q8_0", weight[:2])
    with pytest.raises(ValueError, match=r"importance must be float \[K\] = \[512\], got Int \[512\]"):
        torch_qgemv.quantize(weight, "Q8_0", weight[0].int())
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"importance\[5\] is .*, but it must be finite and not negative"):
            torch_qgemv.quantize(weight, "Q4_K", torch.tensor([1.0] * 5 + [bad] + [1.0] * 506, device=device))
    if torch.device(device).type != "cpu":
        with pytest.raises(ValueError, match="importance is on cpu, but weight is on mps"):
            torch_qgemv.quantize(weight, "Q8_0", torch.ones(512))


def test_importance_of_zero_everywhere_counts_all_errors_alike():
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(8))
    plain = [
        (dequantized(torch_qgemv.quantize(weight, "Q4_K", importance), gguf.GGMLQuantizationType.Q4_K) - weight).norm()
        for importance in (torch.zeros(256), torch.ones(256), torch.arange(256.0))
    ]
    torch.testing.assert_close(plain[0], plain[1], rtol=1e-2, atol=0)
    assert plain[2] > 1.001 * plain[1]
