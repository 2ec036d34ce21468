"""Builds the simulator (runtime/*.cpp) and the launchers that run on it."""

import os
import re
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import toolchain
from .toolchain import HERE

STUBS = HERE / "stubs"
LAUNCHER_FLAGS = [
    *("-x", "objective-c++", "-std=c++20", "-O1", "-g1", "-fPIC", "-fobjc-runtime=gcc", "-fblocks"),
    *("-fconstant-string-class=NSConstantString", "-Wall", "-Werror", "-Wno-objc-root-class"),
]
RUNTIME_FLAGS = ["-std=c++20", "-g1", "-fPIC", "-Wall"]
HOT = ("machine", "memory", "sanitizer")  # called for every access of every kernel thread


def _torch_flags() -> tuple[list[str], list[str]]:
    """(compiler flags, linker flags) for a library that uses torch's C++ side."""
    import torch
    import torch.utils.cpp_extension as ext

    compile_flags = [f"-isystem{path}" for path in ext.include_paths()]
    compile_flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    folder = Path(torch.__file__).parent / "lib"
    return compile_flags, [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10"]


def _environment() -> str:
    import torch

    return f"{torch.__version__} {torch.__file__} {os.uname().machine}"


def _with_own_headers(source: Path, seen: set[Path] | None = None) -> str:
    """The text of a source of runtime/ and of the headers of that folder that it includes."""
    seen = set() if seen is None else seen
    seen.add(source)
    text = source.read_text()
    for name in re.findall(r'^#include "(\w+\.h)"', text, re.M):
        if (header := source.parent / name) not in seen:
            text += _with_own_headers(header, seen)
    return text


def build_runtime() -> Path:
    """Path of the simulator's Python module. About 40 s on two idle cores the first time, then at once."""
    toolchain.check_platform()
    compiler = toolchain.gxx()
    torch_flags, torch_libraries = _torch_flags()
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    flags = [*RUNTIME_FLAGS, f"-I{STUBS}", *torch_flags, f"-isystem{sysconfig.get_paths()['include']}"]
    folder = toolchain.cache_dir()

    def compile_one(source: Path) -> Path:
        command = [compiler, *flags, "-O2" if source.stem in HOT else "-O1", "-c", str(source), "-o"]
        digest = toolchain.digest(*command, _environment(), _with_own_headers(source))
        return toolchain.make(folder / f"{source.stem}_{digest}.o", lambda out: toolchain.run([*command, str(out)]))

    # The longest first, so that two compilers end at about the same time.
    order = sorted(sources, key=lambda p: p.stem not in ("cpu_fallback", "backend", "module"))
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        objects = [str(p) for p in pool.map(compile_one, order)]
    module = folder / f"metal_sim_runtime_{toolchain.digest(*objects)}.so"
    link = [compiler, "-shared", *objects, *torch_libraries, "-ldl", "-o"]
    return toolchain.make(module, lambda out: toolchain.run([*link, str(out)]))


def build_launcher(
    sources: list[Path],
    include_dirs: list[Path],
    embedded: dict[str, str],
    defines: dict[str, str],
    libraries: list[Path],
) -> Path:
    """Path of a shared library with these Objective-C++ (.mm) and C++ (.cpp) sources; see metal_sim.build."""
    toolchain.check_platform()
    clang, folder = toolchain.clang(), toolchain.cache_dir()
    torch_flags, torch_libraries = _torch_flags()
    includes, generated = [f"-I{p}" for p in include_dirs], []
    for name, text in embedded.items():  # their own folders, named by content: builds side by side don't meet
        place = folder / f"embedded_{toolchain.digest(name, text)}"
        place.mkdir(exist_ok=True)
        toolchain.make(place / name, lambda out, text=text: out.write_text(text))
        generated.append(f"-I{place}")
    macros = [f"-D{name}={value}" if value else f"-D{name}" for name, value in defines.items()]
    flags = [*LAUNCHER_FLAGS, f"-I{STUBS}", *includes, *macros, *torch_flags]

    def compile_one(source: Path) -> Path:
        command = [*clang.compiler, *flags, str(source)]
        preprocessed = toolchain.run([*command, *generated, "-E"])  # names the generated headers that it includes
        digest = toolchain.digest(preprocessed, *command, _environment())
        return toolchain.make(
            folder / f"{source.stem}_{digest}.o",
            lambda out: toolchain.run([*command, *generated, "-c", "-o", str(out)]),
        )

    objects = [str(compile_one(Path(source))) for source in sources]
    library = folder / f"launcher_{toolchain.digest(*objects, *map(str, libraries))}.so"
    # Linked by g++, as torch's libraries are; the simulator's symbols are found when it is loaded.
    link = [toolchain.gxx(), "-shared", *objects, *map(str, libraries), *torch_libraries, "-o"]
    return toolchain.make(library, lambda out: toolchain.run([*link, str(out)]))
