"""save_pretrained of transformers models that hold packed modules: never a folder that loads with random weights."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear

transformers = pytest.importorskip("transformers")
from torch_qgemv.hf import from_gguf  # noqa: E402

IDS = torch.tensor([[1, 5, 9]])
GGUF = Path(__file__).parent / "data/tiny-llama-Q4_K_M.gguf"


def make_model(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, **options
    )
    return transformers.LlamaForCausalLM(config).eval()


def quantized():
    return torch_qgemv.quantize_model(make_model(), "Q8_0")


def quantized_backbone():
    model = make_model()
    torch_qgemv.quantize_model(model.model, "Q8_0")
    return model


def one_module_set_by_hand():
    model = make_model()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = QuantLinear.from_linear(mlp.up_proj, "Q8_0")
    return model


def one_embedding():
    model = make_model()
    model.set_input_embeddings(QuantEmbedding(64, 64, "Q8_0"))
    return model


def copied():
    return copy.deepcopy(quantized())


def from_file():
    return from_gguf(GGUF, progress=False)[0]


MAKES = [quantized, quantized_backbone, one_module_set_by_hand, one_embedding, copied, from_file]


@pytest.mark.parametrize("make", MAKES)
def test_save_pretrained_of_a_packed_model_raises_and_writes_nothing(make, tmp_path):
    model = make()
    config = model.config.to_dict()
    for options in ({}, {"state_dict": model.state_dict()}, {"is_main_process": False}):
        with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM has \d+ packed modules .*load_state_dict"):
            model.save_pretrained(tmp_path / "folder", **options)
    assert not list(tmp_path.iterdir())
    assert model.config.to_dict() == config


def test_save_pretrained_of_a_part_without_packed_modules_works(tmp_path):
    model = make_model()
    torch_qgemv.quantize_model(model, "Q8_0", lambda name, module: name == "lm_head")
    model.model.save_pretrained(tmp_path)
    again = transformers.LlamaModel.from_pretrained(tmp_path)
    assert torch.equal(again(IDS)[0], model.model(IDS)[0])


def test_unpacked_models_are_saved_and_load_again(tmp_path):
    model = quantized()
    logits = model(IDS).logits
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            model.set_submodule(name, module.to_linear())
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).logits, logits)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_way_that_the_error_names(tied, device, tmp_path):
    """The state dict, and the configuration beside it."""
    model = torch_qgemv.quantize_model(make_model(tie_word_embeddings=tied), "Q8_0")
    model.config.save_pretrained(tmp_path)
    safetensors.torch.save_model(model, tmp_path / "packed.safetensors")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device(device or "cpu"):
        fresh = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch_qgemv.load_state_dict(fresh, safetensors.torch.load_file(tmp_path / "packed.safetensors"))
    if device == "meta":  # buffers that no state dict has
        fresh.model.rotary_emb = type(fresh.model.rotary_emb)(config)
    assert isinstance(fresh.lm_head, QuantLinear)
    assert torch.equal(fresh(IDS).logits, model(IDS).logits)


def test_adapters_are_saved_by_transformers(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0.19.0")  # which torch_qgemv.peft takes
    model = quantized()
    config = torch_qgemv.peft.register(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.add_adapter(config)
    model.save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert names and all("lora" in name for name in names)
