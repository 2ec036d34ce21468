"""The Metal sources pass the strict type check, and the check refuses what it has to refuse."""

import os
import re
from pathlib import Path

import msl_check
import pytest
from metal_sim import toolchain
from msl_check.opencl import format_names, metal_sources

ROOT = Path(__file__).parent.parent
CASE = re.compile(r"^// ---- (accept|refuse) ([^:\n]*)(?:: (.*))?\n", re.M)
HEAD, *PARTS = CASE.split((Path(msl_check.__file__).parent / "cases.metal").read_text())
CASES = {PARTS[i + 1]: PARTS[i : i + 4] for i in range(0, len(PARTS), 4)}
SOURCES = metal_sources()


@pytest.fixture(scope="module", autouse=True)
def tools():
    try:
        msl_check.libclang()
        toolchain.clang()
    except (msl_check.Unavailable, toolchain.Unavailable) as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("quant_type", format_names())
def test_sources(source, quant_type):
    assert msl_check.check(SOURCES[source], {"QGEMV_FORMAT": quant_type}) == []


@pytest.mark.parametrize("source", SOURCES)
def test_sources_with_all_macros(source):
    macros = {"QGEMV_FORMAT": "Q4_K", "QGEMV_TYPE": "half", "QGEMV_CONVERT_HALFS": "1"}
    assert msl_check.check(SOURCES[source], macros) == []


def test_every_header_is_checked():
    checked = set(re.findall(r'^#line \d+ "(.*)"', "\n".join(SOURCES.values()), re.M))
    headers = {path.relative_to(ROOT).as_posix() for path in (ROOT / "metal").rglob("*.h")}
    assert headers <= checked


def test_the_macros_are_those_of_the_launcher():
    text = "".join(path.read_text() for path in (ROOT / "csrc/mps").glob("*.mm"))
    assert re.findall(r'forKey:@"(\w+)"', text) == ["QGEMV_TYPE", "QGEMV_CONVERT_HALFS", "QGEMV_FORMAT"]


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    verdict, _, message, text = CASES[name]
    found = msl_check.check(HEAD + text)
    if verdict == "accept":
        assert found == []
    else:
        assert any(message in line for line in found), found


def test_messages_name_the_place():
    source = '#line 7 "metal/x.h"\nstatic float f(float* p) {\n  return *p;\n}\n'
    assert msl_check.check(source) == ["metal/x.h:7: p: no address space in '__generic float *__private'"]
