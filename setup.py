"""Compiles torch_qgemv._C against the installed torch. Everything static is in pyproject.toml."""

import os
import runpy
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.resolve()
GENERATED = "build/generated"  # the Metal sources as a C++ header
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

# build_backend comes first: it has the readable error for a missing setuptools.
# isort: off
from build_backend import MACOS, SETUPTOOLS, compiler_problems, stop, stop_on, torch_requirement  # noqa: E402
from setuptools import Extension, setup  # noqa: E402


def find_all(*patterns):
    """Paths relative to this folder, as setuptools wants them, in an order that never changes."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def make_extension(torch_version):
    from torch.utils.cpp_extension import include_paths, library_paths

    (torch_lib,) = library_paths()
    sources = find_all("csrc/*.cpp", "csrc/cpu/*.cpp")
    # -ffp-contract=off: dequantize has to be bit-exact, so only an explicit fma() may fuse.
    compile_args = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
    if os.environ.get("TORCH_QGEMV_WERROR") == "1":
        compile_args.append("-Werror")
    # System headers, so that warnings are about this project's files only.
    compile_args += [arg for path in include_paths() for arg in ("-isystem", path)]
    # No OpenMP library is linked: the symbols come from the one that libtorch_cpu has loaded, so there is no second.
    # (torch's macOS wheels bring omp.h; their libomp.dylib names itself by a path of the machine that built it.)
    compile_args += ["-Xclang", "-fopenmp"] if MACOS else ["-fopenmp"]
    link_args = []
    if MACOS:
        sources += find_all("csrc/mps/*.mm", "csrc/mps/*.cpp")
        link_args = ["-framework", "Metal", "-framework", "Foundation", "-Wl,-rpath,@loader_path/../torch/lib"]
    return Extension(
        "torch_qgemv._C",
        sources,
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "metal"), str(ROOT / GENERATED)],
        define_macros=[("TORCH_QGEMV_TORCH_VERSION", f'"{torch_version}"')],
        library_dirs=[torch_lib],
        libraries=["c10", "torch", "torch_cpu"],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        depends=find_all("csrc/**/*.h", "metal/**/*.h", "metal/*.metal", "metal/embed.py"),
        language="c++",
    )


def make_build_command():
    from torch.utils.cpp_extension import BuildExtension, is_ninja_available

    class BuildCommand(BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            self.build_temp = "build/objects"  # kept, so that the next build compiles only what changed

        def run(self):
            stop_on(compiler_problems())
            if not is_ninja_available():
                stop("ninja is missing. Run: pip install ninja")
            if MACOS:
                runpy.run_path("metal/embed.py")["write"](Path(GENERATED, "metal_sources.inc"))
            super().run()

    return BuildCommand


def main():
    requirements = ["numpy", "gguf", "tqdm"]
    if "sdist" in sys.argv:  # a source archive needs neither torch nor a compiler
        setup(install_requires=["torch>=2.10,<2.15", *requirements])
        return
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        stop(f'torch is missing. Run: pip install torch==2.13.0 "{SETUPTOOLS}" ninja')
    requirements.insert(0, torch_requirement(torch_version))
    # ninja lies beside this Python, also where the environment isn't activated.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    os.environ.setdefault("MAX_JOBS", "2")
    setup(
        install_requires=requirements,
        ext_modules=[make_extension(torch_version)],
        cmdclass={"build_ext": make_build_command()},
    )


main()
