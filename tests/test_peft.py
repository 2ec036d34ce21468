"""LoRA adapters on packed layers, by peft."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_qgemv
from torch_qgemv import QuantLinear

if not os.environ.get("CI"):
    pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

register = torch_qgemv.peft.register
DATA = Path(__file__).parent / "data"


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def packed_mlp(dtype=torch.float32, device="cpu", only=("up", "down")):
    torch.manual_seed(0)
    return torch_qgemv.quantize_model(Mlp().to(dtype), "Q8_0", lambda name, _: name in only).to(device)


def with_adapter(model, **options):
    """`model` with an adapter that changes its results."""
    model = get_peft_model(model, register(LoraConfig(**{"r": 4, "target_modules": ["up", "down"]} | options)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def inputs(dtype=torch.float32, device="cpu", seed=1):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def packed_bytes(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(".packed")}


def train(model, x, target, steps=20):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"init_lora_weights": "gaussian", "lora_dropout": 0.1}])
def test_adapter_trains_and_leaves_the_packed_bytes_alone(options, dtype, device):
    base = packed_mlp(dtype, device)
    x, plain = inputs(dtype, device), base(inputs(dtype, device)).detach()
    model = get_peft_model(base, register(LoraConfig(r=4, target_modules=["up", "down"], **options)))
    before = packed_bytes(model)
    assert len(before) == 2
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    model.eval()
    # B is zero at first; in bfloat16, DoRA's magnitudes are rounded.
    assert (model(x) - plain).norm() <= (0.01 if dtype == torch.bfloat16 else 1e-6) * plain.norm()
    losses = train(model.train(), x, inputs(dtype, device, seed=2))
    assert losses[-1] < 0.9 * losses[0]
    after = packed_bytes(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    with model.disable_adapter():
        torch.testing.assert_close(model(x), plain)
    assert model(x).dtype == dtype and not torch.allclose(model(x), plain)
    torch.testing.assert_close(model.unload()(x), plain)


def test_adapter_gradients_are_those_of_the_unpacked_model(device):
    packed, x = with_adapter(packed_mlp(device=device)), inputs(device=device)
    plain = torch_qgemv.peft.to_linear(with_adapter(packed_mlp(device=device)))
    plain.load_state_dict({name: p for name, p in packed.state_dict().items() if "lora_" in name}, strict=False)
    for model in (packed, plain):
        model(x).square().sum().backward()
    grads = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert len(grads) == 4
    for name, parameter in packed.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad - grads[name]).norm() <= 1e-5 * grads[name].norm(), name


def test_saved_adapter_loads_again(tmp_path):
    model, x = with_adapter(packed_mlp()), inputs()
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(packed_mlp(), tmp_path, config=register(LoraConfig.from_pretrained(tmp_path)))
    assert torch.equal(loaded(x), model(x))
    loaded.load_adapter(tmp_path, "second")  # onto layers that are wrapped already
    loaded.set_adapter("second")
    assert torch.equal(loaded(x), model(x))
    unquantized = PeftModel.from_pretrained(Mlp(), tmp_path)
    assert any(isinstance(module, LoraLayer) for module in unquantized.modules())


@pytest.mark.parametrize("action", ["merge_adapter", "merge_and_unload", "unmerge_adapter"])
@pytest.mark.parametrize("only", [("up", "down"), ("down",)])  # with an nn.Linear that can be merged, too
def test_merging_raises_and_keeps_the_adapter(action, only):
    model, x = with_adapter(packed_mlp(only=only)), inputs()
    y = model(x)
    options = [{}] if action == "unmerge_adapter" else [{}, {"safe_merge": True}]
    for option in options:
        with (
            pytest.warns() if action == "unmerge_adapter" and len(only) == 1 else nullcontext(),  # of the nn.Linear
            pytest.raises(NotImplementedError, match=r"merge: .*QuantLinear\(.*to_linear\(model\) first"),
        ):
            getattr(model, action)(**option)
    torch.testing.assert_close(model(x), y)
    with pytest.raises(NotImplementedError, match=r"^merge: "):
        model.base_model.model.down.merge()
    assert isinstance(model.base_model.model.down.get_base_layer(), QuantLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_layers_can_be_merged(dtype, device):
    model, x = with_adapter(packed_mlp(dtype, device)), inputs(dtype, device)
    y = model(x).detach()
    assert torch_qgemv.peft.to_linear(model) is model
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    model.merge_adapter()
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    assert type(merged.up) is nn.Linear and type(merged.down) is nn.Linear
    torch.testing.assert_close(merged(x), y, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=y.abs().max() / 100)


def test_adapters_on_adapted_layers():
    model, x = with_adapter(packed_mlp()), inputs()
    first = model(x)
    model.add_adapter("second", register(LoraConfig(r=2, target_modules=["up"])))
    model.set_adapter("second")
    assert not torch.allclose(model(x), first)
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(model(x), first)


def test_what_packed_layers_cannot_do_is_refused():
    for init in ("pissa", "olora", "corda", "eva"):
        config = register(LoraConfig(target_modules=["up"], init_lora_weights=init))
        with pytest.raises(ValueError, match=f"init_lora_weights='{init}' .*packed"):
            get_peft_model(packed_mlp(), config)
    with pytest.raises(ValueError, match="all-linear"):
        register(LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="fan_in_fan_out"):
        register(LoraConfig(target_modules=["up"], fan_in_fan_out=True))
    from peft import LoHaConfig

    with pytest.raises(TypeError, match="LoraConfig only, got LoHaConfig"):
        register(LoHaConfig(target_modules=["up"]))
    with pytest.raises(ValueError, match=r"QuantLinear.* is not supported"):  # never left without an adapter
        get_peft_model(packed_mlp(), LoraConfig(target_modules=["up"]))


def test_configs_that_other_code_makes_are_registered_within_registering():
    with pytest.raises(KeyError), torch_qgemv.peft.registering():
        config = LoraConfig(r=2, target_modules=["up"])
        raise KeyError
    assert isinstance(get_peft_model(packed_mlp(), config).base_model.model.up, torch_qgemv.peft.LoraQuantLinear)
    with pytest.raises(ValueError, match=r"QuantLinear.* is not supported"):
        get_peft_model(packed_mlp(), LoraConfig(r=2, target_modules=["up"]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_from_gguf_trains_with_checkpointing(use_reentrant):
    pytest.importorskip("transformers")
    model, _ = torch_qgemv.hf.from_gguf(DATA / "tiny-llama-Q4_K_M.gguf")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, register(config))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tokens = torch.arange(24).reshape(2, 12)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before, losses = packed_bytes(model), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    after = packed_bytes(model)
    assert before and all(torch.equal(after[name], before[name]) for name in before)


def test_importing_torch_qgemv_needs_no_peft():
    code = """
import sys
sys.modules["peft"] = None
import torch_qgemv
try:
    torch_qgemv.peft
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith('torch_qgemv.peft needs peft 0.19 or newer; run: pip install "peft>=0.19"')
    code = "import sys, torch_qgemv; print('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
