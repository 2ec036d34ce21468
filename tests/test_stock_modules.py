"""quantize_model on torch's own modules and on what models do to their layers: initialise, tie, parametrize."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from formats import random_x
from torch import nn
from torch.nn import functional as F
from torch.nn import utils
from torch.nn.utils import parametrize, prune

from torch_qgemv import QuantEmbedding, QuantLinear, ops, quantize_model, weight


@pytest.fixture
def calls(monkeypatch):
    """Counts, by name, the calls of the operators that modules make."""
    counts = {"linear": 0, "dequantize": 0}

    def counting(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch.ops.torch_qgemv, "linear", counting("linear", torch.ops.torch_qgemv.linear))
    monkeypatch.setattr(weight, "dequantize", counting("dequantize", ops.dequantize))
    return counts


def unpacked(model):
    """The same model with nn.Linear again."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            model.set_submodule(name, module.to_linear())
    return model


def make_encoder(device="cpu", **options):
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).eval()


def packed_encoder(device="cpu", **options):
    return quantize_model(make_encoder(device, **options), "Q8_0")


def quantized_with_report(model, *args, **kwargs):
    reports = []
    return quantize_model(model, *args, report=reports.append, **kwargs), reports[0]


# ---- torch's transformer modules


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "bias": False}])
def test_encoder_runs_packed_in_eval(options, mode, calls, device):
    """torch's fast path for eval and no_grad would read every .weight and call no layer."""
    if device == "mps" and mode is torch.inference_mode:
        pytest.skip("torch's layer_norm is no operation of the simulated device in inference mode")
    encoder = packed_encoder(device, **options)
    x = random_x((2, 5, 64)).to(device)
    with mode():
        y = encoder(x)
    assert calls == {"linear": 6, "dequantize": 0}  # out_proj, linear1 and linear2 of two layers
    with torch.no_grad():
        torch.testing.assert_close(y, unpacked(encoder)(x), rtol=1e-4, atol=1e-5)


def test_encoder_with_nested_tensors_and_padding_runs_packed(calls):
    encoder = quantize_model(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2).eval(), "Q8_0"
    )
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = random_x((2, 5, 64))
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype
        y = encoder(x, src_key_padding_mask=padding)
        assert calls == {"linear": 6, "dequantize": 0}
        exact = unpacked(encoder)(x, src_key_padding_mask=padding)
    torch.testing.assert_close(y[~padding], exact[~padding], rtol=1e-4, atol=1e-5)


def test_encoder_report():
    _, report = quantized_with_report(make_encoder(), "Q8_0")
    linears = ("self_attn.out_proj", "linear1", "linear2")
    assert report.replaced == {f"layers.{i}.{name}": "Q8_0" for i in range(2) for name in linears}
    assert set(report.kept) == {"layers.0.self_attn.in_proj_weight", "layers.1.self_attn.in_proj_weight"}
    assert "MultiheadAttention" in report.kept["layers.0.self_attn.in_proj_weight"]
    text = str(report)
    assert "layers.1.linear2            " in text and text.endswith("6 replaced, 2 kept")
    assert "layers.0.self_attn.in_proj_weight  kept: belongs to MultiheadAttention" in text


@pytest.mark.parametrize("separate", [False, True])
def test_multihead_attention(separate, calls, device):
    sizes = {"kdim": 32, "vdim": 96} if separate else {}
    attention = nn.MultiheadAttention(64, 4, batch_first=True, **sizes).to(device).eval()
    quantize_model(attention, "Q4_0")
    assert isinstance(attention.out_proj, QuantLinear)
    query = random_x((2, 3, 64)).to(device)
    key, value = (random_x((2, 7, n)).to(device) for n in (32, 96)) if separate else (query, query)
    with torch.no_grad():
        y, weights = attention(query, key, value)
        assert calls == {"linear": 1, "dequantize": 0}
        exact, exact_weights = unpacked(attention)(query, key, value)
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, exact_weights)


