import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
from faults import chosen, mechanical, mutants, sandbox  # noqa: E402
from faults.sandbox import Outcome  # noqa: E402
from tqdm import tqdm  # noqa: E402

import torch_qgemv  # noqa: E402, F401  (the operators' schemas; before any fork, for speed)

SLOTS = 2  # faults tried at a time, each in a folder of its own


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/faults", description="Breaks the Metal path; the tests have to notice.")
    parser.add_argument("--chosen", action="store_true", help="the chosen faults")
    parser.add_argument("--mechanical", type=int, metavar="N", help="N of the mechanical ones")
    parser.add_argument("--seed", type=int, default=0, help="which N (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="all mechanical ones")
    parser.add_argument("--files", metavar="TEXT", default="", help="only mechanical ones in files named so")
    parser.add_argument("--verbose", action="store_true", help="name each mechanical fault, also those caught")
    given = parser.parse_args()
    if not (given.chosen or given.all or given.mechanical is not None):
        given.chosen, given.mechanical = True, 60
    return given


def faults(given: argparse.Namespace) -> list[chosen.Fault | mutants.Mutant]:
    found = list(chosen.FAULTS) if given.chosen else []
    if given.all:
        found += mutants.all_mutants(mutants.LAUNCHER + mutants.KERNELS)
    elif given.mechanical is not None:
        found += mutants.sample(given.mechanical, given.seed)
    return [f for f in found if isinstance(f, chosen.Fault) or given.files in f.file]


def run(tasks: list[Callable[[int], Outcome]], what: str) -> list[Outcome]:
    outcomes = [Outcome(False, "")] * len(tasks)
    for index, outcome in tqdm(sandbox.run_forked(tasks, SLOTS), what, total=len(tasks), unit="", disable=None):
        outcomes[index] = outcome
    return outcomes


def prepare(root: Path, given: argparse.Namespace, wanted: list) -> list[Path | None]:
    """Shows that nothing fails where nothing is broken. Returns the library that each slot's folder makes."""

    def build(slot: int) -> Outcome:
        sandbox.copy_sources(root / f"{slot}")
        return Outcome(False, str(sandbox.build_launcher(root / f"{slot}")))

    parts = {type(fault) for fault in wanted}
    if any(isinstance(f, chosen.Fault) or f.file in mutants.LAUNCHER for f in wanted):
        usual = [Path(outcome.by) for outcome in run([lambda _, s=s: build(s) for s in range(SLOTS)], "Building")]
    else:
        usual = [None] * SLOTS
        for slot in range(SLOTS):
            sandbox.copy_sources(root / f"{slot}")
    checks = [part.unbroken for part, kind in ((chosen, chosen.Fault), (mechanical, mutants.Mutant)) if kind in parts]
    for outcome in run([lambda slot, c=check: c(root / f"{slot}") for check in checks], "Unbroken"):
        if outcome.caught or outcome.error:
            sys.exit(f"tests/faults: fails though nothing is broken: {outcome.by}")
    return usual


def verdict(fault, outcome: Outcome, explained: dict[str, str]) -> str:
    if outcome.error:
        return "NOT TRIED"
    if outcome.caught:
        return "caught"
    return "explained" if str(fault) in explained else "SURVIVED"


def report(tried: list, outcomes: list[Outcome], verbose: bool) -> bool:
    """Prints a table; whether all is well."""
    explained, counts = mutants.explained(), {}
    for fault, outcome in zip(tried, outcomes, strict=True):
        word = verdict(fault, outcome, explained)
        kind = "chosen" if isinstance(fault, chosen.Fault) else "mechanical"
        counts[kind, word] = counts.get((kind, word), 0) + 1
        if kind == "chosen":
            print(f"{word:10}{fault.name:44}{fault.test if outcome.caught else outcome.by}")
        elif verbose or word != "caught":
            print(f"{word:10}{fault}\n{'':10}{explained.get(str(fault), outcome.by)}")
    for (kind, word), count in sorted(counts.items()):
        print(f"{kind:12}{word:10}{count:5}")
    return {word for _, word in counts} <= {"caught", "explained"}


def main() -> int:
    given = arguments()
    stale = mutants.explained().keys() - set(map(str, mutants.all_mutants(mutants.LAUNCHER + mutants.KERNELS)))
    if stale:
        sys.exit("tests/faults: survivors.txt has faults that are no more: " + "\n".join(sorted(stale)))
    tried = faults(given)
    torch.set_num_threads(1)  # a forked process has no other threads
    tqdm.monitor_interval = 0
    with tempfile.TemporaryDirectory(prefix="torch_qgemv_faults_") as folder:
        root = Path(folder)
        sandbox.overlay_cache(root / "cache")
        usual = prepare(root, given, tried)

        def attempt(fault, slot: int) -> Outcome:
            part = chosen if isinstance(fault, chosen.Fault) else mechanical
            return part.attempt(fault, root / f"{slot}", usual[slot])

        outcomes = run([partial(attempt, fault) for fault in tried], "Faults")
    return 0 if report(tried, outcomes, given.verbose) else 1


if __name__ == "__main__":
    sys.exit(main())
