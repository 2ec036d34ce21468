"""What casts and autocast make of packed modules: the compute dtype, and never the bytes."""

import itertools

import pytest
import torch
from formats import TYPES, assert_linear_close, dequantized, random_packed, random_x
from torch import nn
from torch.nn import functional as F

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear, weight

by_name = {"ids": lambda value: getattr(value, "name", None) or str(value).removeprefix("torch.")}
HALVES = (torch.float16, torch.bfloat16)


def make_linear(quant_type="Q4_K", bias=True, N=6, K=512):
    return QuantLinear.from_packed(random_packed(quant_type, N, K), quant_type, torch.randn(N) if bias else None)


def make_embedding(quant_type="Q4_K", N=9, K=256):
    return QuantEmbedding.from_packed(random_packed(quant_type, N, K), quant_type)


def without_bias(quant_type="Q4_K"):
    return make_linear(quant_type, bias=False)


MODULES = (make_linear, without_bias, make_embedding)


@pytest.fixture
def no_unpacking(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a packed weight was dequantized")

    monkeypatch.setattr(weight, "dequantize", refuse)


# ---- casts


CASTS = {
    "half": (lambda module: module.half(), torch.float16),
    "bfloat16": (lambda module: module.bfloat16(), torch.bfloat16),
    "double": (lambda module: module.double(), torch.float64),
    "half, then float": (lambda module: module.half().float(), torch.float32),
    "to(dtype)": (lambda module: module.to(torch.float16), torch.float16),
    "to(device, dtype)": (lambda module: module.to("cpu", torch.bfloat16), torch.bfloat16),
    "to(tensor)": (lambda module: module.to(module.stored.new_zeros(1, dtype=torch.float16)), torch.float16),
    "of the parent": (lambda module: nn.Sequential(nn.Sequential(module)).half(), torch.float16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("make", MODULES)
def test_casts_change_the_compute_dtype_and_no_byte(make, cast, device):
    if device == "mps" and cast == "double":
        pytest.skip("MPS has no float64")
    module = make().to(device)
    packed, stored = module.packed.clone(), module.stored
    function, dtype = CASTS[cast]
    function(module)
    assert module.dtype == module.weight.dtype == dtype
    assert module.stored.dtype == torch.uint8 and module.quant_type_id.dtype == torch.int32
    assert torch.equal(module.packed.to(device), packed)
    assert module.stored is stored or cast == "to(device, dtype)"
    assert getattr(module, "bias", None) is None or module.bias.dtype == dtype


@pytest.mark.parametrize("dtype", HALVES, **by_name)
@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_cast_modules_compute_in_their_dtype(quant_type, dtype, device):
    module = make_linear(quant_type).to(device, dtype)
    matrix, x = dequantized(module.packed, quant_type), random_x((2, 512), dtype)
    assert_linear_close(module(x.to(device)).cpu(), x, matrix, module.bias.detach().cpu())
    indices = torch.tensor([5, 0], device=device)
    embedding = make_embedding(quant_type).to(device, dtype)
    assert torch.equal(embedding(indices).cpu(), dequantized(embedding.packed, quant_type)[[5, 0]].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], **by_name)
def test_code_that_asks_the_weight_for_its_dtype_unpacks_nothing(dtype, no_unpacking, device):
    module, linear = without_bias().to(device, dtype), nn.Linear(512, 6, device=device, dtype=dtype)
    assert module.weight.dtype == linear.weight.dtype
    assert module.weight.is_floating_point() and module.weight.element_size() == linear.weight.element_size()
    x = random_x((2, 512), torch.float64)
    assert module(x.to(module.weight.dtype).to(device)).dtype == dtype
    assert module(x.to(device, module.weight.dtype)).dtype == dtype
    assert module(x.float().to(module.weight)).dtype == dtype


def test_float64_is_refused_at_the_forward_and_lost_in_no_cast(device):
    """The operators have no float64; to_linear() has."""
    module, embedding = make_linear().double(), make_embedding().double()
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16, got Double"):
        module(random_x((2, 512), torch.float64))
    with pytest.raises(TypeError, match="dtype must be float32, float16 or bfloat16, got Double"):
        embedding(torch.tensor([1]))
    x = random_x((2, 512), torch.float64)
    exact = x @ dequantized(module.packed, module.quant_type).double().T
    torch.testing.assert_close(x @ module.weight.T, exact)
    torch.testing.assert_close(torch.compile(lambda: x @ module.weight.T, backend="aot_eager")(), exact)
    torch.testing.assert_close(module.to_linear()(x), exact + module.bias)
    assert module.to(device, torch.float32)(x.float().to(device)).dtype == torch.float32


# ---- bytes that foreign code has cast


def cast_in_place(module):
    for buffer in module.buffers():
        buffer.data = buffer.data.float()


def cast_buffers(module):
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer.half()


OUTSIDE_CASTS = {
    "Module.type": lambda module: module.type(torch.float32),
    "_apply": lambda module: module._apply(lambda tensor: tensor.bfloat16()),
    "_apply of the parent": lambda module: nn.Sequential(module)._apply(lambda tensor: tensor.double()),
    "_buffers": cast_buffers,
    "data": cast_in_place,
    "attribute": lambda module: setattr(module, "packed", module.packed.to(torch.int8)),
}


@pytest.mark.parametrize("prepare", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("cast", OUTSIDE_CASTS)
@pytest.mark.parametrize("make", MODULES)
def test_outside_casts_of_the_bytes_raise_at_the_next_forward(make, cast, prepare):
    module = make()
    if prepare:
        torch_qgemv.prepare(module)
    x = torch.tensor([1]) if make is make_embedding else random_x((1, 512))
    module(x)
    OUTSIDE_CASTS[cast](module)
    name = "QuantEmbedding" if make is make_embedding else "QuantLinear"
    message = rf"{name}: packed must hold packed bytes \(torch.uint8\), but is torch\.\w+ \["
    with pytest.raises(TypeError, match=message):
        module(x)
    if make is not make_embedding:
        with pytest.raises(TypeError, match=r"must hold packed bytes \(uint8\)"):
            F.linear(x, module.weight)


def test_outside_cast_raises_under_compile():
    module = make_linear()
    module.packed = module.packed.float()
    with pytest.raises(Exception, match="packed must hold packed bytes"):
        torch.compile(module, backend="eager", fullgraph=True)(random_x((1, 512)))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], **by_name)
def test_loading_other_numbers_than_bytes_raises(dtype, assign):
    module = make_linear()
    packed, bias = module.packed.clone(), module.bias.clone()
    state = module.state_dict() | {"packed": module.packed.to(dtype), "bias": torch.zeros(6)}
    with pytest.raises(RuntimeError, match=rf"packed must be packed bytes \(torch.uint8\), but is {dtype}"):
        module.load_state_dict(state, assign=assign)
    assert torch.equal(module.packed, packed) and torch.equal(module.bias, bias)


# ---- autocast


AUTOCASTS = [None, *HALVES]


@pytest.mark.parametrize("dtype", AUTOCASTS, **by_name)
@pytest.mark.parametrize("x_dtype", [torch.float32, *HALVES], **by_name)
@pytest.mark.parametrize("make", [make_linear, without_bias])
def test_autocast_gives_the_dtype_that_linear_gives(make, x_dtype, dtype, device):
    module = make().to(device)
    linear = module.to_linear()
    x = random_x((3, 512), x_dtype).to(device)
    with torch.autocast(device, dtype=dtype):
        y, like = module(x), linear(x)
        functional = F.linear(x, module.weight, module.bias)
    assert y.dtype == like.dtype == functional.dtype == (dtype or torch.get_autocast_dtype(device))
    assert torch.equal(y, module(x.to(y.dtype))) and torch.equal(functional, y)


def test_autocast_leaves_alone_what_linear_leaves_alone(device):
    module, embedding = make_linear().to(device), make_embedding().to(device)
    x = random_x((3, 512)).to(device)
    with torch.autocast(device, enabled=False):
        assert module(x).dtype == torch.float32
    with torch.autocast(device):
        assert embedding(torch.tensor([1], device=device)).dtype == torch.float32
        with torch.autocast(device, enabled=False):
            assert module(x).dtype == torch.float32
        if device == "cpu":
            with pytest.raises(TypeError, match="got Double"):  # torch doesn't autocast float64 either
                module(x.double())
    other = "mps" if device == "cpu" else "cpu"
    with torch.autocast(other, dtype=torch.bfloat16):
        assert module(x).dtype == torch.float32


def test_autocast_gradients_have_the_dtype_of_what_they_are_for(device):
    module = make_linear().to(device)
    x = random_x((3, 512)).to(device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = module(x)
    y.float().sum().backward()
    assert x.grad.dtype == module.bias.grad.dtype == torch.float32
    matrix = dequantized(module.packed, module.quant_type)
    torch.testing.assert_close(x.grad.cpu(), matrix.sum(0).expand(3, -1), rtol=0.02, atol=0.02)


def test_autocast_compiled(device):
    """As the models call it: inside the compiled function and around it."""
    module = make_linear().to(device)
    x = random_x((3, 512)).to(device)

    def inside(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return module(x)

    expected = inside(x)
    assert torch.equal(torch.compile(inside, backend="aot_eager", fullgraph=True)(x), expected)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), module(x))


# ---- code that takes the dtype of the first parameter for the model's


@pytest.mark.parametrize("make", MODULES)
def test_first_tensor_is_a_float(make, device):
    model = nn.Sequential(make(), nn.LayerNorm(8)).to(device).half()
    assert all(parameter.dtype == torch.float16 for parameter in model.parameters())
    assert next(model.parameters()).dtype == torch.float16
    for module in (model, model[0]):
        first = next(itertools.chain(module.parameters(), module.buffers()))
        assert first.dtype == torch.float16
        assert next(module.buffers()).dtype == torch.float16


def test_transformers_dtype_of_a_packed_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = torch_qgemv.quantize_model(transformers.LlamaForCausalLM(config), "Q8_0")
    for dtype in (torch.float32, *HALVES):
        assert model.to(dtype).dtype == dtype
        assert model(torch.tensor([[1, 2]])).logits.dtype == dtype
