"""Reads LLVM's assembly for an AMD GPU: what its vector unit does in the hot loop of each function."""

import re

FUNCTION = re.compile(r"^(_Z\w+):.*?\n(.*?)^\.Lfunc_end", re.S | re.M)
LABEL = re.compile(r"^(\.LBB\w+):")
BRANCH = re.compile(r"^\s+s_c?branch\w* (\.LBB\w+)")
VECTOR = re.compile(r"^\s+v_(?!nop)\w+ ")


def vector_operations(assembly: str) -> dict[str, int]:
    """{function: vector instructions in its longest loop}. Raises ValueError for one without a loop."""
    return {name: sum(map(bool, map(VECTOR.match, hot_loop(body)))) for name, body in FUNCTION.findall(assembly)}


def hot_loop(body: str) -> list[str]:
    """The lines of the longest loop: from a label to the last branch back to it."""
    lines = body.split("\n")
    labels = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    branches = [(i, labels[match[1]]) for i, line in enumerate(lines) if (match := BRANCH.match(line))]
    loops = [lines[head : end + 1] for end, head in branches if head <= end]
    if not loops:
        raise ValueError("the function has no loop")
    return max(loops, key=len)
