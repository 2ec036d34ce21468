"""The operators as citizens of torch: opcheck, torch.compile. Gradients are in test_gradients.py."""

import pytest
import torch
from formats import TYPES, random_packed, random_x
from torch import nn
from torch.nn import functional as F

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear
from torch_qgemv._extension import check_torch

ops = torch.ops.torch_qgemv
Q4_K = TYPES[7]


def opcheck(op, args, device):
    """All of torch's checks."""
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        utils.append("test_autograd_registration")
    elif any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):  # torch has it not for MPS
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Autograd")
    torch.library.opcheck(op, args, test_utils=utils)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256,), (2, 256), (0, 256), (2, 3, 256)])
def test_opcheck_linear(shape, dtype, device):
    packed = random_packed(Q4_K, 5, 256).to(device)
    x = random_x(shape, dtype).to(device).requires_grad_()
    bias = torch.randn(5, device=device, requires_grad=True)
    for b in (None, bias):
        opcheck(ops.linear.default, (x, packed, int(Q4_K), b), device)
    opcheck(ops.linear.default, (x.detach().as_strided(shape, (0,) * len(shape)), packed, int(Q4_K)), device)


def test_opcheck_dequantize_and_embedding(device):
    packed = random_packed(Q4_K, 5, 256).to(device)
    indices = torch.tensor([[4, 0], [1, 1]], device=device)
    for dtype in (None, torch.float16):
        opcheck(ops.dequantize.default, (packed, int(Q4_K), dtype), device)
        opcheck(ops.embedding.default, (indices, packed, int(Q4_K), dtype), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_opcheck_quantize(dtype, device):
    weight = torch.randn(5, 512, dtype=dtype, device=device)
    for importance in (None, torch.rand(512, device=device)):
        opcheck(ops.quantize.default, (weight, int(Q4_K), importance), device)


def test_meta_kernels_check_as_the_real_ones_do():
    x, weight = torch.zeros(2, 256, device="meta"), torch.zeros(64, 144, dtype=torch.uint8, device="meta")
    assert torch_qgemv.linear(x, weight, "Q4_K").shape == (2, 64)
    assert torch_qgemv.linear(x.T.contiguous().T, weight, "Q4_K").is_contiguous()
    with pytest.raises(ValueError, match="x has K = 100"):
        torch_qgemv.linear(x[:, :100], weight, "Q4_K")
    assert torch_qgemv.dequantize(weight, "Q4_K").shape == (64, 256)
    assert torch_qgemv.embedding(x[0].long(), weight, "Q4_K", torch.half).shape == (256, 256)
    assert torch_qgemv.quantize(x, "Q4_K").shape == (2, 144)
    with pytest.raises(ValueError, match="no multiple of the 256 weights of a Q4_K block"):
        torch_qgemv.quantize(x[:, :100], "Q4_K")


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = QuantEmbedding.from_packed(random_packed(Q4_K, 11, 512), Q4_K)
        self.up = QuantLinear.from_packed(random_packed(Q4_K, 256, 512), Q4_K, torch.randn(256))
        self.down = QuantLinear.from_packed(random_packed(TYPES[9], 512, 256), TYPES[9])
        self.norm = nn.LayerNorm(512)

    def forward(self, indices):
        x = self.embed(indices)
        return F.linear(self.norm(x + self.down(F.gelu(self.up(x)))), self.embed.weight)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph_gives_the_same(dynamic):
    model = Mlp().eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for count in (3, 5) if dynamic else (3,):
        indices = torch.arange(count)
        with torch.no_grad():
            y = model(indices)
            torch.testing.assert_close(compiled(indices), y, rtol=1e-5, atol=1e-5 * y.abs().max().item())


def test_compile_trains_the_rest_of_the_model(device):
    model = Mlp().to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    indices = torch.arange(4, device=device)
    for run in (model, compiled):
        model.zero_grad()
        run(indices).square().mean().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        expected = grads if run is model else expected  # noqa: F821
    assert set(grads) == {"up.bias", "norm.weight", "norm.bias"}
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize(
    ("built_with", "running", "works"),
    [
        ("2.10.0", "2.11.0+cpu", True),
        ("2.12.1", "2.14.1", True),
        ("2.11.0", "2.12.0", False),
        ("2.13.0+cpu", "2.10.0", False),
        ("2.9.0", "2.9.0", False),
        ("2.13.0", "2.15.0", False),
    ],
)
def test_import_error_where_the_abi_differs(built_with, running, works):
    if works:
        return check_torch(built_with, running)
    with pytest.raises(ImportError, match=f"compiled against torch .*{running}.*pip install --no-build-isolation"):
        check_torch(built_with, running)
