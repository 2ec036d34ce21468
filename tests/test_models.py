"""load_gguf and hf.from_gguf: whole models against the same transformers class with every weight dequantized."""

import copy
import json
import pickle
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import torch_qgemv
from torch_qgemv import GGUFFile, QuantEmbedding, QuantLinear
from torch_qgemv.experts import QuantExpertLinear
from torch_qgemv.modules import PackedModule
from torch_qgemv.permuted import PermutedQuantLinear

transformers = pytest.importorskip("transformers")
from torch_qgemv.hf import from_gguf  # noqa: E402

DATA = Path(__file__).parent / "data"
MODELS = ("llama", "qwen2", "qwen3", "gemma3", "qwen35", "qwen35moe")
FILES = [f"tiny-{model}-{kind}" for model in MODELS for kind in ("Q4_K_M", "UDmix")] + ["tiny-qwen35moe-gateupmix"]
TIED = [name for name in FILES if "qwen3-" in name or "gemma3" in name]
LOGITS = np.load(DATA / "reference_logits.npz")
TOKENS = json.loads((DATA / "reference_tokens.json").read_text())
PACKED_TYPES = set(torch_qgemv.quant_types())


def path_of(name):
    return DATA / f"{name}.gguf"


def load(name, device, dtype=None):
    return from_gguf(path_of(name), device=device, dtype=dtype, progress=False)


def input_ids(device):
    return torch.from_numpy(LOGITS["ids"])[None].to(device)


def logits(model, device):
    with torch.no_grad():
        return model(input_ids(device)).logits[0].float().cpu()


def quant_modules(model):
    return [module for module in model.modules() if isinstance(module, PackedModule)]


