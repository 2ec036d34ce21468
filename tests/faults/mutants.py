"""All mechanical faults: each constant, operator and index of the sources changed, one at a time."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("survivors.txt")
# The kernels' sources, checked by running gemv alone; and those that need a launcher built, which is slower.
KERNELS = ("metal/gemv.h", "metal/gemv.metal", "metal/storage.h", "metal/lanes/*.h")
LAUNCHER = (
    *("csrc/mps/launcher.mm", "csrc/mps/tensors.h", "csrc/mps/dispatch.h"),
    *("csrc/mps/pipelines.mm", "csrc/mps/compile.mm"),
    *("csrc/mps/launch_plan.h", "csrc/mps/gemv_plan.h", "metal/params.h"),
)

OPERATORS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"},
    **{
        "+": "-",
        "-": "+",
        "*": "+",
        "/": "*",
        "%": "/",
        "+=": "-=",
        "<<": ">>",
        ">>": "<<",
        "&": "|",
        "|": "&",
        "^": "|",
    },
}
FLOAT = re.compile(r"(?<![\w.])\d+\.\d+f?\b")
INTEGER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F]+|\d+)([uU]?)(?![\w.])")
# clang-format puts spaces around binary operators, and none into templates, references and pointers.
OPERATOR = re.compile(r" (" + "|".join(re.escape(o) for o in sorted(OPERATORS, key=len, reverse=True)) + r") ")
INDEX = re.compile(r"(?<=[\w\])])\[([^\[\]]+)\]")
NOT_CODE = re.compile(r'//.*|"(?:[^"\\]|\\.)*"|static_assert.*|^\s*#\s*(?:include|import|pragma|undef|ifn?def|line).*')
# Declared sizes of arrays are left alone: a larger one changes nothing, and of a smaller one in a thread's own memory
# the simulator sees only what is read by an index, not by a pointer.
DECLARATION = re.compile(r"^\s*(?:threadgroup |static |device const )*(?:float|uint|uchar\*|int) [\w\[\], {}=+:]*;")
ARRAY = re.compile(r"\w+(?:\[[^\]]*\])+")


@dataclass(frozen=True)
class Mutant:
    """`old` at `column` (from 0) of a line (from 1) becomes `new`."""

    file: str
    line: int
    column: int
    old: str
    new: str
    text: str  # of the line

    def __str__(self):
        """How survivors.txt names it: without the line's number, which changes with every edit above."""
        before, after = self.text[: self.column], self.text[self.column + len(self.old) :]
        return f"{self.file}: {before.lstrip()}{{{{{self.old} => {self.new}}}}}{after}"

    def apply(self, source: str) -> str:
        lines = source.split("\n")
        assert lines[self.line - 1] == self.text, f"{self.file} has changed meanwhile"
        lines[self.line - 1] = self.text[: self.column] + self.new + self.text[self.column + len(self.old) :]
        return "\n".join(lines)


def _integers(old: str, suffix: str) -> list[str]:
    value = int(old, 0)
    values = [value + 1, *([value - 1] if value else [])]
    return [(f"0x{v:0{len(old) - 2}x}" if old[:2].lower() == "0x" else str(v)) + suffix for v in values]


def _blank(match: re.Match) -> str:
    return " " * len(match[0])


def _changes(line: str) -> Iterator[tuple[int, str, str]]:
    """(column, old, new) of a line without what isn't code."""
    for match in FLOAT.finditer(line):
        value = float(match[0].rstrip("f"))
        yield match.start(), match[0], "1.0f" if value == 0 else f"{2 * value}f"
    for match in INTEGER.finditer(line):
        for new in _integers(match[1], match[2]):
            yield match.start(), match[0], new
    for match in OPERATOR.finditer(line):
        yield match.start(1), match[1], OPERATORS[match[1]]
    for match in INDEX.finditer(line):
        if not INTEGER.fullmatch(match[1]):
            yield match.start(1), match[1], f"{match[1]} + 1"


def mutants_of(file: str, source: str) -> list[Mutant]:
    found = []
    for number, text in enumerate(source.split("\n"), 1):
        code = NOT_CODE.sub(_blank, text)
        code = ARRAY.sub(_blank, code) if DECLARATION.match(code) else code
        found += [Mutant(file, number, column, old, new, text) for column, old, new in sorted(_changes(code))]
    return found


def all_mutants(patterns: tuple[str, ...], root: Path = ROOT) -> list[Mutant]:
    """In an order that never changes."""
    files = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return [m for f in files for m in mutants_of(f.relative_to(root).as_posix(), f.read_text(encoding="utf-8"))]


def sample(count: int, seed: int) -> list[Mutant]:
    """Of the kernels' mutants, and one in eight of the launcher's, which take longer."""
    chance = random.Random(seed)
    launcher = chance.sample(all_mutants(LAUNCHER), count // 8)
    return launcher + chance.sample(all_mutants(KERNELS), count - len(launcher))


def explained() -> dict[str, str]:
    """Mutant, as str() writes it -> why it changes nothing that a test could see. Of survivors.txt."""
    reasons, reason = {}, ""
    for line in SURVIVORS.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line:
            reasons[line] = reason
    return reasons
