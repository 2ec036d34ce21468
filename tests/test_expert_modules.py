"""QuantExpertLinear and ExpertLinear: the linear layers of a mixture of experts as modules."""

import copy
import pickle

import pytest
import torch
from torch import nn

import torch_qgemv
from torch_qgemv.experts import ExpertLinear, QuantExpertLinear
from torch_qgemv.testing import linear_error, random_packed

EXPERTS, ROWS, COLUMNS = 3, 18, 64


def packed():
    return random_packed("Q4_0", EXPERTS * ROWS, COLUMNS).unflatten(0, (EXPERTS, ROWS))


def matrices():
    return torch_qgemv.dequantize(packed().flatten(0, 1), "Q4_0").unflatten(0, (EXPERTS, ROWS))


def x_and_ids(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, COLUMNS, generator=generator) / 8, torch.randint(EXPERTS, shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepared", [False, True])
def test_each_row_goes_through_its_expert(prepared, dtype, device):
    layer = QuantExpertLinear.from_packed(packed(), "Q4_0").to(device, dtype)
    if prepared:
        torch_qgemv.prepare(layer)
    assert torch.equal(layer.packed.cpu(), packed())
    x, ids = x_and_ids(7)
    y = layer(x.to(device, dtype), ids.to(device))
    assert y.shape == (7, ROWS) and y.dtype == dtype
    for row, expert in enumerate(ids.tolist()):
        assert linear_error(y[row], x[row].to(dtype), matrices()[expert]) <= 1


def test_several_experts_for_each_row(device):
    layer = QuantExpertLinear.from_packed(packed(), "Q4_0").to(device)
    x, ids = x_and_ids(5, 2)
    apart = layer(x.to(device), ids.to(device))
    assert apart.shape == (5, 2, ROWS)
    assert torch.equal(layer(x[:, 0].to(device), ids.to(device))[:, 0], apart[:, 0])


def test_unpacked_it_gives_the_same(device):
    layer = torch_qgemv.prepare(QuantExpertLinear.from_packed(packed(), "Q4_0").to(device))
    dense = layer.to_expert_linear()
    assert torch.equal(dense.weight.cpu(), matrices())
    for shape in ((4,), (4, 2), (0,)):
        x, ids = (tensor.to(device) for tensor in x_and_ids(*shape))
        torch.testing.assert_close(layer(x, ids), dense(x, ids))
        if len(shape) == 2:  # several experts for one row
            torch.testing.assert_close(layer(x[:, 1], ids), dense(x[:, 1], ids))
    assert layer.to_expert_linear(torch.float16).weight.dtype == torch.float16


def test_copies_pickles_and_state_dicts_are_whole():
    layer = torch_qgemv.prepare(nn.Sequential(QuantExpertLinear.from_packed(packed(), "Q4_0")))
    x, ids = x_and_ids(6)
    expected = layer[0](x, ids)
    assert torch.equal(layer.state_dict()["0.packed"], packed())
    fresh = nn.Sequential(QuantExpertLinear(EXPERTS, COLUMNS, ROWS, "Q4_0"))
    prepared = torch_qgemv.prepare(copy.deepcopy(fresh))
    on_meta = copy.deepcopy(fresh).to("meta").to_empty(device="cpu")
    for other in (fresh, prepared, on_meta):
        other.load_state_dict(layer.state_dict())
    dense = nn.Sequential(ExpertLinear(EXPERTS, COLUMNS, ROWS, device="meta"))
    assert torch_qgemv.load_state_dict(dense, layer.state_dict()) == ([], [])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh, prepared, on_meta, dense):
        assert isinstance(other[0], QuantExpertLinear)
        assert torch.equal(other[0](x, ids), expected)


def test_moves_take_the_plain_bytes_along(device):
    layer = torch_qgemv.prepare(QuantExpertLinear.from_packed(packed(), "Q4_0"))
    assert layer.stored.dim() == 4
    assert torch.equal(layer.to(device).packed.cpu(), packed())
    assert layer.num_experts == EXPERTS and (layer.in_features, layer.out_features) == (COLUMNS, ROWS)


def test_layer_has_no_weight():
    layer = QuantExpertLinear.from_packed(packed(), "Q4_0")
    assert not hasattr(layer, "weight")
    with pytest.raises(TypeError, match="can't be set"):
        layer.weight = torch.zeros(2)


@pytest.mark.parametrize("expert", [-1, EXPERTS])
def test_experts_that_are_not_there_are_refused(expert):
    layer = QuantExpertLinear.from_packed(packed(), "Q4_0")
    for each in (layer, layer.to_expert_linear()):
        with pytest.raises(IndexError):
            each(torch.zeros(1, COLUMNS), torch.tensor([expert]))


def test_wrong_bytes_are_refused():
    with pytest.raises(ValueError, match=r"packed must be uint8 \[E, N, row_bytes\] with whole Q4_0 blocks of 18"):
        QuantExpertLinear.from_packed(packed().flatten(0, 1), "Q4_0")
    dense = nn.Sequential(ExpertLinear(EXPERTS, COLUMNS, ROWS + 1))
    state = nn.Sequential(QuantExpertLinear.from_packed(packed(), "Q4_0")).state_dict()
    with pytest.raises(ValueError, match=r"no Q4_0 weight of \[E, N, K\] = \[3, 19, 64\]"):
        torch_qgemv.load_state_dict(dense, state)
