"""torch_qgemv.diffusers: diffusion transformers from GGUF checkpoints, and diffusers' own GGUF layers, packed."""

import json
import os
import re
import subprocess
import sys

import gguf
import pytest
import torch
from torch import nn

import torch_qgemv
from torch_qgemv import GGUFFile, QuantLinear

if not os.environ.get("CI"):
    pytest.importorskip("diffusers")
import accelerate
import diffusion
from diffusers import (
    FluxTransformer2DModel,
    GGUFQuantizationConfig,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from diffusion import CONFIGS, QUANT, dense_model, forward, packed_tensors, write
from peft import LoraConfig

from torch_qgemv.checkpoint import PackedRows
from torch_qgemv.diffusers import convert, from_gguf

MODELS = list(CONFIGS)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """model class -> its GGUF file, and the model with the dequantized weights."""
    folder, made = tmp_path_factory.mktemp("files"), {}
    for model_class in MODELS:
        dense = dense_model(model_class)
        made[model_class] = write(folder / f"{model_class.__name__}.gguf", packed_tensors(dense)), dense
    return made


def load(files, model_class, **options):
    return from_gguf(files[model_class][0], model_class, CONFIGS[model_class], progress=False, **options)


def assert_same(actual, expected, grade=1e-4):
    assert (actual - expected).norm() <= grade * expected.norm()


def packed_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def linear_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("model_class", MODELS)
def test_checkpoint_runs_packed_and_matches_the_dequantized_model(model_class, files, device):
    path, dense = files[model_class]
    model = load(files, model_class, device=device)
    assert packed_names(model) == linear_names(dense) and not linear_names(model)
    sizes = {tensor.name: tensor.data.nbytes for tensor in GGUFFile(path).values()}
    assert all(model.get_submodule(name).stored.nbytes == sizes[f"{name}.weight"] for name in packed_names(model))
    assert not model.training and model.device.type == device
    assert_same(forward(model, device), forward(dense))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_that_of_activations_and_of_what_is_not_packed(dtype, files):
    model = load(files, FluxTransformer2DModel, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {model.get_submodule(name).dtype for name in packed_names(model)} == {dtype}
    assert_same(forward(model, dtype=dtype), forward(files[FluxTransformer2DModel][1]), 0.05)


def test_parameters_that_the_class_keeps_in_float32_stay_so(files):
    model = load(files, WanTransformer3DModel, dtype=torch.bfloat16)
    assert model.scale_shift_table.dtype == model.blocks[0].norm2.weight.dtype == torch.float32
    assert model.patch_embedding.weight.dtype == model.blocks[0].attn1.norm_q.weight.dtype == torch.bfloat16
    assert_same(forward(model, dtype=torch.bfloat16), forward(files[WanTransformer3DModel][1]), 0.05)


def original_wan_name(name):
    """The name in the original code of what diffusers calls `name`."""
    swapped = {"norm2": "norm3", "norm3": "norm2"}
    name = re.sub(r"norm[23]", lambda match: swapped[match[0]], name)
    for new, old in {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        **{"attn2": "cross_attn", "attn1": "self_attn", ".to_out.0.": ".o.", ".to_q.": ".q.", ".to_k.": ".k."},
        **{".to_v.": ".v.", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "proj_out": "head.head"},
    }.items():
        name = name.replace(new, old)
    table = "head.modulation" if name == "scale_shift_table" else "modulation"
    return name.replace("scale_shift_table", table)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_names_and_shapes_of_the_original_code(prefix, tmp_path):
    """With a 5-D convolution that its writer flattened, packed, as no file for llama.cpp's tools has 5 dimensions."""
    dense = dense_model(WanTransformer3DModel)
    tensors = {prefix + original_wan_name(name): value for name, value in packed_tensors(dense).items()}
    convolution = dense.patch_embedding.weight
    flat = torch_qgemv.quantize(convolution.reshape(-1, 64), "Q8_0")
    convolution.data = torch_qgemv.dequantize(flat, "Q8_0").reshape(convolution.shape)
    name = f"{prefix}patch_embedding.weight"
    tensors[name] = flat, QUANT.Q8_0
    path = write(tmp_path / "wan.gguf", tensors, {name: convolution.shape})
    model = from_gguf(path, WanTransformer3DModel, CONFIGS[WanTransformer3DModel], progress=False)
    assert packed_names(model) == linear_names(dense)
    assert_same(forward(model), forward(dense))


def test_rows_stay_packed_where_diffusers_splits_them():
    class Checkpoint(dict):
        """Any name of a Flux checkpoint, with small matrices and biases."""

        def pop(self, name):
            return super().pop(name) if name in self else self.made(name, 6)

        def made(self, name, rows):
            values = torch.randn(rows, 32, generator=torch.Generator().manual_seed(len(name)))
            if not name.endswith("weight"):
                return values[:, 0]
            return PackedRows(torch_qgemv.quantize(values, "Q4_0"), QUANT.Q4_0, (rows, 32), torch.float32)

    checkpoint = Checkpoint()
    for name in ("double_blocks.0.x.weight", "single_blocks.0.linear1.weight", "single_blocks.0.linear1.bias"):
        checkpoint[name] = checkpoint.made(name, 3 * 3072 + 4 * 3072)
    whole = checkpoint["single_blocks.0.linear1.weight"]
    converted = convert_flux_transformer_checkpoint_to_diffusers(checkpoint)
    names = [name for name in converted if name.endswith("weight") and ".norm_" not in name]
    assert len(names) > 20 and all(isinstance(converted[name], PackedRows) for name in names)
    parts = [converted[f"single_transformer_blocks.0.attn.to_{part}.weight"] for part in "qkv"]
    parts.append(converted["single_transformer_blocks.0.proj_mlp.weight"])
    assert torch.equal(torch.cat([part._packed for part in parts]), whole._packed)


def test_configuration_from_a_folder(files, tmp_path):
    files[QwenImageTransformer2DModel][1].save_config(tmp_path / "transformer")
    path, dense = files[QwenImageTransformer2DModel]
    model = from_gguf(path, QwenImageTransformer2DModel, tmp_path, subfolder="transformer", progress=False)
    assert_same(forward(model), forward(dense))
    with pytest.raises(ValueError, match="config is a dict, which takes no subfolder"):
        load(files, QwenImageTransformer2DModel, subfolder="transformer")


def test_checkpoint_of_another_model_is_an_error(files):
    config = CONFIGS[SD3Transformer2DModel] | {"num_layers": 3}
    with pytest.raises(
        ValueError, match=r"neither .* names of SD3Transformer2DModel \(transformer_blocks\.\d\.\S+ and 27 others"
    ):
        from_gguf(files[SD3Transformer2DModel][0], SD3Transformer2DModel, config, progress=False)
    config = CONFIGS[QwenImageTransformer2DModel] | {"num_layers": 2}  # a class whose names were never others
    with pytest.raises(ValueError, match=r"missing from the file: transformer_blocks\.1\."):
        from_gguf(files[QwenImageTransformer2DModel][0], QwenImageTransformer2DModel, config, progress=False)


# ---- Layers that diffusers has made
@pytest.fixture
def gguf_model(files, tmp_path):
    """model class, compute dtype -> a model with diffusers' GGUF layers."""

    def load(model_class, dtype=torch.float32, tensors=None):
        path, dense = files[model_class]
        dense.save_config(tmp_path)
        if tensors:
            path = write(tmp_path / "changed.gguf", tensors)
        return model_class.from_single_file(
            str(path),
            config=str(tmp_path),
            quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
            torch_dtype=dtype,
        )

    return load


@pytest.mark.parametrize("model_class", [FluxTransformer2DModel, QwenImageTransformer2DModel])
def test_converted_layers_hold_the_same_bytes_and_give_the_same(model_class, gguf_model, files, device):
    model = gguf_model(model_class)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GGUFLinear)}
    bytes_of = {name: layer.weight.data_ptr() for name, layer in layers.items()}
    expected = forward(model)
    assert convert(model) is model
    assert packed_names(model) == set(layers)
    assert all(model.get_submodule(name).stored.data_ptr() == bytes_of[name] for name in layers)
    model = model.to(device)
    assert_same(forward(model, device), expected, 0.02)  # diffusers dequantizes in float16
    assert_same(forward(model, device), forward(files[model_class][1]))


