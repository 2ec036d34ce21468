"""Build backend: setuptools, plus the checks and the torch version that a build of torch_qgemv needs.

pip builds in an empty environment, where an unpinned torch resolves to the newest one. A C++ extension only works with
the torch it was compiled against, so this backend asks for exactly the version installed where pip was called from.
`python build_backend.py` checks the machine: it prints the command that installs each missing tool.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

MACOS = sys.platform == "darwin"
SETUPTOOLS = "setuptools>=77"  # the first that reads `license = "MIT"`
TORCH_GROUPS = (((2, 10), (2, 12)), ((2, 12), (2, 15)))  # [first, end): torch releases with one C++ ABI

if MACOS:  # read by setuptools when it is first imported: one architecture, and the system that has Metal 3.1
    os.environ.setdefault("ARCHFLAGS", f"-arch {os.uname().machine}")
    python_target = sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET") or "14.0"
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", max("14.0", python_target, key=lambda v: float(v)))


def stop(message):
    raise SystemExit(f"torch_qgemv: {message}")


def torch_requirement(version):
    """The requirement that holds for every torch with the same C++ ABI as `version` ("2.13.0+cpu")."""
    release = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())
    for (major, first), (_, end) in TORCH_GROUPS:
        if (major, first) <= release < (major, end):
            return f"torch>={major}.{first},<{major}.{end}"
    stop(f"torch {version} is not supported; versions 2.10 to 2.14 are. Run: pip install torch==2.13.0")


def caller_torch():
    """The torch version of the environment that pip was called from, or None.

    Isolated mode (-I) drops the PYTHONPATH with which pip hides that environment.
    """
    code = "from importlib.metadata import version; print(version('torch'))"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else None


def install_command(tool):
    """The command that installs "compiler", "headers" (Python.h) or "venv" on this machine."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sudo = "" if os.geteuid() == 0 else "sudo "
    if MACOS:
        return "xcode-select --install" if tool == "compiler" else f"brew install {python.replace('3', '@3', 1)}"
    if shutil.which("apt-get"):
        package = {"compiler": "g++", "headers": f"{python}-dev", "venv": f"{python}-venv"}[tool]
        return f"{sudo}apt-get install {package}"
    if shutil.which("dnf"):
        package = {"compiler": "gcc-c++", "headers": f"{python}-devel", "venv": python}[tool]
        return f"{sudo}dnf install {package}"
    return f"install the {tool} package of {python if tool != 'compiler' else 'C++'} with your package manager"


def compiler_problems():
    """Yields what keeps the extension from being compiled, each with its remedy."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        macros = subprocess.run([*compiler, "-x", "c++", "-dM", "-E", os.devnull], capture_output=True, text=True)
    except OSError:
        macros = None
    if macros is None or macros.returncode != 0:
        yield f"no working C++ compiler ({compiler[0]}). Run: {install_command('compiler')}"
    elif not MACOS and "__clang__" in macros.stdout:
        yield "clang does not use the OpenMP runtime that torch brings on Linux. Build with GCC: set CXX=g++"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        yield f"no Python.h in {include}. Run: {install_command('headers')}"


def machine_problems():
    """Yields what keeps this Python from making a virtual environment and compiling the extension in it."""
    if not (find_spec("venv") and find_spec("ensurepip")):
        yield f"{sys.executable} cannot make virtual environments. Run: {install_command('venv')}"
    yield from compiler_problems()


def stop_on(problems):
    """Stops with every problem at once, so that they can be mended in one go."""
    problems = list(problems)
    if problems:
        stop("\ntorch_qgemv: ".join(problems))


def check_setuptools():
    command = f'Run: pip install "{SETUPTOOLS}" ninja'
    try:
        from setuptools import __version__
    except ImportError:
        stop(f"setuptools is missing. {command}")
    if int(__version__.split(".")[0]) < int(SETUPTOOLS.split(">=")[1]):
        stop(f"setuptools {__version__} is too old. {command}")


def build_requires(config_settings=None):
    version = caller_torch()
    if version is None:
        stop(
            "it is compiled against the torch that it will run with, and found none. Run these two commands:\n"
            f'    pip install torch==2.13.0 "{SETUPTOOLS}" ninja\n'
            "    pip install --no-build-isolation ."
        )
    torch_requirement(version)
    return [f"torch=={version.split('+')[0]}"]


if __name__ == "__main__":
    stop_on(machine_problems())
else:
    check_setuptools()
    from setuptools.build_meta import *  # noqa: F403  (every hook that a build frontend may call)

    get_requires_for_build_wheel = get_requires_for_build_editable = build_requires

    def get_requires_for_build_sdist(config_settings=None):
        return []
