"""Metal source as C++ for OpenCL, which clang compiles with MSL's address spaces. Lines keep their numbers."""

import functools
import re
import runpy
from pathlib import Path

from metal_sim import toolchain, translate
from metal_sim.kernels import MSL

HERE = Path(__file__).parent
METAL = HERE.parent.parent / "metal"
EXTENSIONS = "cl_khr_fp16 cl_khr_fp64 __opencl_c_fp64 __opencl_c_generic_address_space"
LANGUAGE = [
    *("-x", "cl", "-cl-std=CLC++2021", "--target=amdgcn-amd-amdhsa", "-nogpulib", "-cl-no-stdinc", "-nostdinc"),
    "-cl-single-precision-constant",  # 1.0 is a float in MSL
    *("-Xclang", f"-cl-ext=-all,{','.join('+' + name for name in EXTENSIONS.split())}"),
]
MARKER = re.compile(r'# (\d+) "([^"]*)"')


@functools.cache
def language() -> list[str]:
    """clang's flags for what to_opencl returns."""
    return [*LANGUAGE, "-include", str(_prelude())]


def _prelude() -> Path:
    """A file with the stand-in library: metal_stdlib.h with its headers in place."""

    def flatten(path: Path) -> str:
        def put(match):
            local = HERE / match[1]
            return flatten(local if local.exists() else MSL / match[1])

        return re.sub(r'^#include "(.*)"$', put, path.read_text().replace("#pragma once", ""), flags=re.M)

    # OpenCL wants an address space for constants of a namespace or class, as MSL does.
    text = re.sub(
        r"(static )?constexpr(?= bool is_| int size| bool value)",
        r"\1constant constexpr",
        flatten(HERE / "metal_stdlib.h"),
    )
    text = text.replace("  constant constexpr int size", "  constexpr int size")  # a local one
    text = f"#pragma once\n#pragma clang system_header\n{text}"
    name = toolchain.cache_dir() / f"msl_check_{toolchain.digest(text)}.h"
    return toolchain.make(name, lambda out: out.write_text(text))


def to_opencl(text: str) -> str:
    """C++ for OpenCL of preprocessed Metal source.

    Its kernels are no templates and take no structs of Metal's: they become functions here, and their threadgroup
    variables, legal in kernels only, references of the same type. Attributes go too.
    """
    edits = []
    for match in translate.KERNEL.finditer(text):
        if match[0].startswith("kernel"):
            edits.append((match.start(), match.start() + len("kernel"), ""))
        body = text.index("{", translate._closing(text, match.end() - 1))
        for variable in translate.THREADGROUP_VARIABLE.finditer(text, body, translate._closing(text, body)):
            kind, name, array = variable["type"], variable["name"], variable["array"] or ""
            reference = f"threadgroup {kind} (&{name}){array} = *(threadgroup {kind} (*){array})0;"
            edits.append((*variable.span(), reference))
    for match in translate.INSTANTIATION.finditer(text):
        edits.append(
            (match.start() + len("template"), match.start("function"), " __typeof__(" + match["function"] + ") ")
        )
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + "\n" * (text[begin:end].count("\n") - new.count("\n")) + text[end:]
    return translate.ATTRIBUTE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def locate(text: str):
    """A function from a line of preprocessed text to "file:line" of the source, by the preprocessor's markers."""
    places, file, number = [""], "kernels", 0
    for line in text.split("\n"):
        if marker := MARKER.match(line):
            number, file = int(marker[1]), marker[2]
            places.append(f"{file}:{number}")
        else:
            places.append(f"{file}:{number}")
            number += 1
    return lambda line: places[line] if 0 < line < len(places) else "?"


def metal_sources() -> dict[str, str]:
    """{"gemv": text of metal/gemv.metal with its headers in place, ...}, as the extension embeds them."""
    flatten = runpy.run_path(str(METAL / "embed.py"))["flatten"]
    return {path.stem: flatten(path) + "\n" for path in sorted(METAL.glob("*.metal"))}


def format_names() -> list[str]:
    """The formats of metal/formats.h: what the launcher gives the macro QGEMV_FORMAT."""
    (names,) = re.findall(r"#define QGEMV_FORMATS\(_\)((?:.*\\\n)*.*)", (METAL / "formats.h").read_text())
    return re.findall(r"_\((\w+)\)", names)
