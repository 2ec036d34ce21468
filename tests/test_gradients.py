"""Derivatives of the operators: reverse and forward mode, checkpointing, torch.func, compiled autograd."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from formats import TYPES, block_size, dequantized, random_packed, random_x
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_qgemv
from torch_qgemv import QuantLinear
from torch_qgemv.testing import linear_error

ops = torch.ops.torch_qgemv
ISAS = ops._cpu_isas()
Q4_K, Q8_0 = TYPES[7], TYPES[4]

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, at its first forward-mode use


def assert_gradient_close(grad_x, grad_y, matrix, context=""):
    """grad_x = grad_y W to the accuracy that linear has."""
    assert grad_x.shape == (*grad_y.shape[:-1], matrix.shape[1]), context
    assert grad_x.dtype == grad_y.dtype, context
    error = linear_error(grad_x, grad_y, matrix.T)
    assert error <= 1, f"{context}: {error:.2f} times the error allowed"


def packed_and_matrix(quant_type, rows, columns):
    packed = random_packed(quant_type, rows, columns)
    return packed, dequantized(packed, quant_type)


# ---- The operator
@pytest.mark.parametrize("quant_type", TYPES, ids=lambda t: t.name)
def test_gradient_of_x_for_every_format(quant_type, device):
    for rows, columns, tokens in [(1, block_size(quant_type), 1), (37, 3 * 256, 4), (70, 256, 15)]:
        packed, matrix = packed_and_matrix(quant_type, rows, columns)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            grad_y = random_x((tokens, rows), dtype)
            grad_x = ops.linear_transposed(grad_y.to(device), packed.to(device), int(quant_type))
            assert_gradient_close(grad_x, grad_y, matrix, (rows, columns, tokens, dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_gradient_of_x_with_every_instruction_set(isa):
    packed, matrix = packed_and_matrix(Q4_K, 100, 512)
    for tokens in (1, 2, 5, 6, 21):
        grad_y = random_x((tokens, 100))
        assert_gradient_close(ops._linear_transposed_isa(grad_y, packed, int(Q4_K), isa), grad_y, matrix, tokens)
    with pytest.raises(ValueError, match="no kernels for isa 'sse9'"):
        ops._linear_transposed_isa(grad_y, packed, int(Q4_K), "sse9")


def test_gradient_of_x_for_more_rows_than_one_sum_and_more_tokens_than_one_task():
    packed, matrix = packed_and_matrix(Q8_0, 2500, 288)
    grad_y = random_x((600, 2500))
    assert_gradient_close(ops.linear_transposed(grad_y, packed, int(Q8_0)), grad_y, matrix)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(2, 32773, 32), (32773, 3, 32), (2, 3, 32800)])
def test_gradient_of_x_beyond_the_largest_tile(tokens, rows, columns, device):
    packed, matrix = packed_and_matrix(Q8_0, rows, columns)
    grad_y = random_x((tokens, rows))
    assert_gradient_close(ops.linear_transposed(grad_y.to(device), packed.to(device), int(Q8_0)), grad_y, matrix)


def test_gradient_does_not_depend_on_the_number_of_threads():
    packed, grad_y = random_packed(Q4_K, 300, 2048), random_x((600, 300))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ops.linear_transposed(grad_y, packed, int(Q4_K)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_gradient_of_strided_tensors(device):
    packed, matrix = packed_and_matrix(Q4_K, 64, 512)
    wide = torch.cat([packed, packed], dim=1).to(device)[::2, : packed.shape[1]]
    grad_y = random_x((32, 6)).to(device).T
    assert not wide.is_contiguous() and not grad_y.is_contiguous()
    assert_gradient_close(ops.linear_transposed(grad_y, wide, int(Q4_K)), grad_y, matrix[::2])


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(0, 256, 2), (3, 0, 2), (3, 256, 0)])
def test_gradient_of_nothing(rows, columns, tokens, device):
    packed = torch.zeros(rows, columns // 256 * 144, dtype=torch.uint8, device=device)
    x = torch.ones(tokens, columns, device=device, requires_grad=True)
    torch_qgemv.linear(x, packed, Q4_K).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_errors_of_linear_transposed(device):
    packed, grad_y = random_packed(Q4_K, 7, 256).to(device), torch.zeros(2, 7, device=device)
    with pytest.raises(ValueError, match=r"grad_y must be \[\.\.\., N\] with N = 7, got \[2, 6\].*K = 256"):
        ops.linear_transposed(grad_y[:, :6], packed, int(Q4_K))
    with pytest.raises(ValueError, match="with N = 7, got \\[\\]"):
        ops.linear_transposed(grad_y[0, 0], packed, int(Q4_K))
    with pytest.raises(TypeError, match="grad_y must be float32, float16 or bfloat16"):
        ops.linear_transposed(grad_y.long(), packed, int(Q4_K))
    with pytest.raises(ValueError, match="quant_type 99 is not a supported"):
        ops.linear_transposed(grad_y, packed, 99)
    with pytest.raises(ValueError, match="grad_y is on meta"):
        ops.linear_transposed(grad_y.to("meta"), packed, int(Q4_K))


@pytest.mark.parametrize("shape", [(7,), (2, 7), (0, 7), (2, 3, 7)])
def test_opcheck_linear_transposed(shape, device):
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":  # torch has it for CPU, CUDA and XPU only
        utils.append("test_autograd_registration")
    packed = random_packed(Q4_K, 7, 256).to(device)
    for grad_y in (torch.randn(shape, device=device, requires_grad=True), torch.randn(7, device=device).expand(shape)):
        torch.library.opcheck(ops.linear_transposed.default, (grad_y, packed, int(Q4_K)), test_utils=utils)


# ---- Backward
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512,), (3, 512), (0, 512), (2, 2, 512)])
def test_gradients(shape, dtype, bias_dtype, device):
    packed, matrix = packed_and_matrix(Q4_K, 7, 512)
    x = random_x(shape, dtype).to(device).requires_grad_()
    bias = None if bias_dtype is None else torch.randn(7).to(device, bias_dtype).requires_grad_()
    y = torch_qgemv.linear(x, packed.to(device), Q4_K, bias)
    grad_y = torch.randn(y.shape).to(y)
    y.backward(grad_y)
    assert_gradient_close(x.grad, grad_y, matrix)
    if bias is not None:
        assert bias.grad.dtype == bias_dtype
        exact = grad_y.cpu().double().reshape(-1, 7).sum(0)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[bias_dtype]
        assert (bias.grad.cpu().double() - exact).norm() <= tolerance * exact.norm()


def test_only_what_needs_a_gradient_gets_one():
    packed, x, bias = random_packed(Q4_K, 7, 256), random_x((2, 256)), torch.zeros(7, requires_grad=True)
    torch_qgemv.linear(x, packed, Q4_K, bias).sum().backward()
    assert x.grad is None and torch.equal(bias.grad, torch.full((7,), 2.0))
    x.requires_grad_()
    torch_qgemv.linear(x, packed, Q4_K, bias.detach()).sum().backward()
    assert x.grad is not None and torch.equal(bias.grad, torch.full((7,), 2.0))
    with torch.no_grad():
        assert not torch_qgemv.linear(x, packed, Q4_K, bias).requires_grad
    assert not torch_qgemv.linear(x.detach(), packed, Q4_K).requires_grad
    with torch.inference_mode():
        torch_qgemv.linear(x, packed, Q4_K, bias)


def test_gradients_that_are_expanded_or_transposed(device):
    packed, matrix = packed_and_matrix(Q4_K, 7, 256)
    x = random_x((3, 256)).to(device).requires_grad_()
    torch_qgemv.linear(x, packed.to(device), Q4_K).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), matrix.sum(0).expand(3, -1))
    x.grad = None
    factor = random_x((7, 3)).to(device)
    (torch_qgemv.linear(x, packed.to(device), Q4_K).T * factor).sum().backward()
    assert_gradient_close(x.grad, factor.T, matrix)


@pytest.mark.parametrize("in_place", [lambda y: y.add_(1), lambda y: y.relu_(), lambda y: F.silu(y, inplace=True)])
def test_output_can_be_changed_in_place(in_place, device):
    packed, matrix = packed_and_matrix(Q4_K, 7, 256)
    x, expected = random_x((3, 256)).to(device).requires_grad_(), random_x((3, 256)).requires_grad_()
    y = in_place(torch_qgemv.linear(x, packed.to(device), Q4_K))
    expected_y = in_place(F.linear(expected, matrix))
    torch.testing.assert_close(y.cpu(), expected_y)
    y.square().sum().backward()
    expected_y.square().sum().backward()
    assert (x.grad.cpu() - expected.grad).norm() <= 1e-5 * expected.grad.norm()


def test_the_graph_keeps_nothing_but_the_packed_weight():
    packed, saved = random_packed(Q4_K, 7, 256), []
    x = random_x((3, 256)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = torch_qgemv.linear(x, packed, Q4_K, torch.zeros(7, requires_grad=True))
    assert [t.data_ptr() for t in saved] == [packed.data_ptr()]
    assert y.grad_fn.name() == "QuantLinearBackward"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_backward_never_holds_the_whole_matrix():
    code = """
