"""Writes the text of the Metal sources into a C++ header: `const char <name>_metal[]` for each .metal file here.

A source is flattened, its own headers put in place of their #include. #line directives keep file names and lines, so
that the Metal compiler's messages name the files here. Used as a program: embed.py HEADER
"""

import re
import sys
from pathlib import Path

METAL = Path(__file__).parent
INCLUDE = re.compile(r'\s*#include "(.+)"')
PIECE = 8000  # characters of one literal: compilers limit their length


def flatten(path: Path, seen: set[Path] | None = None) -> str:
    """The text of a source and the headers it includes, each once. Raises ValueError for what isn't ASCII."""
    seen = set() if seen is None else seen
    seen.add(path.resolve())
    name = f"metal/{path.resolve().relative_to(METAL.resolve()).as_posix()}"
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.isascii():
            raise ValueError(f"{name}:{number}: Metal sources are plain ASCII, got {line!r}")
        include = INCLUDE.match(line)
        header = path.parent / include[1] if include else None
        if header and header.resolve() not in seen:
            lines += [flatten(header, seen), f'#line {number + 1} "{name}"']
        else:
            lines.append("" if include or line.startswith("#pragma once") else line)
    return "\n".join(lines)


def embedded() -> str:
    """The text of the header."""
    parts = ["// Made from metal/ by metal/embed.py.", "#pragma once"]
    for path in sorted(METAL.glob("*.metal")):
        source = flatten(path) + "\n"
        pieces = [f'R"metal({source[i : i + PIECE]})metal"' for i in range(0, len(source), PIECE)]
        parts.append(f"static const char {path.stem}_metal[] =\n" + "\n".join(pieces) + ";")
    return "\n".join(parts) + "\n"


def write(header: Path):
    """Writes the header unless it is up to date already, so that nothing is compiled again without need."""
    text = embedded()
    if not header.exists() or header.read_text(encoding="utf-8") != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
