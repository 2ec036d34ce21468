"""The loader nodes: in the place of UNETLoader, CLIPLoader and DualCLIPLoader, for GGUF files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import gguf
import nodes
import torch

from torch_qgemv import GGUFFile
from torch_qgemv.checkpoint import state_dict

from .ops import Operations, PackedPatcher

CATEGORY = "loaders/torch_qgemv"
# ComfyUI's kind of file, the folders it looks into -> the kind of ours: .gguf files in the same folders
for kind, ours in (("diffusion_models", "diffusion_models_packed"), ("text_encoders", "text_encoders_packed")):
    folder_paths.folder_names_and_paths[ours] = (folder_paths.get_folder_paths(kind), {".gguf"})


class UnetLoaderPacked:
    """A diffusion model from a GGUF file in the original code's names."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "load", CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"unet_name": (folder_paths.get_filename_list("diffusion_models_packed"),)}}

    def load(self, unet_name: str) -> tuple[Any]:
        path = folder_paths.get_full_path("diffusion_models_packed", unet_name)
        state = state_dict(GGUFFile(path), torch.float16)
        patcher = _loaded(comfy.sd.load_diffusion_model_state_dict, state, model_options=_options())
        if patcher is None:
            raise RuntimeError(f"ComfyUI doesn't recognize the diffusion model in {path}")
        return (PackedPatcher.of(patcher),)


class CLIPLoaderPacked:
    """A text encoder from a GGUF file: T5, or any whose tensors have the names of its transformers class."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("CLIP",), "load", CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"clip_name": (_text_encoders(),), "type": _types(nodes.CLIPLoader)}}

    def load(self, type: str, **names: str) -> tuple[Any]:
        options = _options() | {"initial_device": comfy.model_management.text_encoder_offload_device()}
        clip = _loaded(
            comfy.sd.load_text_encoder_state_dicts,
            [_text_encoder(name) for name in names.values()],
            clip_type=getattr(comfy.sd.CLIPType, type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
            model_options=options,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
        )
        clip.patcher = PackedPatcher.of(clip.patcher)
        return (clip,)


class DualCLIPLoaderPacked(CLIPLoaderPacked):
    """Two text encoders, GGUF or not, such as CLIP-L and T5 for Flux."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = (_text_encoders(),)
        return {"required": {"clip_name1": names, "clip_name2": names, "type": _types(nodes.DualCLIPLoader)}}


def _options() -> dict[str, Any]:
    return {"custom_operations": Operations}


def _loaded(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a loader of ComfyUI; asks those that can make a dynamic patcher for the plain one."""
    if "disable_dynamic" in inspect.signature(load).parameters:
        kwargs["disable_dynamic"] = True
    return load(*args, **kwargs)


def _types(node: Any) -> Any:
    return node.INPUT_TYPES()["required"]["type"]


def _text_encoders() -> list[str]:
    kinds = ("text_encoders", "text_encoders_packed")
    return sorted({name for kind in kinds for name in folder_paths.get_filename_list(kind)})


def _text_encoder(name: str) -> dict[str, torch.Tensor]:
    if not name.endswith(".gguf"):
        return comfy.utils.load_torch_file(folder_paths.get_full_path("text_encoders", name), safe_load=True)
    file = GGUFFile(folder_paths.get_full_path("text_encoders_packed", name))
    names = _t5_names(file) if "enc.output_norm.weight" in file else {}
    if not names and any(tensor.startswith("blk.") for tensor in file):
        architecture = file.metadata.get("general.architecture")
        raise NotImplementedError(f"{file.path}: text encoders of the architecture {architecture!r} are not supported")
    return {names.get(tensor, tensor): value for tensor, value in state_dict(file, torch.float16).items()}


def _t5_names(file: GGUFFile) -> dict[str, str]:
    """llama.cpp's names of a T5 encoder's tensors -> those of transformers and ComfyUI."""
    layers = 1 + max(int(name.split(".")[2]) for name in file if name.startswith("enc.blk."))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, layers).mapping
    other = ".wi" if "enc.blk.0.ffn_gate.weight" in file else ".wi_1"  # gated, or not
    return {
        f"{ours}.weight": f"{theirs}.weight"
        for theirs, (_, ours) in table.items()
        if theirs.startswith(("encoder.block.", "encoder.final", "shared")) and not theirs.endswith(other)
    }


NODE_CLASS_MAPPINGS = {
    "UnetLoaderPacked": UnetLoaderPacked,
    "CLIPLoaderPacked": CLIPLoaderPacked,
    "DualCLIPLoaderPacked": DualCLIPLoaderPacked,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "UnetLoaderPacked": "Load Diffusion Model (GGUF, packed)",
    "CLIPLoaderPacked": "Load CLIP (GGUF, packed)",
    "DualCLIPLoaderPacked": "DualCLIPLoader (GGUF, packed)",
}
