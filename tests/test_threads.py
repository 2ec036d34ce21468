"""Many threads at once, models of different types in turn, inference mode: nothing is shared that should not be."""

import threading

import pytest
import torch
from formats import TYPES, random_packed, random_x
from torch import nn

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear


def layer(quant_type, N=48, K=512):
    return QuantLinear.from_packed(random_packed(quant_type, N, K), quant_type, random_x((N,)))


def in_threads(count, work):
    """work(i) in `count` threads that start together; the results, or the first exception."""
    results, errors, start = [None] * count, [], threading.Barrier(count)

    def run(i):
        try:
            start.wait()
            results[i] = work(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_four_threads_on_one_layer(device):
    module = layer("Q4_K").to(device)
    xs = [random_x((m + 1, 512), seed=m).to(device) for m in range(4)]
    expected = [module(x) for x in xs]
    for ys, wanted in zip(in_threads(4, lambda i: [module(xs[i]) for _ in range(10)]), expected, strict=True):
        assert all(torch.equal(y, wanted) for y in ys)


def test_four_threads_on_a_prepared_layer():
    module = layer("Q6_K")
    xs = [random_x((m + 1, 512), seed=m) for m in range(4)]
    expected = [module(x) for x in xs]
    torch_qgemv.prepare(module)
    for ys, wanted in zip(in_threads(4, lambda i: [module(xs[i]) for _ in range(20)]), expected, strict=True):
        assert all(torch.equal(y, wanted) for y in ys)


def test_gradients_in_four_threads():
    module = layer("Q5_K")
    xs = [random_x((3, 512), seed=i) for i in range(4)]

    def gradient(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(module(x).square().sum(), x)[0]

    expected = [gradient(x) for x in xs]
    for got, wanted in zip(in_threads(4, lambda i: gradient(xs[i])), expected, strict=True):
        assert torch.equal(got, wanted)


def test_models_of_two_types_in_turn(device):
    models = [nn.Sequential(layer(quant_type), nn.ReLU()).to(device) for quant_type in TYPES[:2]]
    x = random_x((2, 512)).to(device)
    expected = [model(x) for model in models]
    for _ in range(5):
        for model, wanted in zip(models, expected, strict=True):
            assert torch.equal(model(x), wanted)
    for ys, wanted in zip(in_threads(4, lambda i: [models[i % 2](x) for _ in range(10)]), 2 * expected, strict=True):
        assert all(torch.equal(y, wanted) for y in ys)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_without_gradients(mode, device):
    module = layer("Q4_K").to(device)
    embedding = QuantEmbedding.from_packed(random_packed("Q4_K", 20, 512), "Q4_K").to(device)
    x, indices = random_x((2, 512)).to(device).requires_grad_(), torch.tensor([3, 19]).to(device)
    expected = module(x)
    with mode():
        y, rows = module(x), embedding(indices)
        made_here = QuantLinear.from_packed(random_packed("Q4_K", 48, 512).to(device), "Q4_K")(x)
    assert torch.equal(y, expected) and not y.requires_grad
    assert torch.equal(rows, embedding(indices))
    assert not made_here.requires_grad and made_here.shape == (2, 48)
