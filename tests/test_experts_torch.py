"""expert_linear in torch: derivatives, torch.func, opcheck, autocast, torch.compile."""

import pytest
import torch
from experts import matrices, random_experts, random_ids
from formats import TYPES, block_size, random_x
from torch.autograd import forward_ad

import torch_qgemv
from torch_qgemv.testing import linear_error

ops = torch.ops.torch_qgemv
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Q8_0, Q4_K = TYPES[4], TYPES[7]
by_name = {"ids": lambda t: getattr(t, "name", None) or str(t).removeprefix("torch.")}

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, at its first forward-mode use


@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_gradient_of_x_for_every_format(quant_type, device):
    for N, blocks, E, rows in ((1, 1, 3, 2), (37, 3, 4, 50)):
        weight = random_experts(quant_type, E, N, blocks * block_size(quant_type))
        ids, matrix = random_ids((rows,), E), matrices(weight, quant_type)
        for dtype in DTYPES:
            grad_y = random_x((rows, N), dtype)
            grad_x = ops.expert_linear_transposed(
                grad_y.to(device), weight.to(device), ids.to(device), quant_type
            ).cpu()
            assert grad_x.shape == (rows, matrix.shape[2]) and grad_x.dtype == dtype
            for e in ids.unique():
                assert linear_error(grad_x[ids == e], grad_y[ids == e], matrix[e].T) <= 1, (N, dtype)


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
@pytest.mark.parametrize(
    "x_shape, ids_shape", [((512,), ()), ((512,), (2,)), ((3, 512), (3,)), ((5, 512), (5, 8)), ((0, 512), (0, 2))]
)
def test_gradients(x_shape, ids_shape, dtype, device):
    weight, ids = random_experts(Q4_K, 4, 7, 512), random_ids(ids_shape, 4)
    x = random_x(x_shape, dtype).to(device).requires_grad_()
    y = torch_qgemv.expert_linear(x, weight.to(device), ids.to(device), Q4_K)
    grad_y = random_x(y.shape, dtype, seed=5)
    y.backward(grad_y.to(device))
    assert x.grad.shape == x.shape and x.grad.dtype == dtype
    products = (grad_y.double().unsqueeze(-2) @ matrices(weight, Q4_K)[ids].double()).squeeze(-2)
    exact = products.sum(-2) if len(ids_shape) == len(x_shape) else products
    # Each expert's part is rounded before the sum.
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (x.grad.cpu().double() - exact).norm() <= tolerance * products.norm()


def test_double_backward_and_forward_mode(device):
    weight, ids = random_experts(Q4_K, 4, 7, 256).to(device), random_ids((3, 2), 4).to(device)
    matrix = matrices(weight, Q4_K)[ids.cpu()]
    x, grad_y = random_x((3, 256)).to(device).requires_grad_(), random_x((3, 2, 7)).to(device).requires_grad_()
    y = torch_qgemv.expert_linear(x, weight, ids, Q4_K)
    (grad_x,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
    direction = random_x((3, 256), seed=3).to(device)
    (back,) = torch.autograd.grad(grad_x, grad_y, direction)
    torch.testing.assert_close(back.cpu(), (matrix @ direction.cpu()[:, None, :, None]).squeeze(-1))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), direction)
        tangent = forward_ad.unpack_dual(torch_qgemv.expert_linear(dual, weight, ids, Q4_K)).tangent
    assert torch.equal(tangent, torch_qgemv.expert_linear(direction, weight, ids, Q4_K))


def test_compiled_autograd(device):
    weight, ids = random_experts(Q4_K, 4, 7, 256).to(device), random_ids((3, 2), 4).to(device)
    grads = []
    for compiled in (False, True):
        x = random_x((3, 256)).to(device).requires_grad_()
        y = torch_qgemv.expert_linear(x, weight, ids, Q4_K).square().sum()
        if compiled:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                y.backward()
        else:
            y.backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("error:.*batching rule")
def test_torch_func(device):
    weight, ids = random_experts(Q8_0, 4, 7, 64).to(device), random_ids((5, 2), 4).to(device)
    x = random_x((5, 64)).to(device)

    def product(x, ids, weight=weight):
        return torch_qgemv.expert_linear(x, weight, ids, Q8_0)

    expected = product(x, ids)
    torch.testing.assert_close(torch.func.vmap(product)(x, ids), expected)
    torch.testing.assert_close(torch.func.vmap(product, in_dims=(None, 1))(x, ids), expected.transpose(0, 1))
    torch.testing.assert_close(
        torch.func.vmap(product, in_dims=(0, None))(x[:, None], ids[:1]), product(x, ids[:1].expand(5, 2))[:, None]
    )
    both = torch.stack([weight, weight.flip(0)])
    torch.testing.assert_close(
        torch.func.vmap(product, in_dims=(None, None, 0))(x, ids, both), torch.stack([product(x, ids, w) for w in both])
    )
    loss = torch.func.grad(lambda x, ids: product(x, ids).square().sum())
    torch.testing.assert_close(torch.func.vmap(loss)(x, ids), loss(x, ids))


@pytest.mark.parametrize("ids_shape", [(3,), (3, 2), (0,)])
def test_opcheck(ids_shape, device):
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":  # torch has it for CPU, CUDA and XPU only
        utils.append("test_autograd_registration")
    weight, ids = random_experts(Q4_K, 4, 7, 256).to(device), random_ids(ids_shape, 4).to(device)
    x = torch.randn(ids_shape[0], 256, device=device, requires_grad=True)
    torch.library.opcheck(ops.expert_linear.default, (x, weight, ids, int(Q4_K)), test_utils=utils)
    grad_y = torch.randn(*ids_shape, 7, device=device, requires_grad=True)
    torch.library.opcheck(ops.expert_linear_transposed.default, (grad_y, weight, ids, int(Q4_K)), test_utils=utils)


@pytest.mark.parametrize("dtype", DTYPES[1:], **by_name)
def test_autocast(dtype, device):
    weight, ids = random_experts(Q4_K, 4, 7, 256).to(device), random_ids((3, 2), 4).to(device)
    x = random_x((3, 256)).to(device).requires_grad_()
    with torch.autocast(device, dtype=dtype):
        y = torch_qgemv.expert_linear(x, weight, ids, Q4_K)
    assert y.dtype == dtype and torch.equal(y, torch_qgemv.expert_linear(x.to(dtype), weight, ids, Q4_K))
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_compiled_with_any_number_of_rows():
    """A block as models have it, in one graph."""
    gate, down = random_experts(Q4_K, 8, 256, 256), random_experts(Q8_0, 8, 256, 256)
    router = random_x((8, 256))

    def block(hidden):
        scores, ids = (hidden @ router.T).softmax(-1).topk(2)
        inner = torch.nn.functional.silu(torch_qgemv.expert_linear(hidden, gate, ids, Q4_K))
        return (torch_qgemv.expert_linear(inner, down, ids, Q8_0) * scores[..., None]).sum(-2)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for rows in (2, 3, 17):
        x = random_x((rows, 256), seed=rows)
        torch.testing.assert_close(compiled(x), block(x))
