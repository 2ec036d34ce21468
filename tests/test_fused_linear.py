"""fused_linear: the products of linear, bit for bit, in fewer launches."""

import pytest
import torch
from formats import TYPES, odd_view, random_packed, random_x

import torch_qgemv

ops = torch.ops.torch_qgemv
BY_NAME = {quant_type.name: quant_type for quant_type in TYPES}
Q4_0, Q4_K, Q5_K, Q6_K, Q8_0 = (BY_NAME[name] for name in ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"))
FOUR = (Q4_K, Q6_K, Q5_K, Q4_K)


def random_weights(quant_types, rows, K, device):
    pairs = zip(quant_types, rows, strict=True)
    return [random_packed(quant_type, N, K, seed=i).to(device) for i, (quant_type, N) in enumerate(pairs)]


def assert_same_as_linear(x, weights, quant_types, biases=None):
    ys = torch_qgemv.fused_linear(x, weights, quant_types, biases)
    assert len(ys) == len(weights)
    for i, y in enumerate(ys):
        bias = None if biases is None else biases[i]
        expected = torch_qgemv.linear(x, weights[i], quant_types[i], bias)
        assert y.shape == expected.shape and y.dtype == x.dtype and y.is_contiguous()
        assert torch.equal(y, expected), f"weight {i}"
    return ys


# ---- The operator


def test_a_product_for_each_weight(device):
    x = random_x((1, 256), torch.half).to(device)
    biases = [None, *(random_x((N,), dtype).to(device) for N, dtype in ((1, torch.half), (33, torch.float)))]
    weights = random_weights(FOUR, (37, 1, 33, 8), 256, device)
    weights[3] = odd_view(weights[3])
    assert_same_as_linear(x, weights, FOUR, [*biases, None])
    assert_same_as_linear(x[0], weights[:2], FOUR[:2])


@pytest.mark.parametrize("M", [0, 2, 9])
def test_several_rows_or_none(M, device):
    x = random_x((M, 64)).to(device)
    assert_same_as_linear(x, random_weights((Q4_0, Q8_0), (3, 5), 64, device), (Q4_0, Q8_0))


def test_empty_weights(device):
    x, nothing = random_x((1, 64)).to(device), random_x((1, 0)).to(device)
    assert_same_as_linear(x, random_weights((Q4_0,) * 3, (0, 5, 0), 64, device), (Q4_0,) * 3)
    no_columns = [torch.empty(N, 0, dtype=torch.uint8, device=device) for N in (2, 3)]
    assert_same_as_linear(nothing, no_columns, (Q4_0,) * 2)


def test_a_row_that_is_not_aligned(device):
    x = random_x((1, 65), torch.half).to(device)[:, 1:]
    assert_same_as_linear(x, random_weights((Q4_0, Q4_0), (3, 5), 64, device), (Q4_0, Q4_0))


def test_one_launch_for_every_four_weights(mps, record):
    x = random_x((1, 64)).to(mps)
    for count, names in ((1, 1), (2, 1), (4, 1), (5, 2), (6, 2)):
        weights = random_weights((Q4_0,) * count, range(1, count + 1), 64, mps)
        record()
        ys = torch_qgemv.fused_linear(x, weights, [Q4_0] * count)
        made = record()
        assert len(made) == names
        assert [launch.kernel for launch in made if launch.kernel != "fused_float"] == ["gemv_Q4_0_float_r4_s2_k1"] * (
            count % 4 == 1
        )
        assert [y.cpu().tolist() for y in ys] == [torch_qgemv.linear(x, w, Q4_0).cpu().tolist() for w in weights]


def test_kernels_of_different_shapes_share_a_launch(mps, record):
    """K is split between four SIMD-groups for one weight, not at all for the other, whose address is odd."""
    x = random_x((1, 4096), torch.half).to(mps)
    split, plain = random_weights((Q4_K, Q4_K), (9, 21), 4096, mps)
    plain = odd_view(plain)
    assert_same_as_linear(x, [split, plain], (Q4_K, Q4_K))
    fused, *alone = record()
    assert [launch.kernel for launch in alone] == ["gemv_Q4_K_half_r8_s4_k4", "gemv_Q4_K_half_plain"]
    assert fused.kernel == "fused_half" and fused.threads[0] == 128
    assert fused.groups[0] == 2 + 2  # 8 outputs each, and 16


def test_nothing_is_copied(mps, record):
    x, weights = random_x((1, 64)).to(mps), random_weights((Q4_0, Q4_0), (3, 5), 64, mps)
    bias = random_x((5,)).to(mps)
    ys = torch_qgemv.fused_linear(x, weights, (Q4_0, Q4_0), (None, bias))
    (launch,) = record()
    places = {0: weights[0], 1: weights[1], 4: x, 6: bias, 9: ys[0], 10: ys[1]}
    for place, tensor in places.items():
        assert launch.buffers[place].storage == tensor.untyped_storage().data_ptr()


# ---- What torch does with it


def test_derivatives_are_those_of_linear(device):
    weights, bias = random_weights((Q4_0, Q4_0), (3, 5), 64, device), random_x((5,)).to(device).requires_grad_()
    x = random_x((1, 64)).to(device).requires_grad_()

    def loss(function):
        first, second = function(x)
        return torch.autograd.grad((first.sum() * second.square().sum()), (x, bias))

    fused = loss(lambda x: torch_qgemv.fused_linear(x, weights, (Q4_0, Q4_0), (None, bias)))
    pairs = list(zip(weights, (None, bias), strict=True))
    expected = loss(lambda x: [torch_qgemv.linear(x, w, Q4_0, b) for w, b in pairs])
    for one, other in zip(fused, expected, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert not torch_qgemv.fused_linear(x, weights, (Q4_0, Q4_0))[0].requires_grad
    bias_only = torch_qgemv.fused_linear(x.detach(), weights, (Q4_0, Q4_0), (None, bias))
    assert [y.requires_grad for y in bias_only] == [False, True]
    _, tangents = torch.func.jvp(
        lambda x: tuple(torch_qgemv.fused_linear(x, weights, (Q4_0, Q4_0))), (x.detach(),), (torch.ones_like(x),)
    )
    assert torch.equal(tangents[1], torch_qgemv.linear(torch.ones_like(x), weights[1], Q4_0).detach())


def test_vmap():
    weights = random_weights((Q4_0, Q4_0), (3, 5), 64, "cpu")
    x, biases = random_x((4, 64)), random_x((4, 5), seed=1)

    def product(x, bias):
        return tuple(torch_qgemv.fused_linear(x, weights, (Q4_0, Q4_0), (None, bias)))

    for dims in ((0, 0), (None, 0), (0, None)):
        x_of, bias_of = (x if dims[0] == 0 else x[0]), (biases if dims[1] == 0 else biases[0])
        each = [product(x[i * (dims[0] == 0)], biases[i * (dims[1] == 0)]) for i in range(4)]
        expected = [torch.stack(ys) for ys in zip(*each, strict=True)]
        for y, wanted in zip(torch.func.vmap(product, dims)(x_of, bias_of), expected, strict=True):
            assert torch.equal(y, wanted)


def test_autocast(device):
    x, weights = random_x((1, 64)).to(device), random_weights((Q4_0, Q4_0), (3, 5), 64, device)
    with torch.autocast(device, torch.bfloat16):
        ys = torch_qgemv.fused_linear(x, weights, (Q4_0, Q4_0))
    expected = torch_qgemv.fused_linear(x.bfloat16(), weights, (Q4_0, Q4_0))
    for y, wanted in zip(ys, expected, strict=True):
        assert y.dtype == torch.bfloat16 and torch.equal(y, wanted)


def test_opcheck():
    weights = random_weights((Q4_0, Q8_0), (3, 5), 64, "cpu")
    for x in (random_x((1, 64)), random_x((2, 3, 64)).requires_grad_()):
        torch.library.opcheck(ops.fused_linear.default, (x, weights, [2, 8], [None, random_x((5,))]))


def test_compiled():
    weights = random_weights((Q4_0, Q8_0), (3, 5), 64, "cpu")
    compiled = torch.compile(lambda x: torch_qgemv.fused_linear(x, weights, (Q4_0, Q8_0)), fullgraph=True)
    x = random_x((1, 64))
    for y, expected in zip(compiled(x), torch_qgemv.fused_linear(x, weights, (Q4_0, Q8_0)), strict=True):
        assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": []}, "must be as many, one or more, got 0, 2 and 2"),
        ({"quant_types": [Q4_0]}, "must be as many, one or more, got 2, 1 and 1"),
        ({"biases": [None]}, "must be as many, one or more, got 2, 2 and 1"),
        ({"x": torch.zeros(1, 32)}, r"x has K = 32 .*N = 3, K = 64"),
        ({"biases": [None, torch.zeros(4)]}, r"bias must be \[N\] = \[5\], got \[4\]"),
        ({"quant_types": [Q4_0, "F32"]}, "'F32' is not a supported GGUF type"),
    ],
    ids=["no weights", "fewer types", "fewer biases", "another K", "another N", "another type"],
)
def test_bad_input(change, message, device):
    good = {"x": torch.zeros(1, 64), "weights": random_weights((Q4_0, Q4_0), (3, 5), 64, "cpu")}
    arguments = good | {"quant_types": [Q4_0, Q4_0]} | change

    def moved(value):
        if isinstance(value, list):
            return [moved(each) for each in value]
        return value.to(device) if isinstance(value, torch.Tensor) else value

    with pytest.raises(ValueError, match=message):
        torch_qgemv.fused_linear(**{name: moved(value) for name, value in arguments.items()})
