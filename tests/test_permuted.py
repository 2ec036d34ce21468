"""PermutedQuantLinear: a packed weight whose columns are in another order than the values of x."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_qgemv
from torch_qgemv import QuantLinear
from torch_qgemv.permuted import PermutedQuantLinear
from torch_qgemv.testing import linear_error, random_packed

ROWS, COLUMNS = 17, 256
PERMUTATION = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(0))
MATRIX = torch.empty(ROWS, COLUMNS)
MATRIX[:, PERMUTATION] = torch_qgemv.dequantize(random_packed("Q4_K", ROWS, COLUMNS), "Q4_K")
X = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1)) / 16


def make(device="cpu", bias=None):
    packed = random_packed("Q4_K", ROWS, COLUMNS)
    return PermutedQuantLinear.from_packed(packed, "Q4_K", bias, PERMUTATION).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_columns_belong_to_the_values_they_name(has_bias, dtype, device):
    bias = torch.linspace(-1, 1, ROWS) if has_bias else None
    layer, x = make(device, bias).to(dtype), X.to(dtype)
    for rows in (x, x[0], x[:0], x[None]):
        y = layer(rows.to(device))
        assert y.shape == (*rows.shape[:-1], ROWS) and y.dtype == dtype
        assert linear_error(y, rows, MATRIX, None if bias is None else bias.to(dtype)) <= 1
    assert layer.packed.cpu().equal(random_packed("Q4_K", ROWS, COLUMNS))


def test_weight_has_the_columns_in_the_order_of_x(device):
    layer = make(device)
    x, weight = X.to(device), layer.weight
    expected = layer(x)
    assert weight.shape == (ROWS, COLUMNS) and torch.equal(weight + 0, MATRIX.to(device))
    assert torch.equal(F.linear(x, weight), expected)
    torch.testing.assert_close(x @ weight.T, expected)
    torch.testing.assert_close(F.linear(x[:, :ROWS], weight.T), x[:, :ROWS] @ MATRIX.to(device))
    assert torch.equal(F.embedding(torch.tensor([3], device=device), weight), MATRIX[3:4].to(device))
    if device == "cpu":  # MPS has no float64
        assert torch.equal(layer.double().weight + 0, MATRIX.double())


def test_compiled_forward_and_weight():
    layer = make()
    for use in (layer, lambda x: F.linear(x, layer.weight), lambda x: x @ (layer.weight * 2).T):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(use, fullgraph=True, backend="aot_eager")(X), use(X))


def test_unpacked_it_is_an_ordinary_linear(device):
    linear = make(device, torch.ones(ROWS)).to_linear()
    assert type(linear) is nn.Linear and torch.equal(linear.weight, MATRIX.to(device))


def test_gradient_reaches_the_values_of_x(device):
    x = X.to(device, copy=True).requires_grad_()
    make(device)(x).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), MATRIX.sum(0).expand_as(X), atol=1e-5, rtol=1e-5)


def test_copies_pickles_and_state_dicts_keep_the_order():
    layer = torch_qgemv.prepare(nn.Sequential(make()))
    expected = layer(X)
    fresh = nn.Sequential(PermutedQuantLinear(COLUMNS, ROWS, "Q4_K", bias=False))
    on_meta = copy.deepcopy(fresh).to("meta").to_empty(device="cpu")
    for other in (fresh, on_meta):
        other.load_state_dict(layer.state_dict())
    plain = torch_qgemv.load_state_dict  # a plain model becomes the packed one
    dense = [nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False, device=start)) for start in ("cpu", "meta")]
    assert [plain(model, layer.state_dict()) for model in dense] == [([], [])] * 2
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh, on_meta, *dense):
        assert isinstance(other[0], PermutedQuantLinear)
        assert torch.equal(other(X), expected)


def test_state_dict_with_another_order_of_columns_is_refused():
    permuted, plain = make(), QuantLinear(COLUMNS, ROWS, "Q4_K", bias=False)
    for module, other in ((permuted, plain), (plain, permuted)):
        before = module.packed.clone()
        with pytest.raises(RuntimeError, match=r"packed has an input_permutation in the (state dict|module), but none"):
            module.load_state_dict(other.state_dict(), strict=False)
        assert torch.equal(module.packed, before)


BAD = {
    "twice": (torch.zeros(COLUMNS, dtype=torch.int64), r"must hold each of 0 \.\.\. 255 once"),
    "outside": (torch.arange(1, COLUMNS + 1), r"must hold each of 0 \.\.\. 255 once"),
    "short": (torch.arange(COLUMNS - 1), r"must be int64 \[K\] = \[256\], got torch.int64 \[255\]"),
    "float": (torch.arange(COLUMNS).float(), r"must be int64 \[K\] = \[256\], got torch.float32 \[256\]"),
}


@pytest.mark.parametrize(("permutation", "message"), BAD.values(), ids=BAD)
def test_what_is_no_permutation_is_refused(permutation, message):
    with pytest.raises(ValueError, match=f"input_permutation {message}"):
        PermutedQuantLinear.from_packed(random_packed("Q4_K", ROWS, COLUMNS), "Q4_K", None, permutation)
    state = {f"0.{name}": value for name, value in make().state_dict().items()} | {"0.input_permutation": permutation}
    with pytest.raises(RuntimeError, match=f"0.input_permutation {message}"):
        nn.Sequential(make()).load_state_dict(state)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False))
    with pytest.raises(ValueError, match=f"input_permutation {message}"):
        torch_qgemv.load_state_dict(model, state)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("shape", [(3, COLUMNS + 1), (COLUMNS - 1,), ()])
def test_rows_of_another_length_are_refused(shape):
    layer = make()
    for use in (layer, lambda x: F.linear(x, layer.weight)):
        with pytest.raises(ValueError, match=r"x must be \[\.\.\., K\] with K = 256, got"):
            use(torch.zeros(shape))