def dequantized(model):
    """A copy of a packed model in which nn.Linear, nn.Embedding and ExpertLinear hold the dequantized weights."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, (PermutedQuantLinear, QuantExpertLinear)):
            is_linear = isinstance(module, QuantLinear)
            model.set_submodule(name, module.to_linear() if is_linear else module.to_expert_linear())
            continue
        if not isinstance(module, PackedModule):
            continue
        weight = torch_qgemv.dequantize(module.packed, module.quant_type).to(module.dtype)
        if isinstance(module, QuantLinear):
            dense = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
            dense.bias = module.bias
        else:
            dense = ScaledEmbedding(*weight.shape, device="meta", scale=getattr(module, "scale", 1.0))
        dense.weight = nn.Parameter(weight, requires_grad=False)
        model.set_submodule(name, dense)
    return model


class ScaledEmbedding(nn.Embedding):
    def __init__(self, *args, scale, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, indices):
        rows = super().forward(indices)
        return rows * torch.tensor(self.scale, dtype=rows.dtype)


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_dequantized(name, device):
    model, _ = load(name, device)
    expected = torch.from_numpy(LOGITS[f"{name}.dequantized"])
    actual = logits(model, device)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FILES)
def test_half_precision_is_as_close_as_dequantized(name, dtype, device):
    """Both run in `dtype`; neither may be further from the float32 reference than rounding explains."""
    model, _ = load(name, device, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(input_ids(device)).logits.dtype == dtype
    expected = torch.from_numpy(LOGITS[f"{name}.dequantized"])
    error, dense_error = (
        torch.linalg.vector_norm(logits(each, device) - expected) / torch.linalg.vector_norm(expected)
        for each in (model, dequantized(model))
    )
    assert error <= 1.5 * dense_error, f"{error=:.2e} {dense_error=:.2e}"
    assert error <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", FILES)
def test_memory_is_that_of_the_file(name, device):
    model, _ = load(name, device)
    tensors = [tensor for tensor in GGUFFile(path_of(name)).values() if tensor.quant_type.name in PACKED_TYPES]
    in_file = sum(tensor.data.nbytes for tensor in tensors)
    storages = {module.stored.untyped_storage().data_ptr(): module.stored.nbytes for module in quant_modules(model)}
    assert sum(storages.values()) == in_file
    unpacked = sum(parameter.nbytes for parameter in model.parameters())
    assert unpacked < 0.05 * in_file


@pytest.mark.parametrize("name", FILES)
def test_model_is_complete_and_ready(name, device):
    model, _ = load(name, device)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {value.device.type for value in state.values()} == {torch.device(device).type}
    assert not model.training
    assert not any(module.packed.requires_grad for module in quant_modules(model))
    dense = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear}
    assert dense <= {"shared_expert_gate"}  # F32 in the file
    assert next(parameter for key, parameter in model.named_parameters() if "norm" in key).requires_grad


@pytest.mark.parametrize("name", FILES)
def test_generate_equals_dequantized(name, device):
    model, tokenizer = load(name, device)
    inputs = tokenizer(["the answer", "then another one"], return_tensors="pt", padding=True).to(device)
    count = 4 if device == "mps" else 24  # the simulated device takes a second for each
    arguments = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1}
    tokens = model.generate(**inputs, **arguments)
    assert tokens.tolist() == dequantized(model).generate(**inputs, **arguments).tolist()
    assert tokens.tolist() == model.generate(**inputs, **arguments, use_cache=False).tolist()


@pytest.mark.parametrize("name", TIED)
def test_tied_output_shares_the_embeddings_bytes(name, device):
    def shares(model):
        return model.lm_head.stored.data_ptr() == model.get_input_embeddings().stored.data_ptr()

    model, _ = load(name, device)
    expected = logits(model, device)
    assert shares(model)
    model.tie_weights()
    assert shares(model.to(torch.float32))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert shares(copied)
        assert copied.lm_head.stored.data_ptr() != model.lm_head.stored.data_ptr()
        assert shares(copied.to("meta").to_empty(device=device))
        copied.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, device), expected)


@pytest.mark.parametrize("model_name", [name for name in MODELS if f"tiny-{name}-Q4_K_M" in TOKENS["ids"]])
def test_tokens_equal_llama_cpp(model_name):
    _, tokenizer = load(f"tiny-{model_name}-Q4_K_M", "cpu")
    for text, ids in zip(TOKENS["texts"], TOKENS["ids"][f"tiny-{model_name}-Q4_K_M"], strict=True):
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def write_gguf(path, tensors, architecture="test"):
    """A GGUF file: name -> float32 array, or (packed rows, type name)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
        else:
            writer.add_tensor(name, value)
    return finish(writer, path)


def finish(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed_rows(seed, rows, columns):
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), "Q8_0"


def unpacked(rows):
    return torch.from_numpy(gguf.quants.dequantize(rows[0], gguf.GGMLQuantizationType[rows[1]]))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 32)
        self.norm = nn.LayerNorm(32)
        self.output = nn.Linear(32, 5)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("scratch", torch.full((3,), 7.0), persistent=False)

    def forward(self, indices):
        return self.output(self.norm(self.embedding(indices)))


SMALL = {
    "emb.weight": packed_rows(0, 6, 32),
    "norm.weight": np.linspace(0, 1, 32, dtype=np.float32),
    "norm.bias": (packed_rows(1, 1, 32)[0][0], "Q8_0"),
    "out.weight": packed_rows(2, 5, 32),
    "out.bias": np.arange(5, dtype=np.float32).astype(np.float16),
    "steps": np.array([1, 2], np.float32),
}
SMALL_NAMES = {
    "emb.weight": "embedding.weight",
    "out.weight": "output.weight",
    "out.bias": "output.bias",
}


