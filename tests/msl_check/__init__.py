"""Type-checks Metal source, address spaces included, with libclang as C++ for OpenCL: the nearest language it knows.

    import msl_check
    msl_check.check(source, {"QGEMV_FORMAT": "Q4_K"})    # -> ["metal/gemv.h:12: ...", ...], empty where all is right

The simulated device has a single address space and a later C++. This finds what Apple's compiler refuses and the
simulator can't see: pointers without an address space or into the wrong one, methods of a struct that lies in device
memory, double, goto, recursion, mutable globals, and what C++ has only had since C++17 (MSL 3.1 is C++14).
"""

import functools
import re
from collections import defaultdict

from metal_sim import toolchain, translate
from metal_sim.kernels import MSL

from .opencl import language, locate, to_opencl

LIBCLANG = "libclang==18.1.1"  # its messages and attributes are read here
FLAGS = ["-Wno-everything", "-Wpre-c++17-compat", "-ferror-limit=0", "-fno-caret-diagnostics"]
# In the preprocessed text. clang would take them, for the stand-in library needs some.
REFUSED = {
    r"\bdouble\b": "MSL has no double",
    r"(?<![\w.])(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?[lL]\b": "MSL has no long double",
    r"\bgoto\b": "MSL has no goto",
    r"\bvirtual\b": "MSL has no virtual functions",
    r"\bthread_local\b": "MSL has no thread_local",
    r"\b(kernel|\[\[\s*kernel\s*\]\])\s+(?!void\b|decltype\b)\w+\s+\w+\s*\(": "a kernel returns void",
}
NONE, GENERIC = 0, 5  # clang's numbers of address spaces, where none is written in a template and elsewhere


class Unavailable(RuntimeError):
    """libclang is not installed."""


@functools.cache
def libclang():
    """The module clang.cindex of PyPI's libclang. Raises Unavailable, with one line, where it is not installed."""
    try:
        from clang import cindex
    except ImportError:
        raise Unavailable(f"no libclang: `pip install {LIBCLANG}`") from None
    return cindex


def preprocess(source: str, macros: dict[str, str] | None = None) -> str:
    """The source after the preprocessor, which leaves line markers. Raises toolchain.CompileError."""
    command = [*toolchain.clang().compiler, "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-D__METAL_VERSION__=310"]
    command += ["-D__METAL_MACOS__=1", f"-I{MSL / 'preprocess'}"]
    command += [f"-D{name}={value}" for name, value in (macros or {}).items()]
    return toolchain.run([*command, "-"], input=source)


def check(source: str, macros: dict[str, str] | None = None) -> list[str]:
    """What is wrong with a Metal source compiled with these macros: lines "file:line: message".

    Raises Unavailable, or metal_sim.toolchain.Unavailable, where the tools are missing.
    """
    libclang()
    try:
        text = preprocess(source, macros)
    except toolchain.CompileError as error:
        return [str(error)]
    try:
        translate.translate(text)  # its own rules: attributes of parameters, buffer numbers, threadgroup variables
    except translate.TranslationError as error:
        return [str(error)]
    found = [(text.count("\n", 0, match.start()) + 1, why) for pattern, why in REFUSED.items()
             for match in re.finditer(pattern, text)]  # fmt: skip
    opencl = to_opencl(text)
    unit = _parse(opencl)
    found += _walk(unit)
    places = locate(text)
    lines = [f"{places(line)}: {message}" for line, message in sorted(set(found))]
    for d in _parse(_qualify_methods(opencl, unit)).diagnostics:
        if _matters(d):
            lines.append(f"{places(d.location.line) if _is_ours(d) else d.location.file}: {d.spelling}")
    return lines


def as_opencl(source: str, macros: dict[str, str] | None = None) -> str:
    """A right Metal source as C++ for OpenCL, which clang compiles with opencl.language() as its flags."""
    opencl = to_opencl(preprocess(source, macros))
    return _qualify_methods(opencl, _parse(opencl))


_NAME = "kernels.cl"


def _parse(opencl: str):
    cindex = libclang()
    return cindex.Index.create().parse(_NAME, args=[*language(), *FLAGS], unsaved_files=[(_NAME, opencl)])


def _is_ours(at) -> bool:
    """Whether a cursor or a diagnostic is in the kernels' text, not in the stand-in library."""
    return at.location.file is not None and at.location.file.name == _NAME


def _matters(diagnostic) -> bool:
    """Errors, and C++17 in the kernels."""
    newer = _is_ours(diagnostic) and "incompatible with C++" in diagnostic.spelling
    return newer or diagnostic.severity >= libclang().Diagnostic.Error