def test_converted_model_can_be_cast(gguf_model):
    model = convert(gguf_model(FluxTransformer2DModel, torch.bfloat16))
    assert {module.dtype for module in model.modules() if isinstance(module, QuantLinear)} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model.to(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    forward(model)


def test_what_no_packed_layer_holds_is_dequantized(gguf_model):
    dense = dense_model(QwenImageTransformer2DModel)
    tensors = packed_tensors(dense)
    tensors["img_in.weight"] = dense.img_in.weight.detach().bfloat16().view(torch.int16), QUANT.BF16
    dense.img_in.weight.data = dense.img_in.weight.data.bfloat16().float()
    tensors["txt_norm.weight"] = torch_qgemv.quantize(dense.txt_norm.weight[None], "Q8_0")[0], QUANT.Q8_0
    dense.txt_norm.weight.data = torch_qgemv.dequantize(tensors["txt_norm.weight"][0][None], "Q8_0")[0]
    model = convert(gguf_model(QwenImageTransformer2DModel, tensors=tensors))
    assert type(model.img_in) is nn.Linear and isinstance(model.txt_in, QuantLinear)
    assert not any(isinstance(parameter, GGUFParameter) for parameter in model.parameters())
    assert_same(forward(model), forward(dense))


def test_models_that_cannot_be_converted_stay_as_they_are(gguf_model):
    with pytest.raises(ValueError, match="FluxTransformer2DModel has no GGUF layers; load it with quantization_config"):
        convert(dense_model(FluxTransformer2DModel))
    model = gguf_model(FluxTransformer2DModel)
    model.proj_out.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="proj_out has hooks, offloading or an adapter; convert the model before"):
        convert(model)
    model = gguf_model(FluxTransformer2DModel)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ValueError, match=r"to_q\.base_layer has hooks, offloading or an adapter"):
        convert(model)
    assert not packed_names(model)