import re, torch, torch_qgemv

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

def backward(size):
    packed = torch.zeros(size, size // 256 * 144, dtype=torch.uint8)
    x = torch.ones(2, size, requires_grad=True)
    before = peak()
    torch_qgemv.linear(x, packed, "Q4_K").sum().backward()
    return packed, peak() - before

backward(256)
packed, growth = backward(8192)
print(growth)
before = peak()
torch_qgemv.dequantize(packed, "Q4_K")
print(peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    backward, dequantize = map(float, run.stdout.split())
    assert backward < 32 < 200 < dequantize  # MB; the matrix has 256


def test_second_backward_needs_retain_graph():
    packed, x = random_packed(Q4_K, 7, 256), random_x((2, 256)).requires_grad_()
    y = torch_qgemv.linear(x, packed, Q4_K).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_packed_weight_changed_before_backward_raises():
    packed, x = random_packed(Q4_K, 7, 256), random_x((2, 256)).requires_grad_()
    y = torch_qgemv.linear(x, packed, Q4_K).sum()
    packed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_double_backward(device):
    """grad_x is linear in grad_y, so its gradient is linear's own."""
    packed, matrix = packed_and_matrix(Q4_K, 7, 256)
    x, grad_y = random_x((2, 256)).to(device).requires_grad_(), random_x((2, 7)).to(device).requires_grad_()
    (grad_x,) = torch.autograd.grad(torch_qgemv.linear(x, packed.to(device), Q4_K), x, grad_y, create_graph=True)
    assert grad_x.grad_fn.name() == "QuantLinearTransposedBackward"
    direction = random_x((2, 256), seed=3).to(device).requires_grad_()
    (back,) = torch.autograd.grad(grad_x, grad_y, direction, create_graph=True)
    torch.testing.assert_close(back.detach().cpu(), direction.detach().cpu() @ matrix.T)
    (third,) = torch.autograd.grad(back, direction, grad_y)
    assert_gradient_close(third, grad_y, matrix)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, device):
    layers = nn.Sequential(
        QuantLinear.from_packed(random_packed(Q4_K, 512, 256), Q4_K, torch.randn(512)),
        nn.GELU(),
        QuantLinear.from_packed(random_packed(Q8_0, 256, 512), Q8_0, torch.randn(256)),
    ).to(device)
    grads = []
    for run in (layers, partial(checkpoint, layers, use_reentrant=use_reentrant)):
        x = random_x((3, 256)).to(device).requires_grad_()
        layers.zero_grad()
        run(x).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in layers.parameters())])
    assert len(grads[0]) == 3
    for plain, checkpointed in zip(*grads, strict=True):
        assert torch.equal(plain, checkpointed)


