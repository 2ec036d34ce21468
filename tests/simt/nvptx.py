"""Compiles Metal kernels for an NVIDIA GPU: clang makes PTX of the .metal text, ptxas a cubin of that."""

import re
import shutil
import subprocess
from pathlib import Path

from metal_sim import toolchain, translate
from metal_sim.kernels import MSL

HERE = Path(__file__).parent
# Metal's safe math: nothing reordered; a multiplication and an addition of one expression may become one operation.
FLAGS = [
    *("-x", "c++", "-std=c++17", "-O3", "--target=nvptx64-nvidia-cuda", "-nostdinc", "-S", "-o", "-"),
    *("-ffp-contract=on", "-fno-math-errno", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti"),
    *("-mllvm", "-unroll-threshold=20000", "-mllvm", "-inline-threshold=1000000", "-Xclang", "-target-feature"),
    *(
        "-Xclang",
        "+ptx83",
        "-Wall",
        "-Werror",
        "-Wno-unused",
        "-Wno-unknown-attributes",
        "-Wno-main",
        "-Wno-duplicate-decl-specifier",
    ),
    "-Wno-unknown-pragmas",
    *("-Wno-user-defined-literals", "-Wno-reserved-user-defined-literal", "-Wno-deprecated-literal-operator"),
    *("-I", str(HERE / "msl"), "-I", str(MSL), "-include", "metal_stdlib.h"),
]
REGISTERS = 128  # of a lane of an Apple GPU, 32 bits each


def ptxas() -> str:
    """Raises toolchain.Unavailable, with one line, where it is not installed."""
    if path := shutil.which("ptxas"):
        return path
    raise toolchain.Unavailable("no ptxas: it comes with CUDA, and with PyPI's nvidia-cuda-nvcc-cu12")


def compilers() -> dict[str, str]:
    """Versions of clang and ptxas."""
    clang = toolchain.run([*toolchain.clang().compiler, "--version"]).splitlines()[0]
    return {"clang": clang, "ptxas": toolchain.run([ptxas(), "--version"]).splitlines()[-1]}


def preprocess(source: str, quant_type: str, dtype: str) -> str:
    """The source with the macros that the launcher gives Metal."""
    command = [*toolchain.clang().compiler, "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-D__METAL_VERSION__=310"]
    command += [
        "-D__METAL_MACOS__=1",
        f"-DQGEMV_FORMAT={quant_type}",
        f"-DQGEMV_TYPE={dtype}",
        f"-I{MSL / 'preprocess'}",
    ]
    return toolchain.run([*command, "-"], input=source)


def kernel_names(preprocessed: str) -> set[str]:
    """The kernels of a preprocessed source."""
    templates = {_text(match["name"]) for match in translate.INSTANTIATION.finditer(preprocessed)}
    plain = {
        match[match.lastindex]
        for match in translate.KERNEL.finditer(preprocessed)
        if not translate._is_template(preprocessed, match.start())
    }
    return templates | plain


def has_matrices(preprocessed: str) -> bool:
    """Whether a source multiplies 8x8 matrices of a SIMD-group: emulated here, so that its times would mean nothing."""
    return "simdgroup_matrix" in preprocessed


def compile_ptx(preprocessed: str, kernels: set[str], arch: str) -> str:
    """PTX of these kernels of a preprocessed source. Raises toolchain.CompileError with clang's messages."""
    text = translate.translate(preprocessed, register=lambda *kernel: _entry(*kernel, kernels), shared=_shared)
    return toolchain.run([*toolchain.clang().compiler, *FLAGS, f"-march={arch}", "-"], input=text)


def assemble(ptx: str, arch: str, cubin: Path) -> dict[str, dict[str, int]]:
    """Writes the cubin. Returns {kernel: {"registers", "stack_bytes", "shared_bytes"}}, as ptxas reports them.

    A kernel that would take more registers than a lane of an Apple GPU has is made with those.
    """
    found = _assemble(ptx, arch, cubin)
    if greedy := [kernel for kernel, use in found.items() if use["registers"] > REGISTERS]:
        entry = rf"(\.entry (?:{'|'.join(greedy)})\([^)]*\))"
        found = _assemble(re.sub(entry, rf"\1 .maxnreg {REGISTERS}", ptx), arch, cubin)
    return found


def _assemble(ptx: str, arch: str, cubin: Path) -> dict[str, dict[str, int]]:
    command = [ptxas(), f"-arch={arch}", "-O3", "-v", "-o", str(cubin), "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if done.returncode:
        raise toolchain.CompileError(done.stderr)
    return parse_report(done.stderr)


def parse_report(report: str) -> dict[str, dict[str, int]]:
    found = {}
    for part in report.split("Compiling entry function '")[1:]:
        numbers = {
            "registers": r"Used (\d+) registers",
            "stack_bytes": r"(\d+) bytes stack frame",  # local arrays and spilled registers
            "shared_bytes": r"(\d+) bytes smem",
        }
        matches = {key: re.search(pattern, part) for key, pattern in numbers.items()}
        found[part.split("'")[0]] = {key: int(match[1]) if match else 0 for key, match in matches.items()}
    return found


def _text(literals: str) -> str:
    """The text of neighbouring string literals."""
    return "".join(re.findall(r'"([^"]*)"', literals))


def _entry(function: str, name: str, parameters: list, wanted: set[str]) -> str:
    """A function that an NVIDIA GPU is launched with (msl/entry.h)."""
    name = _text(name)
    if name not in wanted:
        return ""
    if any(kind == "threadgroup" for kind, _, _ in parameters):
        raise translate.TranslationError(f"{name}: threadgroup arguments are not supported here")
    indices = ", ".join(str(index) for _, index, _ in parameters)
    return (
        f' MSL_ENTRY void msl_entry_{name}(MslBuffers buffers, MslBytes bytes) asm("{name}");'
        f" void msl_entry_{name}(MslBuffers buffers, MslBytes bytes) "
        f"{{ MslCall<&{function}>::enter<{indices}>(buffers, bytes); }}"
    )


def _shared(kind: str, name: str, number: int) -> str:
    """A variable in a block's shared memory."""
    own = f"msl_{name}"
    return f"using {own}_t = {kind}; static MSL_SHARED {own}_t {own}; auto& {name} = *({own}_t*)&{own};"
