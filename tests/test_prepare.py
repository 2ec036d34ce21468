"""torch_qgemv.prepare: weights interleaved for the CPU, which nobody outside should notice."""

import copy
import io
import pickle

import pytest
import torch
from formats import TYPES, assert_linear_close, block_size, dequantized, random_packed, random_x, type_size
from torch import nn

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear

ops = torch.ops.torch_qgemv
by_name = {"ids": lambda t: getattr(t, "name", None) or str(t).removeprefix("torch.")}


def layer(N=35, K=512, quant_type="Q4_K", bias=None):
    return QuantLinear.from_packed(random_packed(quant_type, N, K), quant_type, bias)


def is_interleaved(module):
    return module.stored.dim() == 3


@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_interleaving_is_a_permutation(quant_type):
    for N, K in ((16, 512), (35, 2304), (3, 512), (0, 512)):
        packed = random_packed(quant_type, N, K)
        stored = ops.interleave(packed, quant_type)
        assert stored.shape == (K // block_size(quant_type), N, type_size(quant_type))
        assert torch.equal(stored.flatten().sort().values, packed.flatten().sort().values)
        assert torch.equal(ops.deinterleave(stored, quant_type), packed)
        assert torch.equal(stored.flatten(), packed.flatten()) == (N < 16)  # rows left over stay as they are


def test_interleaved_layout():
    """Halves first, then words: the same unit of 16 rows next to one another."""
    packed = torch.arange(16 * 2 * 18, dtype=torch.int64).view(16, 2, 18).remainder(251).byte()  # Q4_0: 2 + 16 bytes
    stored = ops.interleave(packed.flatten(1), 2).flatten().view(2, 16 * 18)
    for b in range(2):
        assert torch.equal(stored[b, : 16 * 2].view(16, 2), packed[:, b, :2])
        for i in range(4):
            word = stored[b, 32 + 64 * i : 32 + 64 * (i + 1)].view(16, 4)
            assert torch.equal(word, packed[:, b, 2 + 4 * i : 6 + 4 * i])


@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_operators_take_interleaved_weights(quant_type):
    packed = random_packed(quant_type, 35, 2304)
    stored, matrix = ops.interleave(packed, quant_type), dequantized(packed, quant_type)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(torch_qgemv.dequantize(stored, quant_type, dtype), matrix.to(dtype))
        indices = torch.tensor([[34, 0, 15], [16, 31, 32]])
        assert torch.equal(torch_qgemv.embedding(indices, stored, quant_type, dtype), matrix[indices].to(dtype))
        for M in (1, 2, 3, 5, 9, 18):
            x, bias = random_x((M, 2304), dtype, seed=M), random_x((35,))
            y = torch_qgemv.linear(x, stored, quant_type, bias)
            assert_linear_close(y, x, matrix, bias, context=f"M={M}")
    grad_y = random_x((5, 35))
    grad_x = ops.linear_transposed(grad_y, stored, quant_type)
    assert torch.equal(grad_x, ops.linear_transposed(grad_y, packed, quant_type))


def test_infinite_x_meets_interleaved_weights():
    packed = random_packed("Q6_K", 21, 512)
    x = random_x((2, 512))
    x[1, 300] = float("inf")
    y = torch_qgemv.linear(x, ops.interleave(packed, 14), "Q6_K")
    assert torch.equal(y[1], dequantized(packed, TYPES[9])[:, 300] * float("inf"))


def test_errors():
    packed = random_packed("Q4_K", 32, 512)
    stored = ops.interleave(packed, 12)
    x = torch.zeros(1, 512)
    with pytest.raises(ValueError, match=r"interleave: weight \[2, 32, 144\] is interleaved already"):
        ops.interleave(stored, 12)
    with pytest.raises(ValueError, match=r"deinterleave: weight \[32, 288\] is not interleaved"):
        ops.deinterleave(packed, 12)
    with pytest.raises(ValueError, match=r"interleave: weight \[32, 144\] has no two blocks in a row"):
        ops.interleave(packed[:, :144], 12)
    with pytest.raises(ValueError, match=r"weight \[2, 16, 144\] is interleaved, so it can't be a view of parts"):
        torch_qgemv.linear(x, stored[:, 16:], "Q4_K")
    with pytest.raises(ValueError, match=r"weight must be \[N, row_bytes\], got \[2, 32, 144\]"):
        torch_qgemv.linear(x, stored, "Q6_K")
    with pytest.raises(ValueError, match=r"weight must be \[N, row_bytes\], got \[1, 32, 144\]"):
        torch_qgemv.linear(x[:, :256], packed[None, :, :144], "Q4_K")


def test_other_devices_refuse_interleaved_weights(mps):
    stored = ops.interleave(random_packed("Q4_K", 32, 512), 12).to(mps)
    with pytest.raises(ValueError, match="interleaved, which only the CPU can read"):
        torch_qgemv.linear(torch.zeros(1, 512, device=mps), stored, "Q4_K")


def test_prepare():
    model = nn.Sequential(layer(), nn.ReLU(), layer(16, 35 * 32, "Q8_0", random_x((16,))), nn.Linear(16, 3))
    few_rows, one_block = layer(15, 512), layer(64, 256)
    plain = [module.packed.clone() for module in (model[0], model[2])]
    x = random_x((2, 512))
    expected = model[0](x)
    assert torch_qgemv.prepare(model) is model
    assert is_interleaved(model[0]) and is_interleaved(model[2])
    assert torch.equal(model[0](x), expected)
    assert (model[0].in_features, model[0].out_features) == (512, 35)
    for module, packed in zip((model[0], model[2]), plain, strict=True):
        assert torch.equal(module.packed, packed)
    stored = model[0].stored
    assert torch_qgemv.prepare(model)[0].stored is stored  # again: nothing to do
    for module in (few_rows, one_block):
        before = module.stored
        assert torch_qgemv.prepare(module).stored is before


def test_weight_of_a_prepared_module():
    module = torch_qgemv.prepare(layer())
    matrix = dequantized(module.packed, TYPES[7])
    assert module.weight.shape == (35, 512)
    assert torch.equal(module.weight + 0, matrix)
    assert torch.equal(module.to_linear().weight, matrix)
    x = random_x((2, 512))
    assert_linear_close(nn.functional.linear(x, module.weight), x, matrix)


def test_state_dict_is_plain():
    module = layer()
    packed = module.packed.clone()
    state = torch_qgemv.prepare(module).state_dict()
    assert torch.equal(state["packed"], packed)
    fresh = QuantLinear(512, 35, "Q4_K", bias=False)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.packed, packed)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_into_a_prepared_module(assign):
    other = random_packed("Q4_K", 35, 512, seed=1)
    module = torch_qgemv.prepare(layer())
    module.load_state_dict(module.state_dict() | {"packed": other}, assign=assign)
    assert is_interleaved(module)
    assert torch.equal(module.packed, other)