@pytest.mark.parametrize("start", ["cpu", "meta"])
@pytest.mark.parametrize("as_function", [False, True])
def test_load_gguf_into_any_module(tmp_path, start, as_function):
    with torch.device(start):
        model = Small().eval()
    names = (lambda name: SMALL_NAMES.get(name, name)) if as_function else SMALL_NAMES
    result = torch_qgemv.load_gguf(model, write_gguf(tmp_path / "small.gguf", SMALL), names, progress=False)
    assert result == ([], [])
    assert isinstance(model.embedding, QuantEmbedding) and isinstance(model.output, QuantLinear)
    assert not model.output.training
    assert model.steps.tolist() == [1.0, 2.0] and model.steps.dtype == torch.float64
    expected = Small()
    expected.embedding.weight.data = unpacked(SMALL["emb.weight"])
    expected.norm.weight.data = torch.from_numpy(SMALL["norm.weight"])
    expected.norm.bias.data = unpacked((SMALL["norm.bias"][0][None], "Q8_0"))[0]
    expected.output.weight.data = unpacked(SMALL["out.weight"])
    expected.output.bias.data = torch.arange(5.0)
    indices = torch.tensor([[5, 0, 3]])
    torch.testing.assert_close(model(indices), expected(indices), atol=1e-5, rtol=0)


def test_strict_error_lists_both_sides_and_changes_nothing(tmp_path):
    tensors = {name: value for name, value in SMALL.items() if name not in ("norm.bias", "steps")}
    tensors["stray.weight"] = np.ones(3, np.float32)
    path = write_gguf(tmp_path / "small.gguf", tensors)
    model = Small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as error:
        torch_qgemv.load_gguf(model, path, SMALL_NAMES, progress=False)
    missing, unexpected = str(error.value).splitlines()[1:]
    assert "norm.bias" in missing and "steps" in missing and "norm.weight" not in missing
    assert "stray.weight" in unexpected and "emb.weight" not in unexpected
    assert type(model.output) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    result = torch_qgemv.load_gguf(model, path, SMALL_NAMES, strict=False, progress=False)
    assert sorted(result.missing) == ["norm.bias", "steps"]
    assert result.unexpected == ["stray.weight"]
    assert isinstance(model.output, QuantLinear)
    left_out = SMALL_NAMES | {"stray.weight": None}
    assert torch_qgemv.load_gguf(Small(), path, left_out, strict=False, progress=False).unexpected == []


def test_from_gguf_drops_nothing(tmp_path):
    """One tensor renamed: the new name is unknown to the model, and the model's parameter is missing."""
    content = path_of("tiny-llama-Q4_K_M").read_bytes()
    path = tmp_path / "renamed.gguf"
    path.write_bytes(content.replace(b"blk.1.ffn_norm.weight", b"blk.1.odd_norm.weight"))
    with pytest.raises(ValueError) as error:
        from_gguf(path)
    missing, unexpected = str(error.value).splitlines()[1:]
    assert "model.layers.1.post_attention_layernorm.weight" in missing
    assert "blk.1.odd_norm.weight" in unexpected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out.weight": packed_rows(0, 4, 32)}, r"'out.weight' for 'output.weight': shape \(4, 32\).*\(5, 32\)"),
        ({"output.weight": packed_rows(0, 5, 32)}, "'out.weight' and 'output.weight' of the file are both for"),
        ({"steps": np.array([1, 2], np.int32)}, "'steps'.*I32 in the file, torch.float64"),
    ],
)
def test_load_gguf_names_what_does_not_fit(tmp_path, change, message):
    model = Small()
    with pytest.raises(ValueError, match=message):
        torch_qgemv.load_gguf(model, write_gguf(tmp_path / "bad.gguf", SMALL | change), SMALL_NAMES, progress=False)
    assert type(model.embedding) is nn.Embedding


def test_load_gguf_refuses_unknown_packed_types(tmp_path):
    model = nn.Sequential(nn.Linear(256, 5, bias=False))
    path = write_gguf(tmp_path / "iq1.gguf", {"0.weight": (np.zeros((5, 50), np.uint8), "IQ1_S")})
    with pytest.raises(NotImplementedError, match=r"'0\.weight'.*IQ1_S"):
        torch_qgemv.load_gguf(model, path, progress=False)


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "make",
    [lambda: DoubledLinear(32, 5, bias=False), lambda: nn.Embedding(5, 32, max_norm=1.0)],
    ids=["linear", "embedding"],
)
def test_modules_that_compute_more_stay_dense(tmp_path, make):
    model = nn.Sequential(make())
    rows = packed_rows(3, 5, 32)
    torch_qgemv.load_gguf(model, write_gguf(tmp_path / "one.gguf", {"0.weight": rows}), progress=False)
    assert isinstance(model[0], (DoubledLinear, nn.Embedding))
    assert torch.equal(model[0].weight, unpacked(rows))


