"""The plans of csrc/mps as libraries for Python."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def compile_plan(source: str, folder: Path) -> ctypes.CDLL:
    """A library of C++ that includes plans; `folder` may hold generated headers."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler, "a C++ compiler has built the extension; now there is none"
    path, out = folder / "plan.cpp", folder / "plan.so"
    path.write_text(source)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'csrc/mps'}", f"-I{folder}"]
    subprocess.run([compiler, *flags, path, "-o", out], check=True)
    return ctypes.CDLL(str(out))
