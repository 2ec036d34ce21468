"""Compiles Metal source into a shared object with its kernels, when the launcher asks the device for a library."""

import os
import struct
import tempfile
from pathlib import Path

from . import toolchain
from .toolchain import HERE, CompileError
from .translate import TranslationError, translate

MSL = HERE / "msl"

FLAGS = [
    *("-x", "c++", "-std=c++17", "-O2", "-g1", "-gdwarf-4", "-fPIC", "-fno-exceptions", "-fno-rtti"),
    # Metal's safe math: no contraction, each half or bfloat operation rounded, subnormals kept where a GPU keeps them.
    *("-ffp-contract=off", "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern", "-fno-vectorize", "-fno-slp-vectorize"),
    "-fno-optimize-sibling-calls",  # return addresses name the kernel's lines
    *(
        "-Wall",
        "-Wno-unused",
        "-Wno-unknown-attributes",
        "-Wno-user-defined-literals",
        "-Wno-reserved-user-defined-literal",
        "-Wno-main",
    ),
    # Every load and store calls the simulator (runtime/sanitizer.cpp), which knows what is bound.
    *("-fsanitize=kernel-address", "-mllvm", "-asan-instrumentation-with-call-threshold=0"),
    *("-mllvm", "-asan-globals=0", "-mllvm", "-asan-stack=0", "-mllvm", "-asan-kernel-mem-intrinsic-prefix=1"),
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
    # A folder that does not exist, by which messages tell the kernel's lines from the stand-in library's.
    "-fdebug-compilation-dir=/metal_source",
]
if os.uname().machine == "x86_64":
    FLAGS += ["-mf16c", "-mfma"]  # half <-> float and fma in hardware; otherwise calls into libgcc and libm
# half to float by a call of msl/entry.h's own function, which takes subnormals for 0
FLUSH_FLAGS = ["-mno-f16c", "-DMSL_FLUSH_HALF_SUBNORMALS"]
flush_half_subnormals = False  # metal_sim.flushing_half_subnormals() changes it

# MTLDataType -> (MSL's name of the type, struct's code)
CONSTANT_TYPES = {
    3: ("float", "f"),
    16: ("half", "e"),
    29: ("int", "i"),
    33: ("uint", "I"),
    37: ("short", "h"),
    41: ("ushort", "H"),
    45: ("char", "b"),
    49: ("uchar", "B"),
    53: ("bool", "?"),
    81: ("long", "q"),
    82: ("ulong", "Q"),
}


def compile_metal(
    source: str,
    macros: dict[str, str] | None = None,
    language_version: int = 310,
    constants: dict[int | str, tuple[int, bytes]] | None = None,
) -> str:
    """Path of the shared object with this source's kernels.

    macros: MTLCompileOptions.preprocessorMacros. constants: index or name -> (MTLDataType, bytes), or None where the
    library is not specialised. Raises CompileError with clang's messages.
    """
    clang = toolchain.clang()
    made_by = [*sorted(MSL.glob("*.h")), HERE / "runtime/kernel_abi.h", HERE / "translate.py", Path(__file__)]
    asked = repr((source, sorted((macros or {}).items()), language_version, constants, flush_half_subnormals))
    digest = toolchain.digest(asked, *clang.compiler, *(p.read_text() for p in made_by))
    library = toolchain.cache_dir() / f"kernels_{digest}.so"
    return str(
        toolchain.make(library, lambda out: _build(clang, source, macros or {}, language_version, constants, out))
    )


def _build(clang: toolchain.Clang, source: str, macros, language_version, constants, out: Path):
    if not source.isascii():
        raise CompileError("the Metal source has characters outside ASCII")
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    preprocessed = toolchain.run(
        [*clang.compiler, "-E", "-x", "c++", "-std=c++17", "-nostdinc", f"-D__METAL_VERSION__={language_version}",
         "-D__METAL_MACOS__=1", *defines, f"-I{MSL / 'preprocess'}", "-"],
        input=source,
    )  # fmt: skip
    try:
        text = translate(preprocessed, None if constants is None else _literals(constants))
    except TranslationError as error:
        raise CompileError(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="metal_sim_") as folder:
        compiled = str(Path(folder) / "kernels.o")
        flags = [*FLAGS, *(FLUSH_FLAGS if flush_half_subnormals else [])]
        toolchain.run(
            [*clang.compiler, *flags, "-nostdinc", f"-I{MSL}", "-include", "metal_stdlib.h", "-include", "entry.h",
             "-c", "-", "-o", compiled],
            input=text,
        )  # fmt: skip
        toolchain.run([*clang.linker, "-shared", compiled, "-o", str(out)])


def _literals(constants: dict[int | str, tuple[int, bytes]]) -> dict[int | str, tuple[str, str]]:
    literals = {}
    for key, (data_type, value) in constants.items():
        if data_type not in CONSTANT_TYPES:
            raise CompileError(f"function constant {key}: MTLDataType {data_type} is not simulated")
        name, code = CONSTANT_TYPES[data_type]
        number = struct.unpack(code, value[: struct.calcsize(code)])[0]
        literals[key] = name, f"{name}({str(number).lower()})"
    return literals