def test_encoder_trains_its_other_parameters(device):
    encoder = packed_encoder(device).train()
    twin = unpacked(encoder)
    x = random_x((2, 5, 64)).to(device)
    for model in (encoder, twin):
        model(x).square().sum().backward()
    expected = dict(twin.named_parameters())
    for name, parameter in encoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-4)
    assert "layers.0.linear1.bias" in dict(encoder.named_parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, nullcontext])
def test_compiled_encoder_unpacks_only_what_attention_reads(mode):
    """Dynamo calls F.multi_head_attention_forward as a whole, so that out_proj alone is a matrix there."""
    graphs = []

    def backend(graph, inputs):
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda g, _: graphs.append(g) or g)(graph, inputs)

    encoder = packed_encoder().requires_grad_(False)
    x = random_x((2, 5, 64))
    with mode():
        y = torch.compile(encoder, fullgraph=True, backend=backend)(x)
        torch.testing.assert_close(y, encoder(x), rtol=1e-4, atol=1e-5)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("torch_qgemv.linear.default") == 4
    assert targets.count("torch_qgemv.dequantize.default") == 2


@pytest.mark.parametrize("strict", [False, True])
def test_exported_encoder(strict):
    encoder = packed_encoder().requires_grad_(False)
    x = random_x((3, 5, 64))
    with torch.no_grad():
        program = torch.export.export(encoder, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
        for count in (1, 4):
            x = random_x((count, 5, 64))
            torch.testing.assert_close(program.module()(x), encoder(x), rtol=1e-4, atol=1e-5)


# ---- what models do to layers


INITS = [
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.zeros_,
    nn.init.ones_,
    nn.init.trunc_normal_,
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    lambda weight: nn.init.constant_(weight, 1.0),
    lambda weight: nn.init.sparse_(weight, 0.5),
    lambda weight: setattr(weight, "data", torch.ones(8, 64)),
]


@pytest.mark.parametrize("init", INITS)
def test_init_functions_raise_and_write_nothing(init):
    layer = QuantLinear.from_linear(nn.Linear(64, 8), "Q8_0")
    before = layer.packed.clone()
    with pytest.raises(TypeError, match=r"packed weight, which is read-only; use to_linear\(\)"):
        nn.Sequential(layer).apply(lambda module: init(module.weight) if hasattr(module, "weight") else None)
    assert torch.equal(layer.packed, before)


def test_init_for_linear_layers_leaves_packed_ones_alone():
    model = quantize_model(nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8)), "Q8_0")
    before = model[0].packed.clone()
    model.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)
    nn.init.zeros_(model[0].bias)
    assert torch.equal(model[0].packed, before) and not model[0].bias.any()


def test_requires_grad_concerns_parameters_only():
    model = quantize_model(nn.Sequential(nn.Linear(64, 8)), "Q8_0").requires_grad_(False)
    assert not model[0](random_x((2, 64))).requires_grad
    model.requires_grad_(True)
    assert model[0].bias.requires_grad and not model[0].packed.requires_grad and not model[0].weight.requires_grad
    model[0](random_x((2, 64))).sum().backward()
    assert torch.equal(model[0].bias.grad, torch.full((8,), 2.0))
    model[0].weight.requires_grad = False
    model[0].weight.grad = None
    for write in (
        lambda weight: weight.requires_grad_(),
        lambda weight: setattr(weight, "requires_grad", True),
        lambda weight: setattr(weight, "grad", torch.ones(8, 64)),
    ):
        with pytest.raises(TypeError, match="to_linear"):
            write(model[0].weight)


def test_products_with_the_transposed_weight_run_packed(calls, device):
    layer = QuantLinear.from_linear(nn.Linear(64, 8), "Q8_0").to(device)
    matrix, bias = layer.to_linear().weight, layer.bias
    x = random_x((3, 64)).to(device).requires_grad_()
    products = [lambda w: x @ w.t(), lambda w: torch.addmm(bias, x, w.t()), lambda w: F.linear(x, w.t().t(), bias)]
    calls["dequantize"] = 0
    for product in products:
        y = product(layer.weight)
        torch.testing.assert_close(y, product(matrix), rtol=1e-4, atol=1e-5)
    assert calls == {"linear": 3, "dequantize": 0}
    (grad,) = torch.autograd.grad((x @ layer.weight.t()).sum(), x)
    torch.testing.assert_close(grad, matrix.sum(0).expand(3, -1), rtol=1e-4, atol=1e-5)
    assert layer.weight.t().shape == (64, 8) and layer.weight.t().stride() == (1, 64)
    assert torch.equal(layer.weight.t() + 0, matrix.t())
    added = torch.addmm(y, x, layer.weight.t())  # a matrix, which is no bias
    torch.testing.assert_close(added, y + x @ matrix.t(), rtol=1e-4, atol=1e-5)
    assert torch.equal(F.linear(matrix, layer.weight.t().clone().t()), F.linear(matrix, matrix))
    eye = torch.eye(8, device=device)
    assert torch.equal(F.linear(eye, layer.weight.t()), matrix)
    assert torch.equal(F.embedding(torch.tensor([3], device=device), layer.weight.t()), matrix.t()[3:4])


# ---- weight tying


class TiedModel(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 64, **options)
        self.head = nn.Linear(64, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices):
        return self.head(self.embed(indices))


def test_tied_head_and_embedding_share_the_packed_bytes(device):
    model = TiedModel().half()
    _, report = quantized_with_report(model, "Q8_0")
    assert report.replaced == {"embed": "Q8_0", "head": "Q8_0"} and not report.kept
    assert isinstance(model.embed, QuantEmbedding) and model.embed.packed is model.head.packed
    assert model.embed.dtype == model.head.dtype == torch.half
    model.to(device)
    assert model.embed.packed is model.head.packed and model.head.packed.device.type == device
    assert model(torch.tensor([3], device=device)).dtype == torch.half
    with pytest.raises(TypeError, match="to_linear"):
        model.head.weight = model.embed.weight


def test_tied_linear_layers_share_the_packed_bytes():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    quantize_model(model, "Q8_0")
    assert model[0].packed is model[1].packed and model[0].bias is not model[1].bias


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_tied_modules_stay_together(options):
    model = TiedModel(**options)
    predicate = None if options else lambda name, module: name != "head"
    _, report = quantized_with_report(model, "Q8_0", predicate)
    assert model.head.weight is model.embed.weight and not report.replaced
    assert set(report.kept) == {"embed", "head"}
    first, second = ("embed", "head") if options else ("head", "embed")
    assert report.kept[second] == f"shares its weight with {first}"


def test_tied_layers_of_two_types_raise():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="0 and 1: they share a weight, but the type map has different types"):
        quantize_model(model, {"0": "Q8_0", "1": "Q4_0"})


# ---- parametrizations and hooks


# With what a packed layer raises: torch's own error where torch looks for a parameter of that name first.
REPARAMETRIZATIONS = [
    (lambda module: parametrize.register_parametrization(module, "weight", nn.Identity()), "QuantLinear.* 'weight'"),
    (utils.parametrizations.weight_norm, "QuantLinear.* 'weight'"),
    (utils.parametrizations.spectral_norm, "QuantLinear.* 'weight'"),
    (utils.spectral_norm, "weight"),
    (lambda module: prune.l1_unstructured(module, "weight", amount=0.3), r"packed module .* use to_linear\(\) first"),
]


@pytest.mark.parametrize("reparametrize", [function for function, _ in REPARAMETRIZATIONS])
def test_reparametrized_layers_are_refused(reparametrize):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    reparametrize(model[1])
    x = random_x((2, 64))
    model.eval()
    before = model(x)
    with pytest.raises(ValueError, match="1: it has a parametrization, pruning or weight norm; make that permanent"):
        quantize_model(model, "Q8_0")
    assert type(model[0]) is nn.Linear and torch.equal(model(x), before)
    _, report = quantized_with_report(model, "Q8_0", lambda name, module: name != "1")
    assert report.replaced == {"0": "Q8_0"} and report.kept["1"] == "left out by the predicate"


@pytest.mark.parametrize(("reparametrize", "message"), REPARAMETRIZATIONS)
def test_packed_layers_refuse_reparametrization(reparametrize, message):
    layer = QuantLinear.from_linear(nn.Linear(64, 8), "Q8_0")
    state, x = set(layer.state_dict()), random_x((2, 64))
    before = layer(x)
    with pytest.raises((ValueError, TypeError, KeyError), match=message):
        reparametrize(layer)
    assert set(layer.state_dict()) == state and torch.equal(layer(x), before)


