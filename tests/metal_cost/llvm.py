"""Reads LLVM's textual code: the functions of a module, their loops, and what the instructions of a loop do."""

import re
from collections import Counter
from dataclasses import dataclass, field

COUNTED = ("float", "convert", "int", "shift", "load")
OPERATIONS = {
    **dict.fromkeys(("fadd", "fsub", "fmul", "fdiv", "fneg"), "float"),
    **dict.fromkeys(("uitofp", "sitofp", "fptosi", "fptoui"), "convert"),
    **dict.fromkeys(("and", "or", "xor", "add", "sub", "icmp", "fcmp", "select"), "int"),
    **dict.fromkeys(("shl", "lshr", "ashr", "mul"), "shift"),
    "load": "load",
}
OWN_MEMORY = "addrspace(5)"
MATRIX_PRODUCT, MATRIX_PRODUCT_FLOATS = "msl_matrix_product", 16  # multiply-adds a lane: 8 * 8 * 8 / 32
CALLS = {
    r"@llvm\.(fma|fmuladd|fabs|minnum|maxnum|floor|rint)\.": "float",
    r"@llvm\.(umin|umax|smin|smax|abs)\.": "int",
    r"@llvm\.(fshl|fshr)\.": "shift",
    MATRIX_PRODUCT: "float",
    r"msl_matrix_load": "load",
    r"threadgroup_barrier": None,
    r"@llvm\.(lifetime|assume|experimental\.noalias)": None,
}
# Not counted: moves between registers and within one, changes of width, and addresses.
FREE = {
    *("phi", "br", "switch", "getelementptr", "bitcast", "addrspacecast", "zext", "sext", "trunc", "fpext", "fptrunc"),
    *("insertelement", "extractelement", "shufflevector", "insertvalue", "extractvalue", "freeze", "store"),
}
LABEL = re.compile(r"^(\w+):")
TARGET = re.compile(r"label %(\w+)")
INSTRUCTION = re.compile(r"^\s+(?:%[\w.]+ = )?(?:(?:tail|musttail|notail) )?(\w+) (.*)")
VECTOR = re.compile(r"<(\d+) x [a-z]+\d*>")


@dataclass
class Block:
    lines: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


def functions(text: str) -> dict[str, str]:
    """{name: body} of the functions that a module offers, in order."""
    return dict(re.findall(r"^define (?!internal|private|linkonce)[^@]*@(\w+)\([^\n]*\{\n(.*?)^\}", text, re.S | re.M))


def hot_loop(body: str) -> list[str]:
    """The lines of a function's longest loop. Raises ValueError where it has none, or one with another loop inside."""
    blocks = _blocks(body)
    back = _jumps_back(blocks)
    loops = {head: _loop(blocks, head, [end for end, to in back if to == head]) for _, head in back}
    if not loops:
        raise ValueError("the kernel has no loop")
    head = max(loops, key=lambda h: sum(len(blocks[name].lines) for name in loops[h]))
    if inner := [h for h in loops if h != head and h in loops[head]]:
        raise ValueError(f"the loop at %{head} has another one inside, at %{inner[0]}: it is not unrolled")
    return [line for name in blocks if name in loops[head] for line in blocks[name].lines]


def _blocks(body: str) -> dict[str, Block]:
    blocks, now = {}, None
    for line in body.split("\n"):
        if label := LABEL.match(line):
            now = blocks[label[1]] = Block()
        elif line.strip():
            if now is None:
                now = blocks["entry"] = Block()
            now.lines.append(line)
            if re.match(r"\s+(br|switch) |\s+i\d+ .*, label", line):
                now.next += TARGET.findall(line)
    return blocks


def _jumps_back(blocks: dict[str, Block]) -> list[tuple[str, str]]:
    """(end, head) of every loop: the jumps to a block that is on the way from the entry to them."""
    back, done, way = [], set(), []
    todo = [(next(iter(blocks)), False)]
    while todo:
        label, leave = todo.pop()
        if leave:
            done.add(way.pop())
        elif label not in done and label not in way:
            way.append(label)
            back += [(label, to) for to in blocks[label].next if to in way]
            todo += [(label, True), *((to, False) for to in blocks[label].next)]
    return back


def _loop(blocks: dict[str, Block], head: str, ends: list[str]) -> set[str]:
    """The blocks from which the loop's ends are reached without passing its head."""
    before = {label: [other for other, block in blocks.items() if label in block.next] for label in blocks}
    inside, todo = {head}, list(ends)
    while todo:
        label = todo.pop()
        if label not in inside:
            inside.add(label)
            todo += before[label]
    return inside


def count(lines: list[str]) -> Counter:
    """{one of COUNTED: operations}. Raises ValueError for an instruction that is not known."""
    counts = Counter()
    for line in lines:
        instruction = INSTRUCTION.match(line)
        if not instruction:
            continue
        name, rest = instruction.groups()
        kind = _kind(name, rest)
        if name == "call" and MATRIX_PRODUCT in rest:
            counts["float"] += MATRIX_PRODUCT_FLOATS
        elif kind == "load":
            counts[kind] += OWN_MEMORY not in rest
        elif kind:
            vector = VECTOR.search(rest.split(",")[0])
            counts[kind] += int(vector[1]) if vector else 1
    return counts


def _kind(name: str, rest: str) -> str | None:
    if name in FREE:
        return None
    if name == "call":
        for pattern, kind in CALLS.items():
            if re.search(pattern, rest):
                return kind
        raise ValueError(f"a call in the hot loop: {rest[:100]}")
    if name in ("shl", "lshr") and re.search(r", (16|splat \(i32 16\))(,|$)", rest):
        return None  # half a word: the other half of the register
    if name not in OPERATIONS:
        raise ValueError(f"not known what {name} costs")
    return OPERATIONS[name]