def _qualify_methods(opencl: str, unit) -> str:
    """With `thread` behind the parameters of each method: in MSL, `this` points there; in OpenCL, anywhere."""
    lines = opencl.split("\n")
    edits = {_end_of_parameters(cursor) for cursor in _cursors(unit) if _has_this(cursor)}
    for line, column in sorted(edits - {None}, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = f"{text[:column]} thread {text[column:]}"
    return "\n".join(lines)


def _has_this(cursor) -> bool:
    """Whether it is a method, or a template of one, that isn't static; not a constructor."""
    kinds, parent = libclang().CursorKind, cursor.semantic_parent
    structs = (
        *(kinds.STRUCT_DECL, kinds.CLASS_DECL),
        *(kinds.CLASS_TEMPLATE, kinds.CLASS_TEMPLATE_PARTIAL_SPECIALIZATION),
    )
    if cursor.kind == kinds.FUNCTION_TEMPLATE and parent.kind in structs:
        constructor = cursor.spelling.split("<")[0] == parent.spelling.split("<")[0]
        return not (constructor or cursor.is_static_method())
    return cursor.kind == kinds.CXX_METHOD and not cursor.is_static_method()


def _end_of_parameters(method) -> tuple[int, int] | None:
    """Line and column behind the bracket that closes a method's parameters."""
    brackets = 2 if method.spelling == "operator()" else 1  # a pair in the name
    depth, named = 0, False
    for token in method.get_tokens():
        named = named or token.location == method.location
        if named:
            depth += (token.spelling == "(") - (token.spelling == ")")
            brackets -= token.spelling == ")" and depth == 0
            if brackets == 0:
                return token.location.line, token.location.column
    return None


def _cursors(unit):
    """Every cursor of the kernels' own text."""

    def below(cursor):
        yield cursor
        for child in cursor.get_children():
            yield from below(child)

    for cursor in unit.cursor.get_children():
        if _is_ours(cursor):
            yield from below(cursor)


def _walk(unit) -> list[tuple[int, str]]:
    """Rules that C++ for OpenCL doesn't have."""
    cindex = libclang()
    kinds, types = cindex.CursorKind, cindex.TypeKind
    pointers = (types.POINTER, types.LVALUEREFERENCE, types.RVALUEREFERENCE)
    functions = (kinds.FUNCTION_DECL, kinds.FUNCTION_TEMPLATE, kinds.CXX_METHOD)
    uses = (kinds.CALL_EXPR, kinds.DECL_REF_EXPR, kinds.MEMBER_REF_EXPR)
    found, calls, names = [], defaultdict(set), {}

    def visit(cursor, function):
        line = cursor.location.line
        if cursor.kind in functions:
            function = cursor.get_usr()
            names[function] = cursor.spelling, line
        elif cursor.kind in (kinds.VAR_DECL, kinds.PARM_DECL, kinds.FIELD_DECL, kinds.CSTYLE_CAST_EXPR):
            kind = cursor.type.kind
            pointee = cursor.type.get_pointee() if kind in pointers else None
            if pointee is not None and pointee.kind == types.FUNCTIONPROTO:
                found.append((line, "MSL has no function pointers"))
            elif pointee is not None and pointee.get_address_space() in (NONE, GENERIC) and not _is_auto(cursor):
                found.append((line, f"{cursor.spelling or 'a cast'}: no address space in '{cursor.type.spelling}'"))
        elif cursor.kind in (kinds.CXX_NEW_EXPR, kinds.CXX_DELETE_EXPR):
            found.append((line, "MSL has no new and delete"))
        if cursor.kind == kinds.CSTYLE_CAST_EXPR and _reinterprets(cursor):
            found.append((line, "a cast of a vector to another type: write T(v), which converts in every compiler"))
        if function and cursor.kind in uses and cursor.referenced and cursor.referenced.kind in functions:
            calls[function].add(cursor.referenced.get_usr())
        for child in cursor.get_children():
            visit(child, function)

    for cursor in unit.cursor.get_children():
        if _is_ours(cursor):
            visit(cursor, None)
    found += [(line, f"recursion: {name}") for usr, (name, line) in names.items() if usr in _reachable(usr, calls)]
    return found


def _reinterprets(cast) -> bool:
    """Whether a C cast is from a vector to one of other elements: clang takes the bits as they are, Metal converts."""
    vector = libclang().TypeKind.EXTVECTOR
    to, value = cast.type.get_canonical(), [child.type.get_canonical() for child in cast.get_children()][-1:]
    if to.kind != vector or not value or value[0].kind != vector:
        return False
    return to.element_type.kind != value[0].element_type.kind


def _is_auto(cursor) -> bool:
    return any(token.spelling == "auto" for token in cursor.get_tokens())


def _reachable(start, calls) -> set:
    seen, todo = set(), [start]
    while todo:
        for target in calls.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen
