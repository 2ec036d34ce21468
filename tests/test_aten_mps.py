"""The rest of PyTorch on the simulated device, as far as models and the project's own tests lean on it."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import metal_sim
import pytest
import torch
import torch.nn.functional as F
from torch import nn

metal_sim.install_or_skip()

A, B, I = torch.randn(2, 3, 8), torch.randn(8), torch.tensor([1, 0])  # noqa: E741
FUNCTIONS = {
    "add": lambda a, b, i: a + b,
    "scalar": lambda a, b, i: a * torch.tensor(2.0) + 1,
    "matmul": lambda a, b, i: a @ b,
    "linear": lambda a, b, i: F.linear(a, a[0], a[0, :, 0]),
    "layer_norm": lambda a, b, i: F.layer_norm(a, (8,), b, b),
    "softmax": lambda a, b, i: a.softmax(-1),
    "gelu": lambda a, b, i: F.gelu(a),
    "attention": lambda a, b, i: F.scaled_dot_product_attention(a, a, a, is_causal=True),
    "attention_mask": lambda a, b, i: F.scaled_dot_product_attention(a, a, a, attn_mask=a[:, :, :3] > -1),
    "embedding": lambda a, b, i: F.embedding(i, a[0]),
    "index": lambda a, b, i: a[i, 1:, ::2],
    "mask": lambda a, b, i: a[a > 0],
    "where": lambda a, b, i: torch.where(a > 0)[2],
    "view": lambda a, b, i: a.transpose(0, 2).reshape(4, -1)[1:].unsqueeze(0),
    "bytes": lambda a, b, i: a.half().view(torch.uint8),
    "cat": lambda a, b, i: torch.cat([a, a], 1),
    "half": lambda a, b, i: a.half() + 1,
    "bfloat": lambda a, b, i: a.bfloat16() @ b.bfloat16(),
    "conv": lambda a, b, i: F.conv1d(a, a[:, :, :2]),
    "topk": lambda a, b, i: a.topk(2)[1],
    "foreach": lambda a, b, i: torch._foreach_add([a, b], 1)[1],
}


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_function(fn):
    result = fn(A.to("mps"), B.to("mps"), I.to("mps"))
    assert result.is_mps
    torch.testing.assert_close(result.cpu(), fn(A, B, I))


def test_in_place():
    a = torch.zeros(3, 4, device="mps")
    a[1].copy_(torch.ones(4))
    a.t()[0].add_(2)
    assert a.tolist() == [[2, 0, 0, 0], [3, 1, 1, 1], [2, 0, 0, 0]]
    out = torch.empty(0, device="mps")
    torch.add(a, 1, out=out)  # resizes
    assert out.sum().item() == a.sum().item() + 12


def test_limits_of_mps():
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, device="mps").double()
    with pytest.raises(TypeError):
        torch.zeros(1, device="mps").numpy()
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(2, device="mps") + torch.zeros(2)


def test_an_operator_of_another_library_is_not_run_on_the_cpu():
    """A Mac has no such way either: a missing kernel must not go unnoticed."""
    with torch.library._scoped_library("metal_sim_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        assert torch.ops.metal_sim_test.twice(torch.ones(1)).item() == 2
        with pytest.raises(NotImplementedError, match="metal_sim_test::twice has no kernel for MPS"):
            torch.ops.metal_sim_test.twice(torch.ones(1, device="mps"))


def test_torch_mps():
    assert torch.backends.mps.is_available() and torch.accelerator.current_accelerator().type == "mps"
    before = torch.mps.current_allocated_memory()
    x = torch.empty(1000, device="mps")
    assert torch.mps.current_allocated_memory() == before + 4000
    del x
    assert torch.mps.current_allocated_memory() == before
    torch.mps.synchronize()
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    start.record()
    end.record()
    assert 0 <= start.elapsed_time(end) < 1000


def test_the_device_may_come_late():
    """torch remembers that it has no MPS device once it was asked; installing the simulated one changes that."""
    code = """if True:
        import os
        import torch
        assert not torch.backends.mps.is_available()
        import metal_sim
        metal_sim.install()
        assert torch.backends.mps.is_available()
        torch.manual_seed(0)
        assert torch.nn.Linear(2, 2).to("mps")(torch.randn(1, 2, device="mps")).sum().backward() is None
        # Without the interpreter's own end, at which torch's threads for gradients, still alive, may call abort().
        os._exit(0)
    """
    tests = str(Path(metal_sim.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tests)


def test_random_numbers_are_seeded():
    torch.manual_seed(3)
    x = torch.randn(4, device="mps")
    torch.manual_seed(3)
    assert torch.equal(x, torch.randn(4, device="mps"))


def test_save_load_pickle_deepcopy():
    x = torch.randn(4, 4, device="mps")
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    for loaded in (
        torch.load(file, map_location="mps")["x"],
        pickle.loads(pickle.dumps(x)),
        copy.deepcopy(x),
    ):
        assert loaded.is_mps and torch.equal(loaded, x)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["x"], x.cpu())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_transformer_layer(compiled):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    on_mps = copy.deepcopy(layer).to("mps")
    run = torch.compile(on_mps, backend="aot_eager", fullgraph=True) if compiled else on_mps
    layer(x).square().mean().backward()
    run(x.to("mps")).square().mean().backward()
    torch.testing.assert_close(on_mps.linear1.weight.grad.cpu(), layer.linear1.weight.grad)


def test_training_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    on_mps = copy.deepcopy(model).to("mps")
    for m, x in ((model, A), (on_mps, A.to("mps"))):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    for expected, result in zip(model.parameters(), on_mps.parameters(), strict=True):
        torch.testing.assert_close(result.cpu(), expected)


def test_transformers_generate():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[1, 5, 9]])
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **asked)
    on_mps = copy.deepcopy(model).to("mps")
    assert on_mps.generate(prompt.to("mps"), **asked).tolist() == expected.tolist()
    torch.testing.assert_close(on_mps(prompt.to("mps")).logits.cpu(), model(prompt).logits)