def test_compiled_autograd(device):
    packed = random_packed(Q4_K, 7, 256).to(device)
    grads = []
    for compiled in (False, True):
        x, bias = random_x((3, 256)).to(device).requires_grad_(), torch.zeros(7, device=device, requires_grad=True)
        y = torch_qgemv.linear(x, packed, Q4_K, bias).square().sum()
        if compiled:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                y.backward()
        else:
            y.backward()
        grads.append((x.grad, bias.grad))
    for plain, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(plain, compiled)


# ---- Forward mode and torch.func
@pytest.mark.parametrize("moving", ["x", "bias", "x and bias"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode(moving, requires_grad, device):
    packed, matrix = packed_and_matrix(Q4_K, 7, 256)
    x, bias = random_x((3, 256)).to(device).requires_grad_(requires_grad), torch.randn(7, device=device)
    tangents = {"x": random_x((3, 256), seed=5).to(device), "bias": torch.randn(7, device=device)}
    expected = 0
    with forward_ad.dual_level():
        if "x" in moving:
            x = forward_ad.make_dual(x, tangents["x"])
            expected = expected + tangents["x"].cpu() @ matrix.T
        if "bias" in moving:
            bias = forward_ad.make_dual(bias, tangents["bias"])
            expected = expected + tangents["bias"].cpu()
        tangent = forward_ad.unpack_dual(torch_qgemv.linear(x, packed.to(device), Q4_K, bias)).tangent
        transposed = forward_ad.unpack_dual(
            ops.linear_transposed(forward_ad.make_dual(tangent, tangent), packed.to(device), int(Q4_K))
        ).tangent
    torch.testing.assert_close(tangent.cpu(), expected.expand(3, 7))
    assert_gradient_close(transposed, tangent, matrix)


def functions(device):
    """A function of x on a packed weight and the same one on its matrix."""
    packed, matrix = packed_and_matrix(Q4_K, 7, 256)
    bias = random_x((7,))
    return (
        lambda x: torch_qgemv.linear(x, packed.to(device), Q4_K, bias.to(device)).sin(),
        lambda x: F.linear(x.cpu(), matrix, bias).sin(),
    )


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vmap": torch.func.vmap,
    "vmap over columns": lambda f: lambda x: torch.func.vmap(f, in_dims=1)(x.T.contiguous()),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](f(x))[0],
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.vmap(torch.func.hessian(lambda x: f(x).sum())),
}


