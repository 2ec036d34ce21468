"""hf.from_gguf for Qwen3.5, dense and with experts: what differs between files, caches, torch.compile."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_qgemv
from torch_qgemv import GGUFFile, QuantLinear
from torch_qgemv.experts import ExpertLinear, QuantExpertLinear
from torch_qgemv.permuted import PermutedQuantLinear

transformers = pytest.importorskip("transformers", minversion="5.24")
from test_models import edited  # noqa: E402

from torch_qgemv.hf import from_gguf  # noqa: E402

DATA = Path(__file__).parent / "data"
DENSE, MOE, MIXED = (DATA / f"tiny-{name}.gguf" for name in ("qwen35-UDmix", "qwen35moe-UDmix", "qwen35moe-gateupmix"))
LOGITS = np.load(DATA / "reference_logits.npz")
IDS = torch.from_numpy(LOGITS["ids"])[None]


def load(path, device="cpu", **options):
    return from_gguf(path, device, progress=False, **options)[0]


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits[0].cpu()


def expected(path):
    return torch.from_numpy(LOGITS[f"{path.stem}.dequantized"])


def assert_right(model, path):
    torch.testing.assert_close(logits(model), expected(path), atol=1e-4, rtol=0)


def test_packed_bytes_are_those_of_the_file():
    """Rows are only moved as a whole; out_proj's stay, and its layer moves the values of x."""
    file, model = GGUFFile(MIXED), load(MIXED, prepare=False)
    attention, experts = model.model.layers[0].linear_attn, model.model.layers[0].mlp.experts
    assert isinstance(attention.out_proj, PermutedQuantLinear)
    assert sorted(attention.out_proj.input_permutation.tolist()) == list(range(256))
    for name, layer in {"ssm_out": attention.out_proj, "ffn_gate_exps": experts.gate_proj}.items():
        assert torch.equal(layer.packed, file[f"blk.0.{name}.weight"].data)
    for name, layer in {"attn_qkv": attention.in_proj_qkv, "ssm_alpha": attention.in_proj_a}.items():
        rows, packed = file[f"blk.0.{name}.weight"].data.tolist(), layer.packed.tolist()
        assert packed != rows and sorted(packed) == sorted(rows)
    types = {part: getattr(experts, f"{part}_proj").quant_type.name for part in ("gate", "up", "down")}
    assert types == {"gate": "Q4_K", "up": "IQ4_XS", "down": "Q5_K"}


FLOATS = ["blk.0.ssm_out", "blk.0.attn_qkv", "blk.0.ssm_alpha", "blk.1.attn_q", "blk.0.ffn_down_exps", "token_embd"]


@pytest.mark.parametrize("name", FLOATS)
def test_tensors_that_the_file_does_not_pack(tmp_path, name, device):
    path = edited(MOE, tmp_path / "float.gguf", dequantize={f"{name}.weight"})
    model = load(path, device)
    dense = {"token_embd": nn.Embedding, "ffn_down_exps": ExpertLinear}.get(name.rpartition(".")[2], nn.Linear)
    assert any(type(module) is dense for module in model.modules())
    assert_right(model, MOE)


def test_tied_output(tmp_path, device):
    model = load(edited(DENSE, tmp_path / "tied.gguf", without={"output.weight"}), device)
    assert model.config.tie_word_embeddings
    assert model.lm_head.stored.data_ptr() == model.model.embed_tokens.stored.data_ptr()
    with torch.no_grad():
        hidden = model.model(IDS.to(device)).last_hidden_state[0].cpu()
    table = GGUFFile(DENSE)["token_embd.weight"]
    matrix = torch_qgemv.dequantize(table.data, table.quant_type)
    torch.testing.assert_close(logits(model), hidden @ matrix.T, atol=1e-4, rtol=0)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    extra = {"blk.4.nextn.eh_proj.weight": np.ones((2, 4), np.float32)}
    more = {"qwen35.block_count": (5, "UINT32"), "qwen35.nextn_predict_layers": (1, "UINT32")}
    model = load(edited(DENSE, tmp_path / "mtp.gguf", extra, more))
    assert model.config.num_hidden_layers == 4
    assert_right(model, DENSE)
    with pytest.raises(ValueError, match=r"without a place in the model: blk\.4\.nextn\.eh_proj\.weight"):
        load(edited(DENSE, tmp_path / "stray.gguf", extra))


def test_as_many_key_heads_as_value_heads(tmp_path):
    """Then nothing is in another order, and no layer holds a permutation. The values are another model's."""
    heads = {"qwen35.ssm.group_count": (4, "UINT32"), "qwen35.ssm.state_size": (32, "UINT32")}
    model, file = load(edited(DENSE, tmp_path / "equal.gguf", metadata=heads), prepare=False), GGUFFile(DENSE)
    attention = model.model.layers[0].linear_attn
    assert type(attention.out_proj)._base is QuantLinear
    assert torch.equal(attention.in_proj_qkv.packed, file["blk.0.attn_qkv.weight"].data)


def test_dense_model_with_experts_is_refused(tmp_path):
    path = edited(DENSE, tmp_path / "odd.gguf", metadata={"qwen35.expert_count": (8, "UINT32")})
    with pytest.raises(NotImplementedError, match=r"qwen35\.expert_count is 8"):
        load(path)


@pytest.mark.parametrize("path", [DENSE, MIXED], ids=["dense", "experts"])
def test_static_cache_generates_the_same(path, device):
    model, count = load(path, device), 16 if device == "cpu" else 3
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1}
    tokens = model.generate(IDS.to(device), **options)
    assert tokens.shape == (1, 10 + count)
    assert tokens.tolist() == model.generate(IDS.to(device), **options, cache_implementation="static").tolist()


@pytest.mark.parametrize(
    ("path", "backend"),
    [
        pytest.param(DENSE, "aot_eager", id="dense"),
        pytest.param(MIXED, "aot_eager", id="experts"),
        pytest.param(DENSE, "inductor", id="inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_decoder_with_a_static_cache(path, backend):
    """One graph, compiled once for all steps."""
    torch._dynamo.reset()
    model = load(path)
    counter = CompileCounterWithBackend(backend)
    eager, compiled = (decode(model, step) for step in (model, torch.compile(model, fullgraph=True, backend=counter)))
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=0)
    assert counter.frame_count == 1


def decode(model, step, count=4):
    """Logits of `count` tokens after the prompt, the prompt by `model` and each token by `step`."""
    cache, rows = transformers.StaticCache(config=model.config, max_cache_len=16), []
    with torch.no_grad():
        row = model(IDS, cache=cache, use_cache=True).logits[:, -1:]
        for _ in range(count):
            row = step(input_ids=row.argmax(-1), cache=cache, use_cache=True).logits
            rows.append(row)
    return torch.cat(rows)


def test_saved_and_loaded(tmp_path):
    model, other = load(MOE), load(MOE)
    for module in other.modules():
        if isinstance(module, (QuantLinear, QuantExpertLinear)):
            module.stored.zero_()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_right(other, MOE)


def test_save_pretrained_raises(tmp_path):
    with pytest.raises(NotImplementedError, match="packed modules"):
        load(MOE).save_pretrained(tmp_path / "folder")


def test_split_of_texts_keeps_marks_with_their_letters(tmp_path):
    path = edited(DENSE, tmp_path / "pre.gguf", metadata={"tokenizer.ggml.pre": ("qwen35", "STRING")})
    _, tokenizer = from_gguf(path, progress=False)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    text = "e\u0301a 12 it's"
    assert [text[start:end] for _, (start, end) in split(text)] == ["e\u0301a", " ", "1", "2", " it", "'s"]
