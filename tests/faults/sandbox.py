"""Copies of the sources to break, and processes that may crash."""

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import metal_sim

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds for one fault


@dataclass(frozen=True)
class Outcome:
    caught: bool
    by: str  # the test and its message, in a line
    error: bool = False  # the fault could not be tried


class Trouble(Exception):
    """The fault could not be tried, so nothing is known of it."""


def overlay_cache(folder: Path):
    """From now on the simulator keeps what it builds in `folder`, over what it has already: faults don't stay."""
    metal_sim.install()
    folder.mkdir()
    for path in metal_sim.toolchain.cache_dir().iterdir():
        if path.is_file() and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    os.environ["METAL_SIM_CACHE"] = str(folder)
    metal_sim.toolchain.cache_dir.cache_clear()


def copy_sources(folder: Path):
    """What the launcher, the kernels and their tests are made of. The simulator is used where it is."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("csrc", "metal"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    for path in (ROOT / "tests").glob("*.py"):
        shutil.copy(path, folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)


def change(folder: Path, file: str, edit: Callable[[str], str]):
    path = folder / file
    if not path.exists():
        raise Trouble(f"there is no {file}")
    before = path.read_text(encoding="utf-8")
    after = edit(before)
    if after == before:
        raise Trouble(f"{file} is as before")
    path.write_text(after, encoding="utf-8")


def metal_source(folder: Path, name: str) -> str:
    """The text that a Mac's Metal compiler would get."""
    return runpy.run_path(str(folder / "metal/embed.py"))["flatten"](folder / f"metal/{name}.metal")


def build_launcher(folder: Path) -> Path:
    """The library that conftest.py makes there. Its name is a digest of what it was made from.

    The Metal text lies in a folder that keeps its name: where it alone has changed, launcher.mm isn't compiled again.
    """
    generated = folder / "generated"
    generated.mkdir(exist_ok=True)
    (generated / "metal_sources.inc").write_text(runpy.run_path(str(folder / "metal/embed.py"))["embedded"]())
    sources = sorted((folder / "csrc/mps").glob("*.mm"))
    return metal_sim.build(sources, include_dirs=[folder / "csrc", generated])


def pytest_outcome(folder: Path, *arguments: str, launcher: Path | None = None) -> Outcome:
    """Runs tests of a copy on the simulated device, with a launcher built already. Raises Trouble where no test ran."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TORCH_QGEMV_TEST_DEVICES": "mps-sim", "PYTHONPATH": paths}
    plugin = []
    if launcher:
        environment["PREBUILT_LAUNCHER"], plugin = str(launcher), ["-p", "faults.prebuilt"]
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *plugin]
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode < 0:
        return Outcome(True, f"crash (signal {-done.returncode})")
    if done.returncode > 1:
        raise Trouble(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Outcome(done.returncode == 1, failed[0].split(" ", 1)[1] if failed else done.stdout.strip()[-300:])


def _child(task, slot, send):
    try:
        outcome = task(slot)
    except Trouble as trouble:
        outcome = Outcome(False, str(trouble), error=True)
    except BaseException:  # of this program: no test has caught anything
        outcome = Outcome(False, traceback.format_exc(), error=True)
    send.send(outcome)


def run_forked(tasks: list[Callable[[int], Outcome]], slots: int) -> Iterator[tuple[int, Outcome]]:
    """Runs each task(slot) in a process of its own, `slots` at a time; yields (task's index, outcome) as they end.

    A task that crashes or doesn't end has caught its fault.
    """
    context = multiprocessing.get_context("fork")
    waiting, running, free = list(enumerate(tasks))[::-1], {}, list(range(slots))
    while waiting or running:
        while waiting and free:
            index, task = waiting.pop()
            slot = free.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(task, slot, send))
            process.start()
            send.close()
            running[receive] = index, slot, process, time.monotonic() + TIMEOUT
        ready = wait(list(running), timeout=1)
        late = [receive for receive, (*_, end) in running.items() if time.monotonic() > end and receive not in ready]
        for receive in [*ready, *late]:
            index, slot, process, _ = running.pop(receive)
            if receive in late:
                process.kill()
                outcome = Outcome(True, f"does not end within {TIMEOUT} s")
            else:
                try:
                    outcome = receive.recv()
                except EOFError:
                    process.join()
                    outcome = Outcome(True, f"crash (exit code {process.exitcode})")
            process.join()
            free.append(slot)
            yield index, outcome
