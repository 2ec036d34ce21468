"""Packed modules saved, loaded, copied, moved, and sent to other processes."""

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import torch
from formats import TYPES, random_packed
from torch import nn

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear
from torch_qgemv.loading import tie

ROOT = Path(__file__).parents[1]
SAME_ROW_BYTES = ("Q4_0", "Q4_K", "IQ4_NL")  # a wrong one of them would fit
by_name = {"ids": lambda value: getattr(value, "name", None)}
INDICES = torch.tensor([[3, 39, 0]])


class Model(nn.Sequential):
    """An embedding, a layer with a bias, and a head, which may be the embedding."""

    def __init__(self, embed, norm, layer, head):
        super().__init__()
        self.embed, self.norm, self.layer, self.head = embed, norm, layer, head


def plain_model(tied=False, device=None):
    model = Model(
        nn.Embedding(40, 512, device=device),
        nn.LayerNorm(512, device=device),
        nn.Linear(512, 512, device=device),
        nn.Linear(512, 40, bias=False, device=device),
    )
    if tied:
        model.head.weight = model.embed.weight
    return model


def zero_model(quant_type="Q4_K", tied=False, device=None):
    model = Model(
        QuantEmbedding(40, 512, quant_type, device=device),
        nn.LayerNorm(512, device=device),
        QuantLinear(512, 512, quant_type, device=device),
        QuantLinear(512, 40, quant_type, bias=False, device=device),
    )
    return tied_model(model) if tied else model


def tied_model(model):
    model.head.packed = model.embed.packed
    tie(model.head, model.embed)
    return model


def packed_model(quant_type="Q4_K", tied=False):
    model = zero_model(quant_type)
    for seed, module in enumerate((model.embed, model.layer, model.head)):
        module.packed = random_packed(quant_type, *module.matrix_shape, seed=seed)
    nn.init.normal_(model.layer.bias)
    return tied_model(model) if tied else model


def is_tied(model):
    return model.head.stored is model.embed.stored


def assert_same(model, other):
    """The same outputs on the CPU, now and after a move: that shows that the rest of the module is whole too."""
    assert torch.equal(other(INDICES), model(INDICES))
    assert torch.equal(other.half()(INDICES), copy.deepcopy(model).half()(INDICES))
    assert all(type(a) is type(b) for a, b in zip(other, model, strict=True))


def saved(state, **options):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **options)


# ---- state_dict


@pytest.mark.parametrize("quant_type", TYPES, **by_name)
def test_state_dict_is_loaded_into_a_fresh_model(quant_type, device):
    model = packed_model(quant_type).to(device)
    state = model.state_dict()
    assert [name for name in state if name.startswith("layer")] == [
        *("layer.bias", "layer.packed", "layer.quant_type_id")
    ]
    type_id = state["layer.quant_type_id"]
    assert type_id.shape == () and type_id.dtype == torch.int32 and type_id == quant_type
    assert type_id.device == state["layer.packed"].device
    state = {name: value.cpu() for name, value in state.items()}
    fresh = zero_model(quant_type).to(device)
    before = [module.stored for module in (fresh.embed, fresh.layer, fresh.head)]
    fresh.load_state_dict(saved(state, weights_only=True))
    assert before == [module.stored for module in (fresh.embed, fresh.layer, fresh.head)]  # in place
    assert_same(model.cpu(), fresh.cpu())