def test_a_layer_with_a_parametrized_bias_is_refused():
    layer = nn.Linear(64, 64)
    parametrize.register_parametrization(layer, "bias", nn.Identity())
    with pytest.raises(ValueError, match="0: it has a parametrization"):
        quantize_model(nn.Sequential(layer), "Q8_0")


def test_layers_with_hooks_or_without_data_are_refused():
    def hooked(register):
        layer = nn.Linear(64, 8)
        getattr(layer, register)(lambda *args: None)
        return layer

    patched = nn.Linear(64, 8)
    patched.forward = lambda x: x
    registers = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
    for layer in (*map(hooked, registers), hooked("register_full_backward_pre_hook"), patched):
        with pytest.raises(ValueError, match="0: it has hooks or a forward of its own"):
            quantize_model(nn.Sequential(layer), "Q8_0")
    with pytest.raises(ValueError, match="0: it is on the meta device"):
        quantize_model(nn.Sequential(nn.Linear(64, 8, device="meta")), "Q8_0")


# ---- types by name, fallback, report


def test_type_map():
    model = nn.ModuleDict({name: nn.Linear(64, 32) for name in ("up", "down", "head", "other")})
    _, report = quantized_with_report(model, {"down": "Q8_0", "h*": None, "[ud]*": "Q4_0"})
    assert report.replaced == {"up": "Q4_0", "down": "Q8_0"}
    assert report.kept == dict.fromkeys(("head", "other"), "left out by the type map")
    assert model["down"].quant_type.name == "Q8_0" and type(model["head"]) is nn.Linear
    assert model["up"].training and not quantize_model(nn.Linear(64, 32).eval(), "Q8_0").training
    with pytest.raises(ValueError, match="the pattern 'dwon' matches no linear layer"):
        quantize_model(model, {"dwon": "Q8_0", "*": "Q4_0"})
    with pytest.raises(ValueError, match="'Q4_Z' is not a supported GGUF type"):
        quantize_model(model, {"*": "Q4_Z"})


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_report_names_all_matrices():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(64, 32),
            "scaled": ScaledLinear(64, 32),
            "embed": nn.Embedding(5, 64),
            "conv": nn.Conv1d(64, 64, 3),
            "lstm": nn.LSTM(64, 8),
            "norm": nn.LayerNorm(64),
        }
    )
    model["twin"] = model["linear"]
    _, report = quantized_with_report(model, "Q8_0")
    assert report.replaced == {"linear": "Q8_0", "twin": "Q8_0"} and model["twin"] is model["linear"]
    assert set(report.kept) == {"scaled", "embed", "conv", "lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    assert "ScaledLinear" in report.kept["scaled"] and "subclass" in report.kept["scaled"]
    assert "Embedding" in report.kept["embed"] and "LSTM" in report.kept["lstm.weight_hh_l0"]


def test_fallback_is_that_of_llama_cpp():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(40, 32))
    with pytest.raises(
        ValueError, match=r"0 \(in_features=64\): .* 256 weights of a Q6_K block\n.*1 \(in_features=40\)"
    ):
        quantize_model(model, "Q6_K")
    with pytest.warns(UserWarning, match=r"keeps 1 \(in_features=40\)"):
        _, report = quantized_with_report(model, "Q6_K", fallback=True)
    assert report.replaced == {"0": "Q8_0"} and model[0].quant_type.name == "Q8_0"
    assert "in_features=40" in report.kept["1"] and type(model[1]) is nn.Linear
    for wanted, instead in {"Q4_K": "Q5_0", "Q5_K": "Q5_1"}.items():
        assert quantize_model(nn.Linear(64, 32), wanted, fallback=True).quant_type.name == instead


def test_nothing_is_replaced_if_one_layer_cannot_be_encoded():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 32))
    with torch.no_grad():
        model[1].weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match="NaN or an infinity in row 3"):
        quantize_model(model, "Q8_0")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
