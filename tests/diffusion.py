"""Tiny random diffusion transformers as GGUF files, for tests."""

import gguf
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from torch import nn

import torch_qgemv

QUANT = gguf.GGMLQuantizationType
TYPES = ("Q4_K", "Q8_0", "Q5_K", "IQ4_XS", "Q6_K")

CONFIGS = {
    FluxTransformer2DModel: {
        **{"in_channels": 32, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128},
        **{"num_attention_heads": 2, "joint_attention_dim": 256, "pooled_projection_dim": 32},
    },
    SD3Transformer2DModel: {
        **{"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 64},
        **{"num_attention_heads": 4, "joint_attention_dim": 64, "caption_projection_dim": 256},
        **{"pooled_projection_dim": 32, "pos_embed_max_size": 8},
    },
    QwenImageTransformer2DModel: {
        **{"in_channels": 32, "out_channels": 8, "num_layers": 1, "attention_head_dim": 128, "num_attention_heads": 2},
        **{"joint_attention_dim": 64},
    },
    WanTransformer3DModel: {
        **{"num_attention_heads": 2, "attention_head_dim": 128, "in_channels": 4, "out_channels": 4, "text_dim": 64},
        **{"freq_dim": 32, "ffn_dim": 512, "num_layers": 1, "rope_max_seq_len": 32},
    },
}
_STEPS_OF_1000 = (SD3Transformer2DModel, WanTransformer3DModel)  # the others multiply the time step themselves


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(model_class, device="cpu", dtype=torch.float32):
    """Keyword arguments of the forward."""
    shapes = {
        FluxTransformer2DModel: {
            "hidden_states": (1, 16, 32),
            "encoder_hidden_states": (1, 5, 256),
            "pooled_projections": (1, 32),
        },
        SD3Transformer2DModel: {
            "hidden_states": (1, 4, 8, 8),
            "encoder_hidden_states": (1, 5, 64),
            "pooled_projections": (1, 32),
        },
        QwenImageTransformer2DModel: {"hidden_states": (1, 16, 32), "encoder_hidden_states": (1, 5, 64)},
        WanTransformer3DModel: {"hidden_states": (1, 4, 2, 8, 8), "encoder_hidden_states": (1, 5, 64)},
    }[model_class]
    values = {name: random(*shape, seed=i).to(device, dtype) for i, (name, shape) in enumerate(shapes.items())}
    values["timestep"] = torch.tensor([500.0 if model_class in _STEPS_OF_1000 else 0.5], device=device)
    if model_class is FluxTransformer2DModel:
        values |= {"img_ids": torch.zeros(16, 3, device=device), "txt_ids": torch.zeros(5, 3, device=device)}
    if model_class is QwenImageTransformer2DModel:
        values["img_shapes"] = [(1, 4, 4)]
    return values | {"return_dict": False}


def forward(model, device="cpu", dtype=torch.float32):
    with torch.no_grad():
        return model(**inputs(type(model), device, dtype))[0].float().cpu()


def dense_model(model_class, seed=0):
    """A model with random weights everywhere, the norms and zero-initialized layers too."""
    model = model_class.from_config(CONFIGS[model_class])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return model.eval()


def packed_tensors(model, types=TYPES):
    """name -> (values, type) of a GGUF file. `model` gets the values that they stand for."""
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    tensors, state = {}, model.state_dict()
    for index, (name, value) in enumerate(state.items()):
        quant_type = types[index % len(types)]
        if name in linears and value.shape[1] % gguf.GGML_QUANT_SIZES[QUANT[quant_type]][0]:
            quant_type = "Q4_0"
        if name in linears:
            packed = torch_qgemv.quantize(value, quant_type)
            value.copy_(torch_qgemv.dequantize(packed, quant_type))
            tensors[name] = packed, QUANT[quant_type]
        else:
            value.copy_(value.half())
            tensors[name] = (value.half(), QUANT.F16) if value.dim() > 1 else (value, QUANT.F32)
    return tensors


def write(path, tensors, original_shapes=None):
    writer = gguf.GGUFWriter(path, "diffusion")
    for name, shape in (original_shapes or {}).items():
        writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
    for name, (values, quant_type) in tensors.items():
        writer.add_tensor(name, values.contiguous().numpy(), raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