@pytest.mark.filterwarnings("error:.*batching rule")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name, device, request):
    if name == "hessian" and "mps-sim" in request.node.name:
        pytest.skip("the simulated device has no hessian of nn.Linear either")
    packed_function, plain_function = functions(device)
    x = random_x((2, 256))
    result = TRANSFORMS[name](packed_function)(x.to(device))
    expected = TRANSFORMS[name](plain_function)(x)
    assert result.shape == expected.shape
    assert (result.cpu() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.filterwarnings("error:.*batching rule")
def test_vmap_over_weights_biases_and_indices(device):
    packed = torch.stack([random_packed(Q4_K, 7, 256, seed=seed) for seed in range(3)]).to(device)
    matrices = torch.stack([dequantized(p, Q4_K) for p in packed])
    x, biases = random_x((3, 2, 256)).to(device), torch.randn(3, 7, device=device)
    linear = partial(torch_qgemv.linear, quant_type=Q4_K)
    y = torch.func.vmap(lambda x, w, b: linear(x, w, bias=b))(x, packed, biases)
    torch.testing.assert_close(y.cpu(), x.cpu() @ matrices.mT + biases.cpu()[:, None])
    y = torch.func.vmap(lambda w: linear(x[0], w))(packed)
    torch.testing.assert_close(y.cpu(), x[0].cpu() @ matrices.mT)
    y = torch.func.vmap(lambda b: linear(x[0], packed[0], bias=b))(biases)
    torch.testing.assert_close(y.cpu(), (x[0].cpu() @ matrices[0].T)[None] + biases.cpu()[:, None])
    dequantize = partial(torch_qgemv.dequantize, quant_type=Q4_K)
    assert torch.equal(torch.func.vmap(dequantize, in_dims=1)(packed.transpose(0, 1)).cpu(), matrices)
    embedding = partial(torch_qgemv.embedding, quant_type=Q4_K)
    indices = torch.tensor([[0, 6], [1, 2], [3, 3]], device=device)
    rows = torch.func.vmap(lambda i: embedding(i, packed[0]))(indices)
    assert torch.equal(rows.cpu(), matrices[0][indices.cpu()])
    rows = torch.func.vmap(embedding)(indices, packed)
    assert torch.equal(rows.cpu(), torch.stack([m[i] for m, i in zip(matrices, indices.cpu(), strict=True)]))


def test_gradients_per_sample_of_a_module(device):
    layer = QuantLinear.from_packed(random_packed(Q4_K, 7, 256), Q4_K, torch.randn(7)).to(device)
    x, weights = random_x((4, 256)).to(device), dict(layer.named_parameters())

    def loss(parameters, sample):
        return torch.func.functional_call(layer, parameters, (sample,)).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    torch.testing.assert_close(grads["bias"], 2 * layer(x))
