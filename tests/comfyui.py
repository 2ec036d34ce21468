"""A minimal stand-in for the parts of ComfyUI's API that examples/comfyui uses.

Written anew, small enough to read; it shows nothing of how ComfyUI manages memory.
"""

import enum
import types
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class manual_cast:
    """comfy.ops: layers whose weights are cast to the input at each call."""

    class Linear(nn.Linear):
        comfy_cast_weights = True

        def forward(self, x):
            return F.linear(x, self.weight.to(x), None if self.bias is None else self.bias.to(x))

    class Embedding(nn.Embedding):
        comfy_cast_weights = True

        def forward(self, indices, out_dtype=None):
            return F.embedding(indices, self.weight).to(out_dtype or self.weight.dtype)


class ModelPatcher:
    """comfy.model_patcher: patches are kept by key, and applied to parameters when the model is loaded."""

    def __init__(self, model, load_device="cpu", offload_device="cpu"):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.patches, self.backup = {}, {}

    def clone(self):
        clone = type(self)(self.model, self.load_device, self.offload_device)
        clone.patches, clone.backup = {key: list(value) for key, value in self.patches.items()}, self.backup
        return clone

    def add_patches(self, patches, strength=1.0):
        keys = [key for key in patches if key in self.model.state_dict()]
        for key in keys:
            self.patches.setdefault(key, []).append((strength, patches[key], 1.0, None, None))
        return keys

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
        if key in self.patches:
            name, _, leaf = key.rpartition(".")
            module = self.model.get_submodule(name)
            self.backup[key] = getattr(module, leaf)
            weight = calculate_weight(self.patches[key], self.backup[key].detach().float().clone(), key)
            setattr(module, leaf, nn.Parameter(weight, requires_grad=False))

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        for name, module in list(self.model.named_modules()):
            if hasattr(module, "comfy_cast_weights"):
                module.weight_function, module.bias_function = [], []
            for leaf, _ in list(module.named_parameters(recurse=False)):
                self.patch_weight_to_device(f"{name}.{leaf}", device_to)
            if full_load:
                module.to(device_to)

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        if unpatch_weights:
            for key, value in self.backup.items():
                name, _, leaf = key.rpartition(".")
                setattr(self.model.get_submodule(name), leaf, value)
            self.backup.clear()
        if device_to is not None:
            self.model.to(device_to)


class DynamicModelPatcher(ModelPatcher):
    pass


def calculate_weight(patches, weight, key):
    for strength, (up, down), *_ in patches:
        weight = weight + strength * (up.to(weight) @ down.to(weight))
    return weight


class Diffusion(nn.Module):
    """A "diffusion model": its sizes are read off the state dict, as ComfyUI does."""

    def __init__(self, state, operations):
        super().__init__()
        (hidden, columns), (rows, _) = state["img_in.weight"].shape, state["final.weight"].shape
        self.img_in = operations.Linear(columns, hidden, dtype=torch.float16)
        self.blocks = nn.ModuleList([operations.Linear(hidden, hidden, dtype=torch.float16)])
        self.final = operations.Linear(hidden, rows, bias=False, dtype=torch.float16)

    def forward(self, x):
        return self.final(F.silu(self.blocks[0](F.silu(self.img_in(x)))))


class TextEncoder(nn.Module):
    def __init__(self, state, operations):
        super().__init__()
        self.shared = operations.Embedding(*state["shared.weight"].shape, dtype=torch.float16)
        q = state["encoder.block.0.layer.0.SelfAttention.q.weight"]
        attention = nn.ModuleDict({"q": operations.Linear(*reversed(q.shape), bias=False, dtype=torch.float16)})
        layer = nn.ModuleList([nn.ModuleDict({"SelfAttention": attention})])
        block = nn.ModuleList([nn.ModuleDict({"layer": layer})])
        self.encoder = nn.ModuleDict({"block": block})

    def forward(self, indices):
        x = self.shared(indices, out_dtype=torch.float32)
        return self.encoder["block"][0]["layer"][0]["SelfAttention"]["q"](x)


def _build(model_class, state, model_options, patcher_class):
    model = model_class(state, model_options["custom_operations"])
    missing, _ = model.load_state_dict(dict(state), strict=False)
    assert not missing
    return patcher_class(model)


def load_diffusion_model_state_dict(sd, model_options=None, metadata=None, disable_dynamic=False):
    if "img_in.weight" not in sd:
        return None
    return _build(Diffusion, sd, model_options, ModelPatcher if disable_dynamic else DynamicModelPatcher)


class CLIPType(enum.Enum):
    STABLE_DIFFUSION, FLUX = 1, 2


def load_text_encoder_state_dicts(state_dicts=(), embedding_directory=None, clip_type=None, model_options=None):
    patcher = _build(TextEncoder, state_dicts[-1], model_options, ModelPatcher)
    return types.SimpleNamespace(patcher=patcher, clip_type=clip_type, state_dicts=state_dicts)


def modules(folder):
    """name -> module, to be put into sys.modules; models are looked for in `folder`."""

    def made(name, **content):
        module = types.ModuleType(name)
        vars(module).update(content)
        return module

    def get_filename_list(kind):
        folders, extensions = folder_names_and_paths[kind]
        return [path.name for base in folders for path in sorted(Path(base).iterdir()) if path.suffix in extensions]

    def loader(types_):
        return type("Loader", (), {"INPUT_TYPES": classmethod(lambda cls: {"required": {"type": (types_,)}})})

    folder_names_and_paths = {
        kind: ([str(folder / kind)], {".safetensors"}) for kind in ("diffusion_models", "text_encoders", "embeddings")
    }
    for kind in folder_names_and_paths:
        (folder / kind).mkdir()
    parts = {
        "comfy.ops": made("comfy.ops", manual_cast=manual_cast),
        "comfy.lora": made("comfy.lora", calculate_weight=calculate_weight),
        "comfy.model_patcher": made("comfy.model_patcher", ModelPatcher=ModelPatcher),
        "comfy.model_management": made("comfy.model_management", text_encoder_offload_device=lambda: "cpu"),
        "comfy.utils": made("comfy.utils", load_torch_file=lambda path, safe_load: {"from": path}),
        "comfy.sd": made(
            "comfy.sd",
            CLIPType=CLIPType,
            load_diffusion_model_state_dict=load_diffusion_model_state_dict,
            load_text_encoder_state_dicts=load_text_encoder_state_dicts,
        ),
    }
    comfy = made("comfy", __path__=[], **{name.removeprefix("comfy."): module for name, module in parts.items()})
    return parts | {
        "comfy": comfy,
        "folder_paths": made(
            "folder_paths",
            folder_names_and_paths=folder_names_and_paths,
            get_filename_list=get_filename_list,
            get_folder_paths=lambda kind: folder_names_and_paths[kind][0],
            get_full_path=lambda kind, name: str(Path(folder_names_and_paths[kind][0][0]) / name),
        ),
        "nodes": made(
            "nodes", CLIPLoader=loader(["stable_diffusion", "flux"]), DualCLIPLoader=loader(["sdxl", "flux"])
        ),
    }
