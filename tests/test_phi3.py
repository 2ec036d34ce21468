"""hf.from_gguf for phi3, whose layers hold q, k, v and gate, up in one tensor each."""

import gguf
import numpy as np
import pytest
import torch

import torch_qgemv
from torch_qgemv import QuantLinear

transformers = pytest.importorskip("transformers")
from test_models import finish  # noqa: E402

from torch_qgemv.hf import from_gguf  # noqa: E402

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]}
LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "original_max_position_embeddings": 8, **FACTORS}
ROPES = {"plain": {"rope_type": "default"}, "long": LONG}


def make_model(rope):
    config = transformers.Phi3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=8 if "long_factor" in rope else 64,
        rope_parameters=rope | {"rope_theta": 1e4},
        sliding_window=6 if "long_factor" not in rope else None,
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(config).eval()


def gguf_name(name):
    layer = name.removeprefix("model.layers.").partition(".") if name.startswith("model.layers.") else None
    inner = (layer[2] if layer else name).removesuffix(".weight")
    return f"{f'blk.{layer[0]}.' if layer else ''}{NAMES[inner]}.weight"


def write(path, model, left_out=()):
    """The model packed in Q8_0 and Q4_0, in the names of llama.cpp's converter. The model takes over the values."""
    config, writer = model.config, gguf.GGUFWriter(path, "phi3")
    numbers = {
        "context_length": config.max_position_embeddings,
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": int(16 * config.rope_parameters.get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": config.sliding_window or 0,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"phi3.{key}", value)
    writer.add_float32("phi3.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("phi3.rope.freq_base", 1e4)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", [f"<{index}>" for index in range(config.vocab_size)])
    for key in FACTORS:
        if key in config.rope_parameters and key not in left_out:
            factors = np.array(config.rope_parameters[key], np.float32)
            writer.add_tensor(f"rope_factors_{key.removesuffix('_factor')}.weight", factors)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            writer.add_tensor(gguf_name(name), parameter.detach().numpy())
            continue
        quant_type = gguf.GGMLQuantizationType.Q4_0 if "mlp" in name else gguf.GGMLQuantizationType.Q8_0
        packed = torch_qgemv.quantize(parameter, quant_type)
        parameter.data = torch_qgemv.dequantize(packed, quant_type)
        writer.add_tensor(gguf_name(name), packed.numpy(), raw_dtype=quant_type)
    return finish(writer, path)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_logits_equal_dequantized(tmp_path, rope, device):
    """Within the original context and beyond it, where the long factors hold, and with a window."""
    dense = make_model(rope)
    model, _ = from_gguf(write(tmp_path / "phi3.gguf", dense), device, progress=False)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, QuantLinear)
    assert model.config.sliding_window == dense.config.sliding_window
    for count in (5, 12):
        ids = torch.arange(3, 3 + count)[None]
        with torch.no_grad():
            torch.testing.assert_close(model(ids.to(device)).logits.cpu(), dense(ids).logits, atol=1e-4, rtol=0)


def test_one_kind_of_rope_factors_alone_is_refused(tmp_path):
    path = write(tmp_path / "phi3.gguf", make_model(LONG), left_out={"short_factor"})
    with pytest.raises(ValueError, match=r"the file has no tensor 'rope_factors_short\.weight'"):
        from_gguf(path, progress=False)
