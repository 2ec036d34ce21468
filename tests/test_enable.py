"""hf.enable: transformers' own GGUF loader with packed operators, against the same class dequantized."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import torch_qgemv
from torch_qgemv import GGUFFile

transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("accelerate")  # transformers wants it for GGUF files
from torch_qgemv import hf  # noqa: E402

DATA = Path(__file__).parent / "data"
FILES = ["tiny-qwen35-Q4_K_M", "tiny-qwen35-UDmix", "tiny-qwen35moe-Q4_K_M", "tiny-qwen35moe-UDmix"]
FILES += ["tiny-qwen35moe-gateupmix"]  # which transformers alone can't load
LOGITS = np.load(DATA / "reference_logits.npz")
PACKED_TYPES = set(torch_qgemv.quant_types())


@pytest.fixture
def enabled():
    hf.enable()
    yield
    hf.disable()


def load(path, device="cpu", dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, device_map="cpu"
    )
    return model.to(device).eval()


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)[None].to(model.device)).logits[0].float().cpu()


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_dequantized(enabled, name, device, monkeypatch):
    """Ten rows at once, which is more than transformers itself multiplies packed, and one or two."""
    from transformers.integrations.gguf import kernels

    model = load(DATA / f"{name}.gguf", device)
    monkeypatch.setattr(kernels._gguf_kernel, "dequantize", None)  # nothing is unpacked any more
    ids, expected = LOGITS["ids"].tolist(), torch.from_numpy(LOGITS[f"{name}.dequantized"])
    for count in (len(ids), 1, 2):
        actual = logits(model, ids[:count])
        torch.testing.assert_close(actual, expected[:count], atol=1e-4, rtol=0)
        assert torch.equal(actual.argmax(-1), expected[:count].argmax(-1))


@pytest.mark.parametrize("name", FILES)
def test_memory_is_that_of_the_file(enabled, name):
    model = load(DATA / f"{name}.gguf")
    tensors = GGUFFile(DATA / f"{name}.gguf").values()
    in_file = sum(tensor.data.nbytes for tensor in tensors if tensor.quant_type.name in PACKED_TYPES)
    packed = {value.data_ptr(): value.nbytes for value in model.parameters() if value.dtype == torch.uint8}
    assert sum(packed.values()) == in_file
    assert sum(value.nbytes for value in model.parameters() if value.is_floating_point()) < 0.05 * in_file


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in FILES if "Q4_K_M" not in name])
def test_half_precision_runs_without_detours(enabled, name, dtype, device, caplog):
    """No cast to float32 around the layers, no advice to take float32, and as close as from_gguf."""
    model = load(DATA / f"{name}.gguf", device, dtype)
    assert "fastest in float32" not in caplog.text
    seen = set()
    for module in model.modules():
        if type(module).__name__ == "GgufLinear":
            module.register_forward_hook(lambda _, args, y: seen.add((args[0].dtype, y.dtype)))
    ids = LOGITS["ids"].tolist()
    actual, expected = logits(model, ids), torch.from_numpy(LOGITS[f"{name}.dequantized"])
    assert seen == {(dtype, dtype)}
    own, _ = hf.from_gguf(DATA / f"{name}.gguf", device, dtype, progress=False)
    error, own_error = (torch.linalg.vector_norm(each - expected) for each in (actual, logits(own, ids)))
    assert error <= 1.5 * own_error


def test_generate_equals_from_gguf(enabled):
    path, ids = DATA / "tiny-qwen35moe-UDmix.gguf", torch.tensor([[1, 7, 33]])
    own, _ = hf.from_gguf(path, progress=False)
    tokens = (m.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1) for m in (load(path), own))
    assert next(tokens).tolist() == next(tokens).tolist()


LFM2 = {
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": [0, 2],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "shortconv.l_cache": 3,
    "rope.freq_base": 1e4,
}
LFM2_SHAPES = {
    "token_embd.weight": (50, 64),
    "token_embd_norm.weight": (64,),
    **{f"blk.{layer}.{name}_norm.weight": (64,) for layer in (0, 1) for name in ("attn", "ffn")},
    **{f"blk.{layer}.ffn_{name}.weight": (96, 64) for layer in (0, 1) for name in ("gate", "up")},
    **{f"blk.{layer}.ffn_down.weight": (64, 96) for layer in (0, 1)},
    "blk.0.shortconv.conv.weight": (64, 3),
    "blk.0.shortconv.in_proj.weight": (192, 64),
    "blk.0.shortconv.out_proj.weight": (64, 64),
    **{f"blk.1.attn_{name}_norm.weight": (16,) for name in ("q", "k")},
    **{f"blk.1.attn_{name}.weight": (64, 64) for name in ("q", "output")},
    **{f"blk.1.attn_{name}.weight": (32, 64) for name in ("k", "v")},
}


def write_lfm2(path, packed):
    """A random LFM2 model, packed in types of which transformers' loader has no Q5_1, or the same dequantized."""
    writer, random = gguf.GGUFWriter(path, "lfm2"), np.random.default_rng(0)
    for key, value in LFM2.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"lfm2.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"<{index}>" for index in range(50)])
    types = ["Q5_1", "Q8_0", "Q4_0", "IQ4_NL"]
    for index, (name, shape) in enumerate(LFM2_SHAPES.items()):
        values = random.standard_normal(shape, np.float32) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)
        if len(shape) == 1 or "conv.conv" in name:
            writer.add_tensor(name, 1 + values if len(shape) == 1 else values)
            continue
        quant_type = gguf.GGMLQuantizationType[types[index % 4]]
        rows = torch_qgemv.quantize(torch.from_numpy(values), quant_type).numpy()
        if packed:
            writer.add_tensor(name, rows, raw_dtype=quant_type)
        else:
            writer.add_tensor(name, gguf.quants.dequantize(rows, quant_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lfm2_and_types_that_transformers_lacks(tmp_path, dtype, device):
    ids = list(range(11))
    expected = logits(load(write_lfm2(tmp_path / "dense.gguf", packed=False)), ids)
    path = write_lfm2(tmp_path / "packed.gguf", packed=True)
    with pytest.raises(ValueError, match="ggml type 7, which is not supported"):
        load(path)
    hf.enable()
    try:
        model = load(path, device, dtype)
        assert not any(type(module) in (nn.Linear, nn.Embedding) for module in model.modules())
        tolerance = 1e-4 if dtype == torch.float32 else 30 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(logits(model, ids), expected, atol=tolerance, rtol=0)
    finally:
        hf.disable()


def test_nothing_is_downloaded(enabled, monkeypatch):
    """Neither the kernel for the products, nor those for attention and other layers."""
    from transformers.integrations import hub_kernels
    from transformers.integrations.gguf import kernels

    asked = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **kwargs: asked.append("kernel"))
    monkeypatch.setattr(kernels, "get_ggml_layer_mapping", lambda: asked.append("layers"))
    monkeypatch.setattr(kernels, "is_kernels_available", lambda: asked.append("layers"))
    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", lambda *_: asked.append("attention"))
    load(DATA / "tiny-qwen35-UDmix.gguf")
    assert asked == []


def transformers_state():
    from transformers.integrations.gguf import dequant, kernels, utils
    from transformers.quantizers import auto

    tables = (dequant.GGML_BLOCK, dequant.GGML_NAME, auto.AUTO_QUANTIZER_MAPPING)
    return [dict(vars(kernels)), dict(vars(utils)), *map(dict, tables)]


def test_disable_undoes_it():
    hf.disable()
    before = transformers_state()
    for _ in range(2):
        hf.enable()
    assert transformers_state() != before
    hf.disable()
    assert transformers_state() == before
    hf.disable()
    assert transformers_state() == before
    model = load(DATA / "tiny-qwen35-UDmix.gguf")  # now it is transformers', which dequantizes on the CPU
    assert isinstance(model.lm_head, nn.Linear)


@pytest.mark.parametrize("version", ["5.23.0", "5.25.0", "6.0.0.dev0"])
def test_unknown_version_of_transformers_is_named(monkeypatch, version):
    before = transformers_state()
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(NotImplementedError, match=rf"transformers 5\.24, but {version} is installed; .*from_gguf"):
        hf.enable()
    assert transformers_state() == before


def test_experts_that_cannot_stay_packed_together_are_named(enabled, tmp_path):
    """Gate packed, up in float32: from_gguf loads such a file."""
    from test_models import edited

    name = "blk.1.ffn_up_exps.weight"
    path = edited(DATA / "tiny-qwen35moe-UDmix.gguf", tmp_path / "odd.gguf", dequantize={name})
    with pytest.raises(NotImplementedError, match=r"layers\.1\.mlp\.experts: .* Q4_K, float, Q5_K, which .*from_gguf"):
        load(path)
    ids, expected = LOGITS["ids"].tolist(), torch.from_numpy(LOGITS["tiny-qwen35moe-UDmix.dequantized"])
    model, _ = hf.from_gguf(path, progress=False)
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=0)
