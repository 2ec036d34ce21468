import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

import torch_qgemv  # noqa: E402, F401  (the operators' schemas; before any fork, for speed)
from faults import chosen, mechanical, mutants, sandbox  # noqa: E402
from faults.sandbox import Outcome  # noqa: E402

SLOTS = 2  # faults tried at a time, each in a folder of its own


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/faults", description="Breaks the Metal path in copies.")
    parser.add_argument("--chosen", action="store_true", help="the chosen faults")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th of the chosen ones")
    parser.add_argument("--mechanical", type=int, metavar="N", help="N of the mechanical ones")
    parser.add_argument("--seed", type=int, default=0, help="which N (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="all mechanical ones")
    parser.add_argument("--only", metavar="TEXT", default="", help="of these, those whose file, line or name has TEXT")
    parser.add_argument("--verbose", action="store_true", help="name each mechanical fault, also those caught")
    given = parser.parse_args()
    if not (given.chosen or given.all or given.mechanical is not None):
        given.chosen, given.mechanical = True, 60
    return given


def faults(given: argparse.Namespace) -> list[chosen.Fault | mutants.Mutant]:
    found = chosen.FAULTS[:: given.every] if given.chosen else []
    if given.all:
        found += mutants.all_mutants(mutants.LAUNCHER + mutants.KERNELS)
    elif given.mechanical is not None:
        found += mutants.sample(given.mechanical, given.seed)
    return [fault for fault in found if given.only in str(fault)]


def run(tasks: list[Callable[[int], Outcome]], what: str, tell=lambda index, outcome: None) -> list[Outcome]:
    """The tasks' outcomes; tell(index, outcome) is called for each as it comes."""
    outcomes = [Outcome(False, "")] * len(tasks)
    with tqdm(total=len(tasks), desc=what, unit="", leave=False, disable=None) as bar:
        for index, outcome in sandbox.run_forked(tasks, SLOTS):
            outcomes[index] = outcome
            tell(index, outcome)
            bar.update()
    return outcomes


def prepare(root: Path, wanted: list) -> list[Path]:
    """Shows that nothing fails where nothing is broken. Returns the library that each slot's folder makes."""

    def build(slot: int) -> Outcome:
        sandbox.copy_sources(root / f"{slot}")
        return Outcome(False, str(sandbox.build_launcher(root / f"{slot}")))

    def passing(outcomes: list[Outcome]) -> list[str]:
        for outcome in outcomes:
            if outcome.caught or outcome.error:
                sys.exit(f"tests/faults: fails though nothing is broken: {outcome.by}")
        return [outcome.by for outcome in outcomes]

    kinds = {type(fault) for fault in wanted}
    usual = passing(run([lambda _, s=s: build(s) for s in range(SLOTS)], "Building"))
    checks = [part.unbroken for part, kind in ((chosen, chosen.Fault), (mechanical, mutants.Mutant)) if kind in kinds]
    passing(run([lambda slot, c=check: c(root / f"{slot}") for check in checks], "Unbroken"))
    return [Path(library) for library in usual]


class Report:
    """A line for each fault of note as its outcome comes, and counts in the end."""

    def __init__(self, tried: list, verbose: bool):
        self.tried, self.verbose, self.explained = tried, verbose, mutants.explained()
        self.counts: dict[tuple[str, str], int] = {}

    def __call__(self, index: int, outcome: Outcome):
        fault = self.tried[index]
        word = "NOT TRIED" if outcome.error else "caught" if outcome.caught else "SURVIVED"
        if word == "SURVIVED" and str(fault) in self.explained:
            word = "explained"
        kind = "chosen" if isinstance(fault, chosen.Fault) else "mechanical"
        self.counts[kind, word] = self.counts.get((kind, word), 0) + 1
        if kind == "chosen":
            tqdm.write(f"{word:10}{fault.name:46}{fault.test if word == 'caught' else outcome.by}")
        elif self.verbose or word != "caught":
            tqdm.write(f"{word:10}{fault}\n{'':10}{self.explained.get(str(fault), outcome.by)}")

    def all_well(self) -> bool:
        """Prints the counts."""
        for (kind, word), count in sorted(self.counts.items()):
            print(f"{kind:12}{word:10}{count:5}")
        return {word for _, word in self.counts} <= {"caught", "explained"}


def main() -> int:
    given = arguments()
    stale = mutants.explained().keys() - set(map(str, mutants.all_mutants(mutants.LAUNCHER + mutants.KERNELS)))
    if stale:
        sys.exit("tests/faults: survivors.txt has faults that are no more: " + "\n".join(sorted(stale)))
    tried = faults(given)
    if not tried:
        sys.exit("tests/faults: there are no such faults")
    torch.set_num_threads(1)  # a forked process has no other threads
    tqdm.monitor_interval = 0
    with tempfile.TemporaryDirectory(prefix="torch_qgemv_faults_") as folder:
        root = Path(folder)
        sandbox.overlay_cache(root / "cache")
        usual = prepare(root, tried)

        def attempt(fault, slot: int) -> Outcome:
            part = chosen if isinstance(fault, chosen.Fault) else mechanical
            return part.attempt(fault, root / f"{slot}", usual[slot])

        report = Report(tried, given.verbose)
        run([partial(attempt, fault) for fault in tried], "Faults", report)
    return 0 if report.all_well() else 1


if __name__ == "__main__":
    sys.exit(main())
