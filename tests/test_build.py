"""The build: which torch it accepts, what it says when something is missing, and what it leaves behind."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = importlib.metadata.version("torch")


@pytest.fixture
def backend():
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command, cwd=ROOT, **variables):
    """Runs a command with some environment variables changed; its output and errors are one text."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def assert_stops(result, *texts):
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stdout
    for text in ("torch_qgemv: ", *texts):
        assert text in result.stdout


# Which torch


@pytest.mark.parametrize(
    "version, requirement",
    [
        ("2.10.0", "torch>=2.10,<2.12"),
        ("2.11.1+cu128", "torch>=2.10,<2.12"),
        ("2.12.0", "torch>=2.12,<2.15"),
        ("2.13.0+cpu", "torch>=2.12,<2.15"),
        ("2.14.1", "torch>=2.12,<2.15"),
    ],
)
def test_a_torch_pins_its_group(backend, version, requirement):
    assert backend.torch_requirement(version) == requirement


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1", "2.15.0", "2.15.0.dev20260701+cpu", "3.10.0"])
def test_another_torch_stops_the_build(backend, version):
    with pytest.raises(SystemExit, match=rf"torch {re.escape(version)} is not supported.*pip install torch=="):
        backend.torch_requirement(version)


def test_an_isolated_build_asks_for_the_installed_torch(backend):
    assert backend.caller_torch() == TORCH
    expected = [f"torch=={TORCH.split('+')[0]}"]
    assert backend.get_requires_for_build_wheel() == expected
    assert backend.get_requires_for_build_editable() == expected
    assert backend.get_requires_for_build_sdist() == []


def test_an_isolated_build_without_torch_says_what_to_run(backend, monkeypatch):
    monkeypatch.setattr(backend, "caller_torch", lambda: None)
    with pytest.raises(SystemExit, match=r"(?s)pip install torch==.*pip install --no-build-isolation \."):
        backend.get_requires_for_build_wheel()


def test_the_installed_package_requires_the_group_it_was_built_against(backend):
    built = re.sub(r"\+.*", "", TORCH)
    (requirement,) = [r for r in importlib.metadata.requires("torch_qgemv") if re.match(r"torch\b", r)]
    assert sorted(re.findall(r"[<>=]+[\d.]+", requirement)) == sorted(
        re.findall(r"[<>=]+[\d.]+", backend.torch_requirement(built))
    )


# What is missing


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_no_compiler(compiler):
    assert_stops(run(sys.executable, "build_backend.py", CXX=compiler), f"no working C++ compiler ({compiler})")
    assert_stops(run(sys.executable, "setup.py", "build_ext", CXX=compiler), "no working C++ compiler")


@pytest.mark.skipif(sys.platform == "darwin", reason="clang is the compiler of macOS")
def test_clang_on_linux(backend, monkeypatch, tmp_path):
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho '#define __clang__ 1'\n")
    clang.chmod(0o755)
    monkeypatch.setenv("CXX", str(clang))
    (problem,) = backend.compiler_problems()
    assert "CXX=g++" in problem


def test_no_python_header(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda name: str(tmp_path))
    (problem,) = backend.compiler_problems()
    assert f"no Python.h in {tmp_path}. Run: " in problem


