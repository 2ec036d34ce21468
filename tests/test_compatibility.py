"""docs/compatibility.md: each of its rows names a test that exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs/compatibility.md"


def rows():
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def functions(name):
    path = TESTS / f"test_{name}.py"
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test():
    assert len(rows()) > 40
    for what, verdict, how, test in rows():
        assert verdict in ("works", "error"), what
        assert verdict == "works" or how, what
        match = re.fullmatch(r"`(\w+)::(test_\w+)`", test)
        assert match, f"{what}: no test"
        assert match[2] in functions(match[1]), f"{what}: tests/test_{match[1]}.py has no {match[2]}"
