"""README.md: its Python runs, and its table of types is true."""

import re
import shutil
from pathlib import Path

import gguf
import pytest

import torch_qgemv

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block{index}" for index in range(len(BLOCKS))])
def test_python_runs(code, tmp_path, monkeypatch):
    if "torch_qgemv.hf" in code:
        pytest.importorskip("transformers")
    enables = "hf.enable()" in code
    if enables:
        pytest.importorskip("transformers", minversion="5.24")
        pytest.importorskip("accelerate")
    model = "tiny-qwen35-UDmix" if enables else "tiny-llama-Q4_K_M"
    shutil.copy(ROOT / f"tests/data/{model}.gguf", tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    if "torch_qgemv.diffusers" in code:
        pytest.importorskip("diffusers")
        import diffusion

        flux = diffusion.dense_model(diffusion.FluxTransformer2DModel)
        flux.save_config("black-forest-labs/FLUX.1-dev/transformer")
        diffusion.write(tmp_path / "flux1-dev-Q4_K_S.gguf", diffusion.packed_tensors(flux))
    try:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    finally:
        if enables:
            torch_qgemv.hf.disable()


def test_every_public_way_in_is_shown():
    for name in (
        "hf import from_gguf",
        "diffusers import from_gguf",
        "load_gguf",
        "hf.enable",
        "GGUFFile",
        "QuantLinear",
        "quantize_model",
        "torch_qgemv.linear",
    ):
        assert any(name in block for block in BLOCKS), name


def test_table_of_types():
    rows = re.findall(r"^\| (I?Q\w+) \| (\d+) \| ([\d.]+) \|$", README, re.MULTILINE)
    expected = []
    for name in torch_qgemv.quant_types():
        block_size, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        bits = f"{8 * type_size / block_size:g}"
        expected.append((name, str(block_size), bits))
    assert rows == expected


def test_links_and_linked_sections_exist():
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target.partition("#")[0]).exists(), target