def test_no_venv_module(backend, monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    (problem,) = backend.machine_problems()
    assert "cannot make virtual environments. Run: " in problem


@pytest.mark.parametrize(
    "manager, tool, command",
    [
        ("apt-get", "compiler", "apt-get install g++"),
        ("apt-get", "headers", "apt-get install python3.{minor}-dev"),
        ("apt-get", "venv", "apt-get install python3.{minor}-venv"),
        ("dnf", "compiler", "dnf install gcc-c++"),
        ("dnf", "headers", "dnf install python3.{minor}-devel"),
        ("brew", "compiler", "xcode-select --install"),
        ("brew", "headers", "brew install python@3.{minor}"),
        ("none", "compiler", "your package manager"),
    ],
)
def test_the_command_fits_the_system(backend, monkeypatch, manager, tool, command):
    monkeypatch.setattr(backend, "MACOS", manager == "brew")
    monkeypatch.setattr(backend.shutil, "which", lambda name: name if name == manager else None)
    assert backend.install_command(tool).endswith(command.format(minor=sys.version_info.minor))


def setuptools_only(folder, torch=None):
    """Arguments that run a Python which sees setuptools and, if a version is given, a torch of that version."""
    import setuptools

    site_packages = Path(setuptools.__file__).parents[1]
    for path in (*site_packages.glob("setuptools*"), site_packages / "_distutils_hack"):
        (folder / path.name).symlink_to(path)
    if torch is not None:
        info = folder / f"torch-{torch}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    code = f"import sys, runpy; sys.path.insert(0, {str(folder)!r}); runpy.run_path('setup.py', run_name='__main__')"
    return [sys.executable, "-I", "-S", "-c", code]


def test_no_torch(tmp_path):
    assert_stops(run(*setuptools_only(tmp_path), "build_ext"), "torch is missing. Run: pip install torch==")


def test_a_torch_that_is_too_old(tmp_path):
    assert_stops(run(*setuptools_only(tmp_path, torch="2.9.1"), "build_ext"), "torch 2.9.1 is not supported")


def test_no_setuptools():
    code = "import runpy; runpy.run_path('setup.py', run_name='__main__')"
    assert_stops(run(sys.executable, "-I", "-S", "-c", code), "setuptools is missing. Run: pip install")


def test_an_old_setuptools(tmp_path):
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'\n")
    result = run(sys.executable, "-S", "-c", "import build_backend", PYTHONPATH=tmp_path)
    assert_stops(result, "setuptools 65.5.0 is too old. Run: pip install")


def test_no_ninja():
    code = (
        "import runpy, torch.utils.cpp_extension as c; c.is_ninja_available = lambda: False;"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    assert_stops(run(sys.executable, "-c", code, "build_ext"), "ninja is missing. Run: pip install ninja")


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_names_what_is_missing():
    result = run("make", "check", "PYTHON=no-such-python")
    assert_stops(result, "no Python 3.11 or newer at no-such-python")
    result = run("make", "check", f"PYTHON={sys.executable}", CXX="no-such-compiler")
    assert_stops(result, "no working C++ compiler (no-such-compiler)")


# What is built


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torch_and_the_extension_share_one_openmp_runtime():
    code = "import torch_qgemv; print(torch_qgemv._C.__file__); print(open('/proc/self/maps').read())"
    library, _, maps = run(sys.executable, "-c", code).stdout.partition("\n")
    runtimes = set(re.findall(r"\S*/lib(?:gomp|omp|iomp5)[^/\s]*", maps))
    ours = {runtime for runtime in runtimes if ".libs/" not in runtime}  # private copies of other packages are theirs
    assert len(ours) == 1, runtimes
    assert b"GOMP_parallel" in Path(library).read_bytes(), "compiled without OpenMP: parallel_for would use one thread"


def test_the_style_tools_have_one_version():
    dev = re.search(r"^dev = .*$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group()
    pinned = re.findall(r"[\w-]+==[\d.]+", dev)
    hooks = re.findall(r"[\w-]+==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text())
    assert sorted(set(hooks)) == sorted(pinned) != []


def copy_of_the_project(folder):
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    return shutil.copytree(ROOT, folder, ignore=ignored)


def test_a_source_archive_is_complete(tmp_path):
    """It is built without torch, and holds every source file and every test."""
    project = copy_of_the_project(tmp_path / "project")
    run(*setuptools_only(tmp_path), "-q", "sdist", "--dist-dir", tmp_path / "dist", cwd=project)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    folders = ("csrc", "metal", "tests", "examples", "docs", "torch_qgemv")
    wanted = {str(path.relative_to(project)) for folder in folders for path in (project / folder).rglob("*.*")}
    wanted |= {"Makefile", "build_backend.py", "setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert wanted - names == set()


def python_files(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*.py")}


def hasty_compiler(folder):
    """The compiler, without its optimizations: what is installed here, nobody runs."""
    path = folder / "hasty-c++"
    path.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_pip_install_into_a_fresh_environment(tmp_path, monkeypatch):
    """In isolation; `make test` itself has installed without."""
    monkeypatch.setenv("CXX", str(hasty_compiler(tmp_path)))
    project = copy_of_the_project(tmp_path / "project")
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install"]
    assert_stops(run(*pip, ".", cwd=project), "pip install --no-build-isolation .")
    assert run(*pip, f"torch=={TORCH.split('+')[0]}").returncode == 0
    result = run(*pip, ".", cwd=project)
    assert result.returncode == 0, result.stdout
    code = "import torch, torch_qgemv; print(torch.__version__, torch_qgemv.__path__[0])"
    version, folder = run(python, "-c", code, cwd=tmp_path).stdout.split()
    assert version == TORCH
    assert Path(folder).is_relative_to(tmp_path / "venv")
    assert python_files(folder) == python_files(project / "torch_qgemv")


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF objects")
def test_kernels_of_different_instruction_sets_share_no_function():
    """A function that two kernel files define is linked once: code for a newer processor could run on an older one."""
    objects = sorted((ROOT / "build/objects/csrc/cpu").glob("kernels_*.o"))
    if not objects or not shutil.which("nm"):
        pytest.skip("not built in place, or no nm")
    shared = {}
    for path in objects:
        listed = run("nm", "--defined-only", path)
        for _, kind, name in (line.split() for line in listed.stdout.splitlines()):
            if kind in "WVu":
                shared.setdefault(name, set()).add(path.name)
    assert {name: files for name, files in shared.items() if len(files) > 1} == {}
