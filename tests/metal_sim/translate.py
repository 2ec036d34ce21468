"""Turns Metal source into C++ that clang compiles against msl/metal_stdlib.h. Lines keep their numbers.

The text has already been through the preprocessor, so macros that make kernels are expanded. What is left to do:
  * [[attributes]] are not C++: they are removed;
  * variables that a kernel declares in threadgroup memory are shared by its lanes;
  * function constants get their values, as Metal gives them when it makes a function;
  * each kernel is registered under its name, with a table saying what each of its parameters is filled with.
"""

import re

IDS = (  # runtime/kernel_abi.h has the same
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_position_in_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
)

ATTRIBUTE = re.compile(r"\[\[(.*?)\]\]", re.S)
KERNEL = re.compile(r"(?:\bkernel|\[\[\s*kernel\b[^\]]*\]\])\s+void\s+(\w+)\s*\(")
MAX_THREADS = re.compile(r"\bmax_total_threads_per_threadgroup\s*\((.*?)\)\s*(?:,|\]\])", re.S)
# template [[host_name("n")]] [[kernel]] decltype(f<T>) f<T>;   or   ... kernel void f<T>(parameters);
INSTANTIATION = re.compile(
    r"\btemplate\s*\[\[\s*host_name\((?P<name>[^)]*)\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|kernel)\s*"
    r"(?:decltype\(.*?\)|void)\s*(?P<function>(?P<base>\w+)\s*(?:<[^;()]*>)?)\s*(?:\([^;]*\))?\s*;",
    re.S,
)
TYPE = r"[\w:]+(?:\s*<[^;<>]*>)?"
THREADGROUP_POINTER = re.compile(rf"\bthreadgroup\s+(?:const\s+|volatile\s+)*{TYPE}(?:\s+const)?\s*\(?\s*[*&]")
THREADGROUP_VARIABLE = re.compile(
    rf"\bthreadgroup\s+(?P<type>{TYPE})\s+(?P<name>\w+)\s*(?P<array>(?:\[[^;\[\]]*\]\s*)*);"
)
# vec<T, 4>(a, b): clang's vectors have no such constructor; float4(a, b) and the like are macros of the stand-in.
VECTOR_CONSTRUCTOR = re.compile(r"(?:\bmetal\s*::\s*)?\bvec\s*<([^<>;]*)>\s*\(")
FUNCTION_CONSTANT = re.compile(
    r"\bconstant\s+(?P<type>\w+)\s+(?P<name>\w+)\s*\[\[\s*function_constant\s*\(\s*(?P<index>\w+)\s*\)\s*\]\]\s*;"
)
IS_DEFINED = r"\bis_function_constant_defined\s*\(\s*{}\s*\)"


class TranslationError(Exception):
    """The source is not what Metal accepts, or not what the simulator understands."""


def translate(
    source: str, constants: dict[int | str, tuple[str, str]] | None = None, register=None, shared=None
) -> str:
    """C++ of preprocessed Metal source.

    `constants` maps a function constant's index or name to (its type's name, its value as a C++ literal). None: the
    library is not specialised; if it has function constants, no kernel of it can be made into a function as it is.
    register(function, name, parameters) and shared(type, name, number) write what a kernel is registered with and what
    a variable in threadgroup memory becomes, where the C++ is not for the simulator.
    """
    register, shared = register or _register, shared or _shared
    source = _specialise(source, constants)
    parameters = {}  # kernel's C++ name -> its parameter table
    edits = []  # (begin, end, replacement)
    limits = 0

    for match in KERNEL.finditer(source):
        close = _closing(source, match.end() - 1)
        table = [_parameter(p) for p in _split(source[match.end() : close]) if p.strip()]
        begin = _start_of_template(source, match.start())
        limit = MAX_THREADS.search(match[0])
        constant = f"{source[begin : match.start()]} constexpr unsigned msl_max_threads_{match[1]} = "
        edits.append((begin, begin, " ".join(f"{constant} {limit[1] if limit else 0};".split()) + " "))
        limits += limit is not None
        parameters[match[1]] = _number_buffers(table)
        if not _is_template(source, match.start()):  # registered after its body, under its own name
            end = _closing(source, source.index("{", close)) + 1
            edits.append((end, end, register(match[1], f'"{match[1]}"', parameters[match[1]])))

    for match in INSTANTIATION.finditer(source):
        if match["base"] not in parameters:
            raise TranslationError(f"no kernel template {match['base']} for host_name({match['name']})")
        edits.append((*match.span(), register(match["function"], match["name"], parameters[match["base"]])))

    inside_edit = [(begin, end) for begin, end, _ in edits]
    for match in ATTRIBUTE.finditer(source):
        if not any(begin <= match.start() < end for begin, end in inside_edit):
            edits.append((*match.span(), ""))
    edits += _shared_variables(source, shared)
    edits += [
        (*match.span(), f"::metal::make_vector<::metal::vec<{match[1]}>>(")
        for match in VECTOR_CONSTRUCTOR.finditer(source)
    ]

    if source.count("max_total_threads_per_threadgroup") != limits:
        raise TranslationError("max_total_threads_per_threadgroup is not written as the simulator understands it: "
                               "[[kernel, max_total_threads_per_threadgroup(n)]]")  # fmt: skip

    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + "\n" * (source[begin:end].count("\n") - text.count("\n")) + source[end:]
    return source