@pytest.mark.parametrize("prepare", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("device_of_fresh", [None, "meta"])
def test_state_dict_is_assigned(device_of_fresh, prepare):
    model, fresh = packed_model(), zero_model(device=device_of_fresh)
    if prepare:
        torch_qgemv.prepare(model)
    state = model.state_dict()
    fresh.load_state_dict(state, assign=True)
    assert fresh.layer.stored is state["layer.packed"]
    assert_same(model, fresh.to("cpu"))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("prepare", [False, True], ids=["plain", "prepared"])
def test_state_dict_of_another_type_is_refused(prepare, assign):
    for other in SAME_ROW_BYTES[1:]:
        model = packed_model(SAME_ROW_BYTES[0])
        if prepare:
            torch_qgemv.prepare(model)
        y = model(INDICES)
        with pytest.raises(RuntimeError, match=rf"layer\.packed is {other} in the state dict, but Q4_0 here"):
            model.load_state_dict({"norm.weight": model.norm.weight} | packed_model(other).state_dict(), assign=assign)
        model.load_state_dict({"norm.bias": torch.zeros(512), "norm.weight": torch.ones(512)}, strict=False)
        assert torch.equal(model(INDICES), y)
    state = model.state_dict() | {"layer.quant_type_id": torch.tensor(99)}
    with pytest.raises(RuntimeError, match=r"layer\.packed is of GGUF type id 99 in the state dict, but Q4_0 here"):
        model.load_state_dict(state, assign=assign)


def test_state_dict_without_a_type_is_refused_if_strict():
    model = zero_model()
    state = packed_model().state_dict()
    del state["layer.quant_type_id"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layer.quant_type_id"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["layer.quant_type_id"]


def test_type_that_foreign_code_loads_is_checked_at_the_next_forward():
    """As accelerate loads: buffer by buffer, by name."""
    state = packed_model("Q4_0").state_dict()
    for name, x in (("embed", INDICES), ("head", torch.ones(1, 512))):
        module = packed_model("Q4_K").get_submodule(name)
        module._buffers["packed"] = state[f"{name}.packed"]
        module._buffers["quant_type_id"] = state[f"{name}.quant_type_id"]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"packed was made a Q4_0 weight .* this module is for Q4_K"):
                module(x)
        module._buffers["quant_type_id"] = torch.tensor(12)
        module(x)


def test_shapes_follow_from_the_bytes():
    layer = QuantLinear(512, 6, "Q4_K")
    layer.packed = random_packed("Q4_K", 3, 256)
    assert (layer.in_features, layer.out_features, layer.weight.shape) == (256, 3, (3, 256))
    with pytest.raises(RuntimeError, match=r"size mismatch for packed"):
        layer.load_state_dict(QuantLinear(512, 6, "Q4_K").state_dict(), strict=False)


# ---- safetensors


@pytest.mark.parametrize("loaded_prepared", [False, True])
@pytest.mark.parametrize("saved_prepared", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_safetensors_model(tied, saved_prepared, loaded_prepared, tmp_path):
    model, fresh = packed_model(tied=tied), zero_model(tied=tied)
    if saved_prepared:
        torch_qgemv.prepare(model)
    if loaded_prepared:
        torch_qgemv.prepare(fresh)
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    assert ("head.packed" in safetensors.torch.load_file(tmp_path / "model.safetensors")) is not tied
    assert safetensors.torch.load_model(fresh, tmp_path / "model.safetensors") == (set(), [])
    assert is_tied(fresh) is tied
    assert_same(model, fresh)


# ---- torch_qgemv.load_state_dict


@pytest.mark.parametrize("prepare", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device_of_plain", [None, "meta"])
def test_plain_model_becomes_the_packed_one(device_of_plain, tied, prepare):
    model = packed_model("Q6_K", tied)
    if prepare:
        torch_qgemv.prepare(model)
    state = model.state_dict()
    plain = plain_model(tied, device_of_plain).eval()
    assert torch_qgemv.load_state_dict(plain, state) == ([], [])
    assert isinstance(plain.embed, QuantEmbedding) and isinstance(plain.layer, QuantLinear)
    assert is_tied(plain) is tied and not plain.layer.training
    assert plain.layer.stored is state["layer.packed"]  # not copied
    assert torch.equal(plain(INDICES), model(INDICES))
    moved = plain.half().to("cpu")
    assert is_tied(moved) is tied and moved.layer.bias.dtype == torch.float16


@pytest.mark.parametrize("device_of_plain", [None, "meta"])
def test_plain_tied_model_takes_a_safetensors_file(device_of_plain, tmp_path):
    model = packed_model(tied=True)
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "head.packed" not in state
    plain = plain_model(tied=True, device=device_of_plain)
    assert torch_qgemv.load_state_dict(plain, state) == ([], [])
    assert is_tied(plain)
    assert torch.equal(plain(INDICES), model(INDICES))


def test_plain_model_on_another_device_and_of_another_dtype(device):
    model, plain = packed_model().half(), plain_model().to(device, torch.float16)
    torch_qgemv.load_state_dict(plain, model.state_dict())
    assert plain.layer.stored.device.type == device and plain.layer.dtype == torch.float16
    assert torch.equal(plain.cpu()(INDICES), model(INDICES))


def test_partly_packed_models_take_their_own_state_dict():
    model, plain = packed_model(tied=True), plain_model(tied=True)
    plain.layer = QuantLinear(512, 512, "Q4_K")
    torch_qgemv.load_state_dict(plain, model.state_dict())
    assert_same(model, plain)
    for prepared in (model, torch_qgemv.prepare(copy.deepcopy(model))):
        state = {
            name: torch.zeros_like(value) if "packed" in name else value for name, value in plain.state_dict().items()
        }
        del state["head.packed"]
        torch_qgemv.load_state_dict(prepared, state)
        assert is_tied(prepared) and not prepared(INDICES).any()


def misfits():
    other = random_packed("Q4_K", 40, 768)
    return {
        "missing from the state dict: norm.bias": lambda state: state.pop("norm.bias"),
        "without a place in the model: extra": lambda state: state.update(extra=torch.ones(1)),
        "norm.bias: shape (1,) in the state dict, (512,) in the model": lambda s: s.update(
            {"norm.bias": torch.ones(1)}
        ),
        "no Q4_K weight of [N, K] = [40, 512]": lambda state: state.update({"head.packed": other}),
        "torch.float32 [40, 288] in the": lambda s: s.update({"head.packed": s["head.packed"].float()}),
        "quant_type 99 is not a supported": lambda state: state.update({"head.quant_type_id": torch.tensor(99)}),
        "layer.packed: a packed weight can't take the place of weight of Bilinear": None,
    }


@pytest.mark.parametrize("message", misfits())
def test_state_dicts_that_do_not_fit_change_nothing(message):
    state, plain = packed_model().state_dict(), plain_model()
    damage = misfits()[message]
    if damage is None:
        plain.layer = nn.Bilinear(512, 1, 512)
    else:
        damage(state)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(ValueError) as error:
        torch_qgemv.load_state_dict(plain, state)
    assert message in str(error.value) and "load_state_dict changed nothing of Model" in str(error.value)
    assert plain.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


def test_not_strict_lists_what_does_not_match():
    state, plain = packed_model().state_dict(), plain_model()
    del state["norm.bias"]
    state["extra"] = torch.ones(1)
    assert torch_qgemv.load_state_dict(plain, state, strict=False) == (["norm.bias"], ["extra"])
    assert isinstance(plain.head, QuantLinear)


# ---- copies


@pytest.mark.parametrize("prepare", [False, True], ids=["plain", "prepared"])
def test_copies_and_pickles_are_whole(prepare, device):
    model = packed_model(tied=True)
    if prepare:
        torch_qgemv.prepare(model)
    model.to(device)
    twins = [copy.deepcopy(model), copy.copy(model)]
    if device == "cpu":  # torch can't pickle tensors of the simulated device
        twins += [pickle.loads(pickle.dumps(model)), saved(model, weights_only=False)]
    for twin in twins:
        assert is_tied(twin)
        assert torch.equal(twin(INDICES.to(device)), model(INDICES.to(device)))
        assert {name: value.shape for name, value in twin.state_dict().items()} == {
            name: value.shape for name, value in model.state_dict().items()
        }
    assert_same(model.cpu(), twins[0].cpu())
    deep = twins[0].float()
    deep.embed.stored.zero_()
    assert not deep(INDICES).any() and model.float()(INDICES).any()


def test_modules_become_linear_and_load_as_linear():
    model = packed_model()
    linear, embedding = model.layer.to_linear(), model.embed.to_embedding()
    nn.Linear(512, 512).load_state_dict(linear.state_dict())
    nn.Embedding(40, 512).load_state_dict(embedding.state_dict())
    assert torch.equal(linear.weight, model.layer.weight + 0)


# ---- the meta device


@pytest.mark.parametrize("make", ["argument", "context", "move"])
def test_meta_device(make):
    if make == "context":
        with torch.device("meta"):
            model = zero_model("Q6_K")
    else:
        model = zero_model("Q6_K", device="meta") if make == "argument" else packed_model("Q6_K").to("meta")
    assert model.layer.stored.is_meta and model.layer.quant_type_id.is_meta
    assert model(INDICES.to("meta")).shape == (1, 3, 40) and model.layer.weight.is_meta
    assert model.half()(INDICES.to("meta")).dtype == torch.float16
    assert tied_model(copy.deepcopy(model)).state_dict()["head.packed"].is_meta
    filled = packed_model("Q6_K").half()
    model.load_state_dict(filled.state_dict(), assign=True)
    assert_same(filled, model.to("cpu"))


def test_to_empty_keeps_the_type(device):
    model = zero_model("Q6_K", device="meta").to_empty(device=device)
    assert model.layer.quant_type_id == 14 and model.layer.quant_type_id.device.type == device
    filled = packed_model("Q6_K")
    model.load_state_dict(filled.state_dict())
    assert_same(filled, model.cpu())


# ---- other processes


def test_spawned_processes(tmp_path):
    """A module as an argument of a process and as an item of a queue, there and back; prepared and tied too."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import torch.multiprocessing as mp
        from test_saving import INDICES, is_tied, packed_model
        from torch_qgemv import prepare

        def work(model, inbox, outbox):
            torch.set_num_threads(1)
            other = inbox.get(timeout=60)
            assert is_tied(model) and is_tied(other)
            outbox.put((model, model(INDICES).detach(), other(INDICES).detach()))
            inbox.get(timeout=60)  # the sender of a tensor has to live until it is received

        if __name__ == "__main__":
            torch.set_num_threads(1)
            context = mp.get_context("spawn")
            inbox, outbox = context.Queue(), context.Queue()
            model, other = prepare(packed_model("Q4_K", tied=True)), packed_model("Q8_0", tied=True)
            expected = model(INDICES), other(INDICES)
            process = context.Process(target=work, args=(model, inbox, outbox))
            process.start()
            inbox.put(other)
            back, *results = outbox.get(timeout=60)
            assert all(map(torch.equal, results, expected))
            assert is_tied(back) and torch.equal(back(INDICES), expected[0])
            inbox.put(None)
            process.join(60)
            assert process.exitcode == 0
            print("done")
        """)
    )
    assert run(script) == "done"


def test_data_loader_workers_after_a_fork(tmp_path):
    """The parent has used several threads before, which a forked process doesn't have."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from torch_qgemv import QuantLinear, prepare
        from formats import random_packed

        torch.set_num_threads(4)
        layer = prepare(QuantLinear.from_packed(random_packed("Q4_K", 2048, 512), "Q4_K")).requires_grad_(False)
        x = torch.randn(6, 512)
        expected = layer(x)  # with four threads

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, i):
                return layer(x[i]), layer(x[i : i + 4])[0]

        loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork", timeout=60)
        rows = list(loader)
        for i in (0, 1):
            torch.testing.assert_close(torch.cat([row[i] for row in rows]), expected)
        print("done")
        """)
    )
    assert run(script) == "done"


def run(script, *arguments):
    """What a script prints that can import the tests' modules."""
    result = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
