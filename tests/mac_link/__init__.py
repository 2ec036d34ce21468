"""Compiles and links the extension for macOS on arm64, from any Linux machine and without Apple's SDK.

    import mac_link
    torch = mac_link.torch_wheel("2.13.0")                 # the real macOS wheel, unpacked
    objects = mac_link.compile_extension(torch)            # every csrc file that setup.py compiles on a Mac
    mac_link.link(objects, torch, library)                 # undefined symbols are errors

The compiler is the clang of PyPI's `ziglang`, which has Darwin's C and C++ headers; Objective-C classes are declared
by the simulated device's stub headers (../metal_sim/stubs; stubs/ here has what is different on macOS). That these name
real selectors is checked against metal-cpp, Apple's own C++ list of them, as PyPI's `mlx-metal` ships it.
What this can't show: whether Apple's compiler agrees, and anything that happens at run time.
"""

import ctypes
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from metal_sim import toolchain
from metal_sim.build import STUBS

from . import apple, macho

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TARGET = "aarch64-macos.14.0"
TORCH_VERSIONS = ("2.10.0", "2.13.0", "2.14.1")
MLX = "mlx-metal==0.32.4"
# As setup.py has it on macOS. Without sized deallocation: Apple's clang calls `operator delete(void*)` only.
FLAGS = [
    *("-O1", "-g0", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"),
    *("-Xclang", "-fopenmp", "-fblocks", "-fno-sized-deallocation"),
]


@cache
def zig() -> Path:
    """The zig program of the ziglang wheel. Raises toolchain.Unavailable, with one line, where there is none."""
    try:
        import ziglang
    except ImportError:
        raise toolchain.Unavailable(f"no compiler for macOS: `pip install {toolchain.ZIGLANG}`") from None
    return Path(ziglang.__file__).parent / "zig"


def run_zig(*arguments):
    """Runs zig; raises toolchain.CompileError with its messages.

    Its own cache is empty at each run: it doesn't see a new header that comes before another of the same name.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        toolchain.run([str(zig()), *map(str, arguments)], env=environment, cwd=ROOT)


def wheel(requirement: str, wanted: str) -> Path:
    """Folder with the files of a macOS wheel whose names match the pattern `wanted`; downloaded once.

    Raises toolchain.Unavailable where it cannot be downloaded.
    """

    def download(folder: Path):
        with tempfile.TemporaryDirectory(dir=toolchain.cache_dir()) as temporary:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--python-version=3.11", "--dest", temporary, requirement]
            command += [f"--platform=macosx_{version}_arm64" for version in ("11_0", "14_0")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                raise toolchain.Unavailable(f"no macOS wheel of {requirement}: {reason}")
            (path,) = Path(temporary).iterdir()
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if re.match(wanted, name)])

    name = f"{requirement.replace('==', '-')}_{toolchain.digest(wanted)}"
    return toolchain.make(toolchain.cache_dir() / name, download)


def torch_wheel(version: str) -> Path:
    """The folder `torch` of torch's macOS wheel: its headers and libraries."""
    return wheel(f"torch=={version}", r"torch/(include/|lib/.*\.dylib$)") / "torch"


def mlx_wheel() -> Path:
    """The folder `mlx` of MLX's wheel: metal-cpp's headers, and a library that uses Metal."""
    return wheel(MLX, r"mlx/(include/metal_cpp/|lib/.*\.dylib$)") / "mlx"


def extension_sources() -> list[Path]:
    """The files that setup.py compiles on macOS."""
    patterns = ("csrc/*.cpp", "csrc/cpu/*.cpp", "csrc/mps/*.mm", "csrc/mps/*.cpp")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def embedded_header() -> Path:
    """The header with the Metal sources that setup.py has written for csrc/mps."""
    text = runpy.run_path(str(ROOT / "metal/embed.py"))["embedded"]()
    folder = toolchain.cache_dir() / f"embedded_{toolchain.digest(text)}"
    folder.mkdir(exist_ok=True)
    return toolchain.make(folder / "metal_sources.inc", lambda out: out.write_text(text))


def compile_object(source: Path, torch: Path) -> Path:
    """Path of the object file of one C++ or Objective-C++ source; cached by content."""
    includes = [f"-I{path}" for path in (ROOT / "csrc", ROOT / "metal", embedded_header().parent)]
    if source.suffix == ".mm":
        includes += [f"-I{HERE / 'stubs'}", f"-I{STUBS}"]
    system = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    command = ["c++", "-target", TARGET, *FLAGS, '-DTORCH_QGEMV_TORCH_VERSION="test"', *includes]
    command += [part for path in system for part in ("-isystem", path)]
    folder = toolchain.cache_dir()
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        text = Path(temporary) / "preprocessed"
        run_zig(*command, "-E", source, "-o", text)
        # Without the folders, so that a kernel file, which includes nothing of torch, is compiled once for all of them.
        digest = toolchain.digest(toolchain.ZIGLANG, TARGET, *FLAGS, text.read_text())
    return toolchain.make(
        folder / f"mac_{source.stem}_{digest}.o", lambda out: run_zig(*command, "-c", source, "-o", out)
    )


def compile_extension(torch: Path) -> list[Path]:
    """The object files of the whole extension. Raises toolchain.CompileError with the compiler's messages."""
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda source: compile_object(source, torch), extension_sources()))


def link(objects: list[Path], torch: Path, library: Path):
    """Links the objects as setup.py does on macOS, but with every undefined symbol an error (CompileError)."""
    libraries = [torch / "lib" / f"{name}.dylib" for name in ("libtorch_cpu", "libc10", "libomp")]
    known = [*torch.glob("lib/libtorch_*.dylib"), torch / "lib/libc10.dylib", *mlx_wheel().glob("lib/*.dylib")]
    system = zig().parent / "lib/libc/darwin/libSystem.tbd"
    with tempfile.TemporaryDirectory() as folder:
        stubs = apple.write_stubs(known, _python_symbols(objects), Path(folder))
        run_zig(
            *("build-lib", "-dynamic", "-target", TARGET, "-fno-compiler-rt", "-fno-ubsan-rt", "--name", "extension"),
            *(f"-femit-bin={library}", *objects, *libraries, *stubs, system),
        )


def _python_symbols(objects: list[Path]) -> set[str]:
    """Those of the interpreter's functions that the objects call and that this interpreter has."""
    needed = {name for path in objects for name in macho.read(path).needed if name.startswith(("_Py", "__Py"))}
    return {symbol for symbol in needed if hasattr(ctypes.pythonapi, symbol[1:])}


def selectors_of(objects: list[Path]) -> set[str]:
    """The Objective-C selectors that the objects send."""
    return {name for path in objects for name in macho.read(path, ("__objc_methname",)).strings("__objc_methname")}


def known_selectors(torch: Path) -> set[str]:
    """The selectors that metal-cpp declares, and those of Foundation that it lacks but torch's own library sends."""
    known = selectors_of([torch / "lib/libtorch_cpu.dylib"]) | {"new"}  # NSObject's: Darwin's objc/NSObject.h
    for path in mlx_wheel().glob("include/metal_cpp/**/*.hpp"):
        known |= set(re.findall(r'_PRIVATE_DEF_SEL\(\s*\w+,\s*"([^"]+)"', path.read_text(errors="replace")))
    return known
