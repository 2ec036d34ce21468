"""QuantLinear, QuantEmbedding and quantize_model."""

import copy
import pickle

import libgguf
import numpy as np
import pytest
import torch
from formats import TYPES, dequantized, random_packed, random_x
from torch import nn
from torch.nn import functional as F

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear, ops, weight

Q4_K = TYPES[7]


@pytest.fixture
def unpackings(monkeypatch):
    """A list that grows at every dequantization."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return ops.dequantize(*args, **kwargs)

    monkeypatch.setattr(weight, "dequantize", counting)
    return calls


def make_linear(device="cpu", bias=True, N=6, K=512):
    layer = QuantLinear.from_packed(random_packed(Q4_K, N, K), Q4_K, torch.randn(N) if bias else None)
    return layer.to(device), dequantized(layer.packed, Q4_K).to(device)


def test_new_module_is_a_zero_matrix(device):
    layer = QuantLinear(512, 6, "Q4_K", device=device)
    assert (layer.in_features, layer.out_features, layer.quant_type) == (512, 6, Q4_K)
    assert layer.packed.shape == (6, 288) and layer.packed.dtype == torch.uint8
    assert torch.equal(layer(torch.ones(2, 512, device=device)), torch.zeros(2, 6, device=device))
    assert "in_features=512, out_features=6, quant_type=Q4_K, bias=True" in repr(layer)
    assert QuantLinear(512, 6, "Q4_K", bias=False).bias is None
    half = QuantLinear(256, 6, 12, dtype=torch.half)
    assert half.dtype == half.bias.dtype == torch.half
    with pytest.raises(ValueError, match=r"100 features .* 256 weights of a Q4_K block"):
        QuantLinear(100, 6, "Q4_K")


def test_from_packed_holds_the_bytes(device):
    packed = random_packed(Q4_K, 6, 512).to(device)
    layer = QuantLinear.from_packed(packed, "Q4_K", torch.ones(6, device=device))
    assert layer.packed.data_ptr() == packed.data_ptr()
    x = random_x((3, 512)).to(device)
    assert torch.equal(layer(x), torch_qgemv.linear(x, packed, Q4_K, torch.ones(6, device=device)))
    with pytest.raises(ValueError, match=r"Q4_K blocks of 144 bytes, got torch.uint8 \[6, 100\]"):
        QuantLinear.from_packed(packed[:, :100], "Q4_K")
    with pytest.raises(ValueError, match=r"\[out_features\] = \[6\], got \[5\]"):
        QuantLinear.from_packed(packed, "Q4_K", torch.ones(5, device=device))


def test_to_linear(device):
    layer, matrix = make_linear(device)
    linear = layer.to_linear()
    assert type(linear) is nn.Linear and torch.equal(linear.weight, matrix) and torch.equal(linear.bias, layer.bias)
    assert (linear.in_features, linear.out_features) == (512, 6)
    assert linear.bias is not layer.bias and linear.bias.data_ptr() != layer.bias.data_ptr()
    assert layer.to_linear(torch.bfloat16).weight.dtype == layer.to_linear(torch.bfloat16).bias.dtype == torch.bfloat16
    assert make_linear(device, bias=False)[0].to_linear().bias is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_dtype_leaves_the_bytes_alone(dtype):
    layer, _ = make_linear(bias=False)
    before = layer.packed.clone()
    layer.to(dtype)
    assert layer.dtype == dtype and torch.equal(layer.packed, before) and layer.weight.dtype == dtype
    assert set(layer.state_dict()) == {"packed", "quant_type_id"}


def test_state_dict_copy_and_pickle():
    layer, _ = make_linear()
    other = QuantLinear(512, 6, "Q4_K")
    assert set(layer.state_dict()) == {"packed", "quant_type_id", "bias"}
    other.load_state_dict(layer.state_dict())
    x = random_x((2, 512))
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))


# ---- .weight, the stand-in


def test_weight_looks_like_the_matrix_and_unpacks_nothing(unpackings, device):
    layer, _ = make_linear(device)
    layer.bfloat16()
    weight = layer.weight
    assert hasattr(layer, "weight") and not hasattr(layer, "no_such_name")
    assert weight.shape == (6, 512) and weight.size(1) == 512 and weight.dim() == 2 and weight.numel() == 6 * 512
    assert weight.dtype == torch.bfloat16 and weight.device.type == torch.device(device).type
    assert weight.is_floating_point() and not weight.is_meta and not weight.requires_grad
    assert isinstance(weight, torch.Tensor) and "Q4_K" in repr(weight)
    assert torch.zeros(2, device=device).to(weight.dtype).dtype == torch.bfloat16
    assert not unpackings


def test_functional_linear_and_embedding_run_packed(unpackings, device):
    layer, matrix = make_linear(device)
    x, indices = random_x((2, 512)).to(device), torch.tensor([5, 0], device=device)
    assert torch.equal(F.linear(x, layer.weight, layer.bias), layer(x))
    assert torch.equal(F.linear(x, weight=layer.weight, bias=None), torch_qgemv.linear(x, layer.packed, Q4_K))
    assert torch.equal(F.embedding(indices, layer.weight), matrix[indices])
    assert torch.equal(F.embedding(indices, layer.weight, 0, scale_grad_by_freq=True), matrix[indices])
    assert not unpackings


def test_other_uses_work_on_the_dequantized_matrix(unpackings, device):
    layer, matrix = make_linear(device)
    x = random_x((2, 512)).to(device).requires_grad_()
    assert torch.equal(layer.weight + 1, matrix + 1)
    assert torch.equal(layer.weight[2:, 5], matrix[2:, 5])
    assert torch.equal(layer.weight.detach().clone(), matrix) and type(layer.weight.clone()) is torch.Tensor
    assert torch.equal(layer.weight.float().cpu(), matrix.cpu())
    torch.testing.assert_close(x @ layer.weight.T, x @ matrix.T)
    (x @ layer.weight.T).sum().backward()
    torch.testing.assert_close(x.grad, matrix.sum(0).expand(2, -1))
    assert F.linear(layer.weight, matrix).shape == (6, 6)
    assert unpackings


def writes():
    def item(weight):
        weight[0] = 1

    return [
        lambda w: w.zero_(),
        lambda w: w.add_(1),
        lambda w: w.data.zero_(),
        lambda w: w.copy_(torch.ones(6, 512)),
        lambda w: nn.init.normal_(w),
        lambda w: torch.add(w, 1, out=w),
        lambda w: torch._foreach_add_([w], 1),
        item,
        lambda w: F.embedding(torch.tensor([0]), w, max_norm=1.0),
    ]


@pytest.mark.parametrize("write", writes())
def test_writes_to_the_weight_raise(write):
    layer, _ = make_linear()
    before = layer.packed.clone()
    with pytest.raises(TypeError, match="to_linear"):
        write(layer.weight)
    assert torch.equal(layer.packed, before)


@pytest.mark.parametrize("value", [torch.ones(6, 512), nn.Parameter(torch.ones(6, 512)), None])
def test_assigning_the_weight_raises(value):
    layer, _ = make_linear()
    with pytest.raises(TypeError, match="to_linear"):
        layer.weight = value


def test_copying_the_weight_alone_raises():
    layer, _ = make_linear()
    with pytest.raises(TypeError, match="to_linear"):
        copy.deepcopy(layer.weight)


# ---- QuantEmbedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding(dtype, device):
    layer = QuantEmbedding.from_packed(random_packed(Q4_K, 9, 256), Q4_K).to(device, dtype)
    matrix, indices = dequantized(layer.packed, Q4_K).to(dtype), torch.tensor([[8, 0]])
    assert torch.equal(layer(indices.to(device)).cpu(), matrix[indices])
    assert (layer.num_embeddings, layer.embedding_dim) == (9, 256) and "9, 256, quant_type=Q4_K" in repr(layer)
    dense = layer.to_embedding()
    assert type(dense) is nn.Embedding and torch.equal(dense(indices.to(device)).cpu(), matrix[indices])
    assert QuantEmbedding(9, 256, "Q4_K", device=device)(indices.to(device)).shape == (1, 2, 256)


def test_tied_embedding_and_head_share_one_buffer():
    embed = QuantEmbedding.from_packed(random_packed(Q4_K, 9, 256), Q4_K)
    head = QuantLinear.from_packed(embed.packed, Q4_K)
    assert head.packed is embed.packed


# ---- from floats
def test_from_linear(device):
    linear = nn.Linear(64, 5, device=device, dtype=torch.bfloat16).eval()
    layer = QuantLinear.from_linear(linear, "Q8_0")
    assert layer.bias is linear.bias and layer.dtype == torch.bfloat16 and not layer.training
    x = random_x((2, 64), torch.bfloat16).to(device)
    torch.testing.assert_close(layer(x), linear(x), rtol=0.02, atol=0.02)


def test_data_made_by_another_encoder(device):
    """libgguf packs what gguf-py can't; the product of the packed weight is near that of the weight."""
    weight = np.random.default_rng(0).standard_normal((32, 512)).astype(np.float32)
    x = random_x((3, 512))
    for name, bound in (("Q4_K", 0.1), ("Q6_K", 0.03), ("IQ4_XS", 0.12), ("Q2_K", 0.5)):
        packed = torch.from_numpy(libgguf.quantize_rows(weight, libgguf.GGMLQuantizationType[name]))
        y = QuantLinear.from_packed(packed, name).to(device)(x.to(device)).cpu()
        exact = x @ torch.from_numpy(weight).T
        assert (y - exact).norm() <= bound * exact.norm(), name


