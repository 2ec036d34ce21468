"""The compilers that the simulator needs, and where it keeps what they make."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
# Read by whoever installs the test requirements; any clang from 17 on works.
ZIGLANG = "ziglang==0.15.1"


class Unavailable(RuntimeError):
    """The simulated device cannot be built here: a compiler is missing, or the platform is not Linux."""


class CompileError(RuntimeError):
    """A compiler rejected a source; carries its messages."""


@dataclass(frozen=True)
class Clang:
    compiler: list[str]
    linker: list[str]


@functools.cache
def clang() -> Clang:
    """clang 17 or later: $METAL_SIM_CLANG, or an installed one, or that of the ziglang wheel."""
    wanted = os.environ.get("METAL_SIM_CLANG")
    for name in [wanted] if wanted else [f"clang-{version}" for version in range(25, 16, -1)]:
        if path := shutil.which(name):
            return Clang([path], [path])
    if wanted:
        raise Unavailable(f"METAL_SIM_CLANG={wanted} is not a program")
    try:
        import ziglang
    except ImportError:
        raise Unavailable(f"no clang 17 or later: install one, or `pip install {ZIGLANG}`") from None
    zig = [str(Path(ziglang.__file__).parent / "zig")]
    own_headers = Path(ziglang.__file__).parent / "lib/include"  # stddef.h and the like
    target = f"--target={os.uname().machine}-linux-gnu"
    return Clang([*zig, "clang", target, f"-idirafter{own_headers}"], [*zig, "ld.lld"])


@functools.cache
def gxx() -> str:
    """g++ builds the simulator itself, and must match what torch was built with: libstdc++."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if not path:
        raise Unavailable(f"no C++ compiler: {name} is not installed")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise Unavailable(f"no Python.h in {sysconfig.get_paths()['include']}: install Python's development files")
    return path


def check_platform():
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"runs on Linux, not on {sys.platform}")
    if os.uname().machine not in ("x86_64", "aarch64"):
        raise Unavailable(f"runs on x86_64 and aarch64, not on {os.uname().machine}")


@functools.cache
def cache_dir() -> Path:
    """$METAL_SIM_CACHE, or metal_sim in the user's cache folder, or a temporary folder where that is read-only."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("METAL_SIM_CACHE") or user / "torch_qgemv_metal_sim")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="metal_sim_"))
    return folder


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def run(command: list[str], **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode:
        raise CompileError(f"{done.stderr.strip() or done.stdout.strip()}\n({Path(command[0]).name} failed)")
    return done.stdout


def make(path: Path, build) -> Path:
    """Calls build(temporary path) unless `path` exists. The file appears at once, whole: others may be building too."""
    if not path.exists():
        temporary = path.with_name(f".{os.getpid()}_{os.urandom(4).hex()}_{path.name}")
        try:
            build(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path