# ---- What people do with such models
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "repeated blocks"])
def test_compile(whole, files):
    model = load(files, FluxTransformer2DModel)
    expected = forward(model)
    options = {"backend": "aot_eager", "fullgraph": True}
    if whole:
        model.compile(**options)
    else:
        model.compile_repeated_blocks(**options)
    assert_same(forward(model), expected)


def test_accelerate_offload(files, device):
    model = load(files, QwenImageTransformer2DModel, prepare=False)
    accelerate.cpu_offload(model, execution_device=torch.device(device), offload_buffers=True)
    assert all(model.get_submodule(name).stored.is_meta for name in packed_names(model))
    for _ in range(2):
        assert_same(forward(model, device), forward(files[QwenImageTransformer2DModel][1]))


def test_group_offload(files, device):
    model = load(files, FluxTransformer2DModel, prepare=False)
    model.enable_group_offload(torch.device(device), offload_type="leaf_level")
    for _ in range(2):
        assert_same(forward(model, device), forward(files[FluxTransformer2DModel][1]))
    assert {module.stored.device.type for module in model.modules() if isinstance(module, QuantLinear)} == {"cpu"}


def lora_state(rank=2, seed=3):
    """A LoRA file's state dict for Flux."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"transformer.transformer_blocks.0.attn.{layer}.lora_{half}.weight": torch.randn(shape, generator=generator)
        for layer in ("to_q", "to_k")
        for half, shape in (("A", (rank, 256)), ("B", (256, rank)))
    }


def test_lora_that_diffusers_loads(files, device):
    model, dense = load(files, FluxTransformer2DModel, device=device), dense_model(FluxTransformer2DModel)
    dense.load_state_dict(files[FluxTransformer2DModel][1].state_dict())
    plain = forward(model, device)
    with torch_qgemv.peft.registering():
        model.load_lora_adapter(lora_state(), prefix="transformer", adapter_name="style")
    dense.load_lora_adapter(lora_state(), prefix="transformer", adapter_name="style")
    assert isinstance(model.transformer_blocks[0].attn.to_q, torch_qgemv.peft.LoraQuantLinear)
    adapted = forward(model, device)
    assert (adapted - plain).norm() > 0.01 * plain.norm()
    assert_same(adapted, forward(dense))
    with pytest.raises(ValueError, match=r"QuantLinear.* is not supported"):  # outside it nothing has changed
        load(files, FluxTransformer2DModel).load_lora_adapter(lora_state(), prefix="transformer", adapter_name="second")


def test_lora_that_is_trained(files):
    model = load(files, FluxTransformer2DModel)
    model.add_adapter(torch_qgemv.peft.register(LoraConfig(r=2, target_modules=["to_q", "proj_mlp"])))
    model.train()
    loss = model(**diffusion.inputs(FluxTransformer2DModel))[0].square().mean()
    loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(grads) == 3 and all(grad.abs().max() > 0 for grad in grads)


def test_save_pretrained_is_refused_and_writes_nothing(files, gguf_model, tmp_path):
    for model in (load(files, FluxTransformer2DModel), convert(gguf_model(FluxTransformer2DModel))):
        with pytest.raises(NotImplementedError, match=r"save_pretrained: FluxTransformer2DModel has .* packed modules"):
            model.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_dense_models_are_saved_as_ever(files, tmp_path):
    files[FluxTransformer2DModel][1].save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["num_layers"] == 1


def test_importing_torch_qgemv_needs_no_diffusers():
    code = """
import sys
sys.modules["diffusers"] = None
import torch_qgemv
try:
    torch_qgemv.diffusers
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("torch_qgemv.diffusers needs diffusers and accelerate. Run: pip install")


def test_quantized_types_of_the_files_are_mixed(files):
    """So that the tests above see K types and others in one model."""
    found = {tensor.quant_type for tensor in GGUFFile(files[FluxTransformer2DModel][0]).values()}
    assert found >= {QUANT.Q4_K, QUANT.Q6_K, QUANT.Q8_0, QUANT.IQ4_XS, gguf.GGMLQuantizationType.F32}