# ---- quantize_model


def make_model():
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Sequential(nn.Linear(96, 32, bias=False)), nn.Embedding(3, 32)
    )
    model.twin = model[0]
    return model


def test_quantize_model_replaces_in_place(device):
    model = make_model().to(device)
    x = random_x((4, 64)).to(device)
    before = model[2](model[1](model[0](x)))
    assert torch_qgemv.quantize_model(model, "Q8_0") is model
    assert isinstance(model[0], QuantLinear) and isinstance(model[2][0], QuantLinear) and type(model[3]) is nn.Embedding
    assert model.twin is model[0]
    after = model[2](model[1](model[0](x)))
    assert (after - before).norm() < 0.02 * before.norm()


def test_quantize_model_predicate_and_errors():
    model = make_model()
    torch_qgemv.quantize_model(model, "Q8_0", lambda name, module: name.startswith("2"))
    assert type(model[0]) is nn.Linear and isinstance(model[2][0], QuantLinear)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    with pytest.raises(ValueError, match=r"1 \(in_features=48\)"):
        torch_qgemv.quantize_model(model, "Q8_0")
    assert type(model[0]) is nn.Linear
    assert isinstance(torch_qgemv.quantize_model(nn.Linear(64, 2), "Q8_0"), QuantLinear)
    with pytest.raises(ValueError, match=r"\(in_features=96\): no multiple of the 256 weights of a Q4_K block"):
        torch_qgemv.quantize_model(nn.Sequential(nn.Linear(96, 4)), "Q4_K")