def test_unsupported_architecture_is_named(tmp_path):
    path = write_gguf(tmp_path / "mamba.gguf", {}, architecture="mamba")
    with pytest.raises(NotImplementedError, match=r"'mamba'.*llama, qwen2, qwen3, gemma3, phi3, qwen35, qwen35moe"):
        from_gguf(path)


def test_metadata_reach_model_and_tokenizer(device):
    model, tokenizer = load("tiny-gemma3-UDmix", device)
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, 1, 0)
    assert model.generation_config.eos_token_id == [1, 5]  # <end_of_turn> ends a generation too
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert (config.sliding_window, config.head_dim, config.query_pre_attn_scalar) == (4, 64, 64)
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert tokenizer.model_max_length == config.max_position_embeddings == 512


def edited(source, target, tensors=None, metadata=None, dequantize=(), without=()):
    """A copy of a GGUF file with more tensors, and with metadata, key -> (value, type), added or replaced.

    dequantize: names of tensors that become F32; without: names of tensors that are left out.
    """
    reader, metadata = gguf.GGUFReader(source), metadata or {}
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", *metadata):
            item_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item_type)
    for key, (value, value_type) in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[value_type])
    for tensor in reader.tensors:
        if tensor.name in dequantize:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        elif tensor.name not in without:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    return finish(writer, target)


def test_rope_factors_divide_the_frequencies(tmp_path, device):
    """Llama 3 files scale the rotary frequencies by a tensor."""
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    path = edited(path_of("tiny-llama-Q4_K_M"), tmp_path / "llama3.gguf", {"rope_freqs.weight": factors})
    model, _ = from_gguf(path, device=device, progress=False)
    plain, _ = load("tiny-llama-Q4_K_M", device)
    rotary, expected = model.model.rotary_emb, plain.model.rotary_emb.inv_freq.cpu() / torch.from_numpy(factors)
    assert torch.equal(rotary.inv_freq.cpu(), expected)
    assert torch.equal(rotary.original_inv_freq.cpu(), expected)


def test_window_of_a_llama_file_makes_it_mistral(tmp_path):
    window = {"llama.attention.sliding_window": (3, "UINT32")}
    path = edited(path_of("tiny-llama-Q4_K_M"), tmp_path / "mistral.gguf", metadata=window)
    model, _ = from_gguf(path, progress=False)
    assert type(model) is transformers.MistralForCausalLM and model.config.sliding_window == 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", (8, "UINT32"), r"llama\.expert_count is 8"),
        ("llama.rope.dimension_count", (32, "UINT32"), r"llama\.rope\.dimension_count is 32"),
        ("tokenizer.ggml.pre", ("unheard-of", "STRING"), r"tokenizer\.ggml\.pre is 'unheard-of'"),
        ("tokenizer.ggml.model", ("t5", "STRING"), r"tokenizer\.ggml\.model is 't5'"),
    ],
)
def test_unsupported_options_are_named(tmp_path, key, value, message):
    path = edited(path_of("tiny-llama-Q4_K_M"), tmp_path / "odd.gguf", metadata={key: value})
    with pytest.raises(NotImplementedError, match=message):
        from_gguf(path, progress=False)


def test_unknown_hyperparameters_are_warned_about(tmp_path):
    path = edited(path_of("tiny-llama-Q4_K_M"), tmp_path / "odd.gguf", metadata={"llama.odd_scale": (2.0, "FLOAT32")})
    with pytest.warns(UserWarning, match=r"llama\.odd_scale"):
        from_gguf(path, progress=False)
