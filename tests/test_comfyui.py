"""examples/comfyui: its nodes against a minimal stand-in for ComfyUI's API. Nothing here has run inside ComfyUI."""

import importlib.util
import sys
from pathlib import Path

import comfyui
import gguf
import pytest
import torch
from gguf_files import QUANT, write_file

import torch_qgemv
from torch_qgemv import QuantEmbedding, QuantLinear

FOLDER = Path(__file__).parent.parent / "examples/comfyui"
NODES = {"UnetLoaderPacked", "CLIPLoaderPacked", "DualCLIPLoaderPacked"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def nodes(folder, monkeypatch):
    """NODE_CLASS_MAPPINGS of the folder, imported as ComfyUI imports it: as a package under a name of its own."""
    for name, module in comfyui.modules(folder).items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("custom_nodes_example", FOLDER / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    for name in ("custom_nodes_example", "custom_nodes_example.nodes", "custom_nodes_example.ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "custom_nodes_example", package)
    spec.loader.exec_module(package)
    yield package.NODE_CLASS_MAPPINGS
    for name in ("custom_nodes_example.nodes", "custom_nodes_example.ops"):
        sys.modules.pop(name, None)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def write(path, weights):
    """weights: name -> (values, type). Gives what the file's tensors stand for."""
    tensors, expected = [], {}
    for name, (values, quant_type) in weights.items():
        if quant_type in torch_qgemv.quant_types():
            packed = torch_qgemv.quantize(values, quant_type)
            expected[name] = torch_qgemv.dequantize(packed, quant_type)
            tensors.append((name, packed.numpy(), QUANT[quant_type]))
        else:
            expected[name] = values.half().float() if quant_type == "F16" else values
            tensors.append((name, (values.half() if quant_type == "F16" else values).numpy(), QUANT[quant_type]))
    write_file(path, tensors)
    return expected


@pytest.fixture
def diffusion(nodes, folder):
    """The patcher that the node gives for a small file, and the weights that the file stands for."""
    weights = {
        "img_in.weight": (random(256, 32, seed=1), "F16"),
        "img_in.bias": (random(256, seed=2), "F32"),
        "blocks.0.weight": (random(256, 256, seed=3), "Q4_K"),
        "blocks.0.bias": (random(256, seed=4), "F32"),
        "final.weight": (random(24, 256, seed=5), "Q8_0"),
    }
    expected = write(folder / "diffusion_models/model.gguf", weights)
    (patcher,) = nodes["UnetLoaderPacked"]().load("model.gguf")
    return patcher, expected


def reference(weights, x):
    dense = comfyui.Diffusion(weights, comfyui.manual_cast)
    dense.float().load_state_dict(weights)
    with torch.no_grad():
        return dense(x)


def run(patcher, x):
    with torch.no_grad():
        return patcher.model(x)


def assert_same(actual, expected):
    assert (actual.cpu() - expected).norm() <= 1e-3 * expected.norm()  # biases are half precision, as ComfyUI's are


def test_every_node_has_what_comfyui_reads(nodes, folder):
    (folder / "diffusion_models/model.gguf").touch()
    (folder / "text_encoders/clip.safetensors").touch()
    (folder / "text_encoders/t5.gguf").touch()
    assert set(nodes) == NODES == set(sys.modules["custom_nodes_example"].NODE_DISPLAY_NAME_MAPPINGS)
    for node in nodes.values():
        inputs = node.INPUT_TYPES()["required"]
        assert all(isinstance(values[0], list) for values in inputs.values())
        assert callable(getattr(node, node.FUNCTION)) and node.CATEGORY and len(node.RETURN_TYPES) == 1
    assert nodes["UnetLoaderPacked"].INPUT_TYPES()["required"] == {"unet_name": (["model.gguf"],)}
    files = (["clip.safetensors", "t5.gguf"],)
    assert nodes["CLIPLoaderPacked"].INPUT_TYPES()["required"]["clip_name"] == files
    inputs = nodes["DualCLIPLoaderPacked"].INPUT_TYPES()["required"]
    assert inputs == {"clip_name1": files, "clip_name2": files, "type": (["sdxl", "flux"],)}


@pytest.mark.parametrize("shape", [(1, 32), (2, 5, 32)])
def test_diffusion_model_runs_packed(diffusion, shape):
    patcher, weights = diffusion
    model = patcher.model
    assert isinstance(model.blocks[0], QuantLinear) and isinstance(model.final, QuantLinear)
    assert model.blocks[0].stored.nbytes == 256 * 144 and model.final.quant_type == QUANT.Q8_0
    assert type(model.img_in).__mro__[1].__name__ == "_BecomesPacked" and model.img_in.weight.dtype == torch.float16
    assert set(model.state_dict()) == set(weights)
    x = random(*shape, seed=9)
    assert_same(run(patcher, x), reference(weights, x))


def test_layers_run_on_another_device_than_their_weights(diffusion, device):
    """As ComfyUI asks of layers that didn't fit; and on one device when it has loaded them all."""
    patcher, weights = diffusion
    x = random(3, 32, seed=9)
    for full_load in (False, True):
        patcher.load(device, full_load=full_load)
        assert patcher.model.final.stored.device.type == (device if full_load else "cpu")
        assert_same(run(patcher, x.to(device)), reference(weights, x))
    patcher.unpatch_model("cpu")
    assert patcher.model.final.stored.device.type == "cpu"
    assert_same(run(patcher, x), reference(weights, x))


def test_lora_is_applied_to_packed_and_other_layers_and_taken_back(diffusion):
    patcher, weights = diffusion
    x = random(3, 32, seed=9)
    patches = {
        name: (random(len(weights[name]), 4), random(4, weights[name].shape[1])) for name in weights if "w" in name
    }
    bytes_before = patcher.model.blocks[0].packed.clone()
    patched = patcher.clone()
    assert type(patched) is type(patcher)
    assert set(patched.add_patches(patches, 0.5)) == {"img_in.weight", "blocks.0.weight", "final.weight"}
    patched.load("cpu")
    adapted = {
        name: w + 0.5 * patches[name][0] @ patches[name][1] if name in patches else w for name, w in weights.items()
    }
    assert (reference(adapted, x) - reference(weights, x)).norm() > 0.05 * reference(weights, x).norm()
    assert_same(run(patched, x), reference(adapted, x))
    assert torch.equal(patcher.model.blocks[0].packed, bytes_before)
    patched.unpatch_model("cpu")
    assert_same(run(patcher, x), reference(weights, x))
    patched.load("cpu")
    patcher.load("cpu")  # without the patches, on the same model
    assert_same(patcher.model.final(random(1, 256)), random(1, 256) @ weights["final.weight"].t())


T5 = {
    "token_embd.weight": (random(40, 64, seed=1), "Q5_1"),
    "enc.blk.0.attn_q.weight": (random(48, 64, seed=2), "Q4_0"),
    "enc.blk.0.ffn_gate.weight": (random(48, 64, seed=3), "Q4_0"),
    "enc.blk.0.ffn_up.weight": (random(48, 64, seed=4), "Q4_0"),
    "enc.output_norm.weight": (random(64, seed=5), "F32"),
}


def test_text_encoder_of_llama_cpp_names_runs_packed(nodes, folder):
    weights = write(folder / "text_encoders/t5.gguf", T5)
    (clip,) = nodes["CLIPLoaderPacked"]().load(clip_name="t5.gguf", type="flux")
    assert clip.clip_type is comfyui.CLIPType.FLUX
    block = "encoder.block.0.layer."
    dense = {f"{block}1.DenseReluDense.wi_{i}.weight" for i in (0, 1)}
    assert clip.state_dicts[0].keys() == {
        *{"shared.weight", "encoder.final_layer_norm.weight", f"{block}0.SelfAttention.q.weight"},
        *dense,
    }
    model = clip.patcher.model
    assert isinstance(model.shared, QuantEmbedding)
    for asked, dtype in ((None, torch.float16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert model.shared(torch.tensor([0]), out_dtype=asked).dtype == dtype
    indices = torch.tensor([[3, 1, 39]])
    expected = weights["token_embd.weight"][indices] @ weights["enc.blk.0.attn_q.weight"].t()
    assert_same(run(clip.patcher, indices), expected)
    clip.patcher.add_patches({"shared.weight": (random(40, 2), random(2, 64))})
    clip.patcher.load("cpu")
    patched = weights["token_embd.weight"] + random(40, 2) @ random(2, 64)
    assert_same(run(clip.patcher, indices), patched[indices] @ weights["enc.blk.0.attn_q.weight"].t())


def test_feed_forward_without_a_gate_has_its_own_name(nodes, folder):
    write(folder / "text_encoders/t5.gguf", {name: value for name, value in T5.items() if "gate" not in name})
    (clip,) = nodes["CLIPLoaderPacked"]().load(clip_name="t5.gguf", type="flux")
    assert "encoder.block.0.layer.1.DenseReluDense.wi.weight" in clip.state_dicts[0]


def test_two_text_encoders(nodes, folder):
    write(folder / "text_encoders/t5.gguf", T5)
    names = {"clip_name1": "clip.safetensors", "clip_name2": "t5.gguf"}
    (clip,) = nodes["DualCLIPLoaderPacked"]().load(type="sdxl", **names)
    assert clip.clip_type is comfyui.CLIPType.STABLE_DIFFUSION
    assert clip.state_dicts[0] == {"from": str(folder / "text_encoders/clip.safetensors")}


def test_what_cannot_be_loaded_is_an_error(nodes, folder, monkeypatch):
    write(folder / "diffusion_models/other.gguf", {"x": (random(4, 32), "Q8_0")})
    with pytest.raises(RuntimeError, match=r"doesn't recognize the diffusion model in .*other\.gguf"):
        nodes["UnetLoaderPacked"]().load("other.gguf")
    write(folder / "text_encoders/llama.gguf", {"blk.0.attn_q.weight": (random(4, 32), "Q8_0")})
    with pytest.raises(NotImplementedError, match="text encoders of the architecture 'llama' are not supported"):
        nodes["CLIPLoaderPacked"]().load(clip_name="llama.gguf", type="flux")
    patcher = sys.modules["custom_nodes_example.ops"].PackedPatcher
    with pytest.raises(RuntimeError, match="plain ModelPatcher, got DynamicModelPatcher"):
        patcher.of(comfyui.DynamicModelPatcher(torch.nn.Module()))


def test_weight_of_another_shape_is_an_error(nodes):
    operations = sys.modules["custom_nodes_example.ops"].Operations
    rows = torch_qgemv.checkpoint.PackedRows(
        torch_qgemv.quantize(random(4, 32), "Q8_0"), gguf.GGMLQuantizationType.Q8_0, (4, 32), torch.float16
    )
    with pytest.raises(RuntimeError, match=r"weight: shape \(4, 32\) in the file, \(5, 32\) in the model"):
        operations.Linear(32, 5).load_state_dict({"weight": rows}, strict=False)