def test_a_failed_load_loses_nothing():
    module = torch_qgemv.prepare(layer())
    packed = module.packed
    with pytest.raises(RuntimeError, match="size mismatch for packed"):
        module.load_state_dict(module.state_dict() | {"packed": torch.zeros(35, 144, dtype=torch.uint8)})
    assert torch.equal(module.packed, packed)


def test_tied_modules_share_interleaved_bytes():
    model = nn.ModuleDict({"embed": nn.Embedding(40, 512), "head": nn.Linear(512, 40, bias=False)})
    model["head"].weight = model["embed"].weight
    torch_qgemv.prepare(torch_qgemv.quantize_model(model, "Q8_0"))
    embed, head = model["embed"], model["head"]
    assert isinstance(embed, QuantEmbedding) and is_interleaved(embed)
    assert embed.stored is head.stored
    state = {name: torch.roll(value, 1, 0) if value.dim() else value for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert embed.stored is head.stored
    assert torch.equal(head.packed, state["head.packed"])
    moved = model.to("meta")
    assert moved["embed"].stored.shape == moved["head"].stored.shape == (40, 544)


def test_moving_to_another_device_gives_plain_bytes(mps):
    module = torch_qgemv.prepare(layer())
    packed, x = module.packed, random_x((2, 512))
    expected = module(x)
    module.to(mps)
    assert not is_interleaved(module)
    assert torch.equal(module.packed.cpu(), packed)
    assert torch.allclose(module(x.to(mps)).cpu(), expected, atol=1e-5)
    module.to("cpu")
    assert torch.equal(module.packed, packed)


def test_casts_keep_the_layout():
    module = torch_qgemv.prepare(layer(bias=random_x((35,))))
    stored = module.stored
    assert module.half().stored is stored and module.dtype == torch.float16


def test_foreign_plain_bytes_in_the_buffer():
    """What accelerate and others do: they set the buffer by its name."""
    other = random_packed("Q4_K", 35, 512, seed=1)
    x = random_x((2, 512))
    for replace in (lambda m: setattr(m, "packed", other), lambda m: m._buffers.__setitem__("packed", other)):
        module = torch_qgemv.prepare(layer())
        replace(module)
        assert_linear_close(module(x), x, dequantized(other, TYPES[7]))
        assert torch.equal(module.packed, other)


def test_copies_and_pickles():
    module = torch_qgemv.prepare(layer())
    x = random_x((2, 512))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert torch.equal(other.packed, module.packed)
        assert torch.equal(other(x), module(x))


def test_pickle_loaded_onto_another_device(mps):
    file = io.BytesIO()
    module = torch_qgemv.prepare(layer())
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False, map_location=mps)
    assert loaded.stored.shape == (35, 288)
    assert torch.equal(loaded.packed.cpu(), module.packed)


def test_compiled():
    module = torch_qgemv.prepare(layer())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = random_x((2, 512))
    assert torch.equal(compiled(x), module(x))