def _specialise(source: str, constants) -> str:
    declared = {}
    for match in FUNCTION_CONSTANT.finditer(source):
        if not match["index"].isdigit():
            raise TranslationError(
                f"function constant {match['name']}: the index must be a number, not {match['index']}"
            )
        declared[match["name"]] = (match["type"], int(match["index"]))
    if not declared:
        return source
    if constants is None:
        source += f'\nstatic const bool msl_specialise = (msl_needs_constants("{", ".join(declared)}"), true);\n'
    for name, (kind, index) in declared.items():
        given = (constants or {}).get(index) or (constants or {}).get(name)
        optional = re.search(IS_DEFINED.format(name), source)
        if given is None and constants is not None and not optional:
            raise TranslationError(f"function constant {name} (index {index}) has no value")
        if given is not None and given[0] != kind:
            raise TranslationError(f"function constant {name} is of type {kind}, its value of type {given[0]}")
        source = re.sub(IS_DEFINED.format(name), str(given is not None).lower(), source)
        value = given[1] if given is not None else f"{kind}()"
        match = next(m for m in FUNCTION_CONSTANT.finditer(source) if m["name"] == name)
        source = f"{source[: match.start()]}constant {kind} {name} = {value};{source[match.end() :]}"
    return source


def _shared(kind: str, name: str, number: int) -> str:
    """A reference to memory that the simulator hands to all lanes."""
    return f'auto& {name} = ::msl_shared<{kind}, {number}>("{name}");'


def _shared_variables(source: str, shared) -> list[tuple[int, int, str]]:
    """`threadgroup float part[8];` becomes what shared("float[8]", "part", a number of its own) writes."""
    edits = []
    for number, match in enumerate(re.finditer(r"(?<!\[)\bthreadgroup\b", source)):  # not [[threadgroup(0)]]
        if THREADGROUP_POINTER.match(source, match.start()):
            continue
        variable = THREADGROUP_VARIABLE.match(source, match.start())
        if not variable:
            statement = " ".join(source[match.start() : match.start() + 80].split())
            raise TranslationError(
                f"not a threadgroup variable or pointer as the simulator understands it: {statement}"
            )
        kind = variable["type"] + variable["array"].strip()
        edits.append((*variable.span(), shared(kind, variable["name"], number)))
    return edits


def _closing(s: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    closing = {"(": ")", "{": "}"}[s[start]]
    depth = 0
    for i in range(start, len(s)):
        depth += (s[i] == s[start]) - (s[i] == closing)
        if depth == 0:
            return i
    raise TranslationError("unbalanced brackets")


def _split(s: str) -> list[str]:
    """Splits at the commas outside every bracket."""
    out, depth = [""], 0
    for c in s:
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return out


def _is_template(source: str, kernel: int) -> bool:
    return ATTRIBUTE.sub("", source[:kernel]).rstrip().endswith(">")


def _start_of_template(source: str, kernel: int) -> int:
    """Where `template <...>` before a kernel begins; the kernel itself where it is no template."""
    if not _is_template(source, kernel):
        return kernel
    depth, i = 0, source.rindex(">", 0, kernel)
    while True:
        depth += (source[i] == ">") - (source[i] == "<")
        if depth == 0:
            return source.rindex("template", 0, i)
        i -= 1


def _parameter(text: str) -> tuple[str, str, bool]:
    """(kind, index, writable) of one parameter; the index of an unnumbered buffer is filled in later."""
    writable = not re.search(r"\b(const|constant)\b", text)
    attribute = ATTRIBUTE.search(text)
    if not attribute:
        if "*" not in text and "&" not in text:
            raise TranslationError(f"kernel parameter without an attribute: {' '.join(text.split())}")
        return "buffer", "", writable
    name, index = re.match(r"\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?", attribute[1]).groups()
    if name in ("buffer", "threadgroup"):
        return name, index, writable
    if name not in IDS:
        raise TranslationError(f"[[{name}]] is not simulated")
    return "id", name, False


def _number_buffers(table: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    buffers = 0
    for i, (kind, index, writable) in enumerate(table):
        if kind == "buffer":
            table[i] = kind, index or str(buffers), writable
            buffers += 1
    used = [(kind, index) for kind, index, _ in table if kind != "id"]
    for entry in used:
        if used.count(entry) > 1:
            raise TranslationError(f"two kernel parameters are [[{entry[0]}({entry[1]})]]")
    return table


def _register(function: str, name: str, table: list[tuple[str, str, bool]]) -> str:
    unique = re.sub(r"\W", "_", function + name)
    if not table:
        return f" static const bool msl_added_{unique} = msl_add<&{function}>({name}, msl_max_threads_{function});"
    entries = ", ".join(
        f"{{MslParameter::{kind}_argument, {index}, {str(writable).lower()}}}" for kind, index, writable in table
    )
    return (
        f" static constexpr MslParameter msl_parameters_{unique}[] = {{{entries}}};"
        f" static const bool msl_added_{unique} ="
        f" msl_add<&{function}>({name}, msl_max_threads_{function}, msl_parameters_{unique});"
    )
