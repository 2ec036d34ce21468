"""The seeded faults of faults/: broken copies of the Metal path, which the other tests have to notice."""

import subprocess
import sys
from pathlib import Path

import pytest
from faults import chosen, mutants

TESTS = Path(__file__).parent
MECHANICAL = mutants.KERNELS + mutants.LAUNCHER


def run_faults(*arguments: str):
    command = [sys.executable, str(TESTS / "faults"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_a_sample_of_the_faults_is_caught(simulator):
    """But those that survivors.txt explains. More of them: `python tests/faults`, after a change of the Metal path."""
    lines = run_faults("--chosen", "--every", "8", "--mechanical", "16", "--seed", "0").splitlines()
    assert sum(line.startswith("caught ") for line in lines) == len(chosen.FAULTS[::8])


@pytest.mark.parametrize("fault", chosen.FAULTS, ids=lambda fault: fault.name)
def test_a_chosen_fault_still_has_its_place(fault):
    source = (mutants.ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.apply(source) != source


def test_mechanical_faults_are_found_in_every_file():
    found = mutants.all_mutants(MECHANICAL)
    assert found == mutants.all_mutants(MECHANICAL)
    assert len(found) == len({(m.file, m.line, m.column, m.new) for m in found})
    assert {"metal/gemv.h", "metal/storage.h", "metal/lanes/q4_k.h", "csrc/mps/launcher.mm"} <= {m.file for m in found}
    for mutant in found:
        source = (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
        changed = mutant.apply(source).split("\n")
        assert [number for number, line in enumerate(source.split("\n")) if changed[number] != line] == [
            mutant.line - 1
        ]


def test_what_becomes_of_a_line():
    line = "  x[i] = a * 3 < 0x0fu ? 0.5f : -b[2];  // 7 + 7"
    changed = [m.apply(line).strip() for m in mutants.mutants_of("a.h", line)]
    rest = "  // 7 + 7"
    assert changed == [
        f"x[i + 1] = a * 3 < 0x0fu ? 0.5f : -b[2];{rest}",
        f"x[i] = a + 3 < 0x0fu ? 0.5f : -b[2];{rest}",
        f"x[i] = a * 2 < 0x0fu ? 0.5f : -b[2];{rest}",
        f"x[i] = a * 4 < 0x0fu ? 0.5f : -b[2];{rest}",
        f"x[i] = a * 3 <= 0x0fu ? 0.5f : -b[2];{rest}",
        f"x[i] = a * 3 < 0x0eu ? 0.5f : -b[2];{rest}",
        f"x[i] = a * 3 < 0x10u ? 0.5f : -b[2];{rest}",
        f"x[i] = a * 3 < 0x0fu ? 1.0f : -b[2];{rest}",
        f"x[i] = a * 3 < 0x0fu ? 0.5f : -b[1];{rest}",
        f"x[i] = a * 3 < 0x0fu ? 0.5f : -b[3];{rest}",
    ]
    assert mutants.mutants_of("a.h", '#include "a1.h"\n// 1 + 1\nf("a < 1");\ntemplate <typename T>') == []
    assert mutants.mutants_of("a.h", "  float low[4] = {}, high[16];") == []


def test_explained_survivors_are_still_mutants():
    assert mutants.explained().keys() <= {str(mutant) for mutant in mutants.all_mutants(MECHANICAL)}
    assert all(mutants.explained().values())
