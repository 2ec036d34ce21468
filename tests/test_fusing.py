"""fuse: whole models in fewer launches, with the same results."""

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch
from formats import random_x
from torch import nn

import torch_qgemv
from torch_qgemv import QuantLinear
from torch_qgemv.fusing import FollowingQuantLinear, LeadingQuantLinear

DATA = Path(__file__).parent / "data"


def packed_linear(rows, seed, quant_type="Q4_0", columns=64):
    packed = torch_qgemv.testing.random_packed(quant_type, rows, columns, seed=seed)
    return QuantLinear.from_packed(packed, quant_type)


class Gated(nn.Module):
    """The first half of an MLP, by the names of transformers."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = packed_linear(32, 0), packed_linear(32, 1, "Q8_0")

    def forward(self, x):
        return self.gate_proj(x) * self.up_proj(x)


GROUPS = [("gate_proj", "up_proj")]


@pytest.fixture
def pair(device):
    """(a module, the same one fused)"""
    module = Gated().to(device)
    return module, torch_qgemv.fuse(copy.deepcopy(module), GROUPS)


# ---- Whole models


@pytest.mark.parametrize("name", ["llama-UDmix", "qwen2-Q4_K_M", "qwen3-UDmix", "gemma3-UDmix", "qwen35moe-UDmix"])
def test_logits_are_the_same(name):
    hf = pytest.importorskip("torch_qgemv.hf")
    model, _ = hf.from_gguf(DATA / f"tiny-{name}.gguf", progress=False)
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        expected = model(ids).logits
        state = model.state_dict()
        fused = torch_qgemv.fuse(model)
        assert any(isinstance(module, LeadingQuantLinear) for module in fused.modules())
        assert torch.equal(fused(ids).logits, expected)
    assert fused is model and fused.state_dict().keys() == state.keys()
    assert all(module.__dict__.get("_given") is None for module in model.modules())
    torch_qgemv.unfuse(model)
    assert not any(isinstance(module, LeadingQuantLinear | FollowingQuantLinear) for module in model.modules())


@pytest.mark.parametrize("name, before, after", [("llama-UDmix", 2 * 7, 2 * 4), ("qwen35-UDmix", 7 + 3 * 8, 4 * 4)])
def test_a_token_takes_fewer_launches(name, before, after, mps, simulator):
    """Of two layers, or of four, three of which have linear attention; and one of the head."""
    hf = pytest.importorskip("torch_qgemv.hf")
    model, _ = hf.from_gguf(DATA / f"tiny-{name}.gguf", device=mps, progress=False)

    def run():
        simulator.clear()
        with torch.no_grad():
            logits = model(torch.tensor([[1]], device=mps)).logits
        kernels = [launch.kernel.split("_")[0] for launch in simulator.dispatches()]
        return logits, sum(kernel in ("gemv", "fused") for kernel in kernels)

    expected, launches = run()
    assert launches == before + 1
    torch_qgemv.fuse(model)
    logits, launches = run()
    assert launches == after + 1
    assert torch.equal(logits, expected)


def test_a_model_it_does_not_know():
    with pytest.raises(ValueError, match=r"which layers of Gated \(model type None\) share.*groups="):
        torch_qgemv.fuse(Gated())


# ---- The layers


def test_layers_stay_what_they_are(pair):
    plain, fused = pair
    for layer in (fused.gate_proj, fused.up_proj):
        assert isinstance(layer, QuantLinear) and "QuantLinear(in_features=64" in repr(layer)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    fused.load_state_dict(plain.state_dict())
    x = random_x((1, 64)).to(plain.gate_proj.stored.device)
    assert torch.equal(fused(x), plain(x))
    assert torch.equal(fused.up_proj.to_linear()(x), plain.up_proj.to_linear()(x))


def test_layers_that_are_left_out(device):
    module = Gated().to(device)
    module.other = nn.Linear(64, 32)
    module.narrow = packed_linear(8, 3, columns=32)
    torch_qgemv.fuse(module, [("other", "missing", "gate_proj"), ("narrow", "up_proj")])
    assert type(module.gate_proj) is type(Gated().gate_proj) and type(module.up_proj) is type(Gated().up_proj)
    torch_qgemv.fuse(module, [("other", "gate_proj", "narrow", "up_proj")])
    assert isinstance(module.gate_proj, LeadingQuantLinear) and isinstance(module.up_proj, FollowingQuantLinear)
    torch_qgemv.fuse(module, [("gate_proj", "up_proj")])  # once more: nothing is left to do


def test_another_x_for_the_second_layer(pair):
    plain, fused = pair
    x, other = (random_x((1, 64), seed=seed).to(plain.gate_proj.stored.device) for seed in (0, 1))
    fused.gate_proj(x)
    assert torch.equal(fused.up_proj(other), plain.up_proj(other))
    assert torch.equal(fused.up_proj(x), plain.up_proj(x))
    fused.gate_proj(x)
    assert torch.equal(fused.up_proj(x.clone()), plain.up_proj(x))


def test_x_changed_in_place(pair):
    plain, fused = pair
    x = random_x((1, 64)).to(plain.gate_proj.stored.device)
    fused.gate_proj(x)
    x.mul_(2)
    assert torch.equal(fused.up_proj(x), plain.up_proj(x))


def test_what_was_given_is_taken_once(pair):
    _, fused = pair
    x = random_x((1, 64)).to(fused.gate_proj.stored.device)
    fused(x)
    assert fused.up_proj._given is None
    fused.gate_proj(x)
    assert pickle.loads(pickle.dumps(fused.cpu())).up_proj._given is None
    assert copy.deepcopy(fused).up_proj._given is None


def test_copies_and_pickles_lead_their_own_layers(pair):
    plain, fused = pair
    x = random_x((1, 64))
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused.cpu()))):
        other = other.cpu()
        assert other.gate_proj._followers == (other.up_proj,)
        assert torch.equal(other(x), plain.cpu()(x))


def test_inference_mode(pair):
    plain, fused = pair
    with torch.inference_mode():
        x = random_x((1, 64)).to(plain.gate_proj.stored.device)
        assert torch.equal(fused(x), plain(x))


def test_gradients(pair):
    grads = []
    for module in pair:
        x = random_x((2, 64)).to(module.gate_proj.stored.device).requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_layer_that_is_elsewhere(pair):
    plain, fused = pair
    fused.up_proj.to("meta")
    x = random_x((1, 64)).to(plain.gate_proj.stored.device)
    assert torch.equal(fused.gate_proj(x), plain.gate_proj(x))


def test_prepared(device):
    fused = torch_qgemv.fuse(torch_qgemv.prepare(Gated().to(device)), GROUPS)
    x = random_x((1, 64)).to(device)
    assert torch.equal(fused(x), Gated().to(device)(x))


def test_compiled():
    plain = Gated()
    fused = torch_qgemv.fuse(copy.deepcopy(plain), GROUPS)
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(fused, backend=backend, fullgraph=True)
    for seed in (0, 1):
        x = random_x((1, 64), seed=seed)
        assert torch.equal(compiled(x), plain(x))
    (targets,) = graphs
    assert [str(target) for target in targets if "torch_qgemv" in str(target)] == ["torch_qgemv.fused_linear"]
    assert torch.equal(torch.compile(fused)(x), plain(x))


def test_threads_that_share_a_model():
    plain = Gated()
    fused = torch_qgemv.fuse(copy.deepcopy(plain), GROUPS)
    xs = [random_x((1, 64), seed=seed) for seed in range(8)]
    expected, wrong = [plain(x) for x in xs], []

    def work(i):
        for _ in range(200):
            if not torch.equal(fused(xs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
