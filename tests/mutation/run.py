"""Mutation testing of rlcore/algorithms: which small changes to the formulas would no test notice?

Each mutant is the package with one expression changed. It runs the tests of tests/rlcore/algorithms in a copy of the
repository until the first failure: killed. A mutant that passes every test survived; those are listed with file, line
and change. Needs nothing beyond the standard library and what the tests need themselves.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("rlcore/algorithms")
TESTS = Path("tests/rlcore/algorithms")
COPIED = ("rlcore", "tests", "pyproject.toml")
NUM_PROCESSES = 2
MAX_EXAMPLES = 8  # of each property: a mutant that is no equivalent is rarely missed by all of them
# Loaded once: every mutant's process is forked from this one. Nothing of the repository may be among them.
PRELOADED = ("torch", "transformers", "transformers.models.llama.modeling_llama", "pytest", "hypothesis", "numpy")


def test_files(path: Path) -> list[str]:
    """The tests, likely killers of a mutant of ``path`` first."""
    favourites = ("test_losses", "test_table", "test_objective")

    def rank(file: Path) -> int:
        if path.stem == file.stem.removeprefix("test_"):
            return 0
        return 1 + favourites.index(file.stem) if file.stem in favourites else 9

    return [str(TESTS / file.name) for file in sorted((ROOT / TESTS).glob("test_*.py"), key=rank)]


WARM_UP = """
import torch
from hypothesis import given, settings, strategies as st

@settings(max_examples=5, deadline=None, database=None)
@given(st.lists(st.floats(0, 1), max_size=3), st.integers(), st.booleans(), st.sampled_from([1, 2]), st.data())
def test_something(numbers, whole, truth, choice, data):
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x.exp().sum().backward()
"""


@dataclass
class Slot:
    """A copy of the repository and the process that runs in it."""

    folder: Path
    pid: int = 0
    mutant: Mutant | None = None
    started: float = 0.0


def start(slot: Slot, mutant: Mutant) -> None:
    """Fork a process that runs the tests against the mutant."""
    (slot.folder / mutant.path).write_text(mutant.source, encoding="utf-8")
    slot.mutant, slot.started = mutant, time.monotonic()
    slot.pid = os.fork()
    if slot.pid == 0:
        os.setsid()
        os._exit(run_tests(slot.folder, test_files(mutant.path)))


def run_tests(folder: Path, files: Sequence[str]) -> int:
    """In a forked process: pytest's exit code, stopping at the first failure."""
    import hypothesis
    import pytest

    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    few = {"max_examples": MAX_EXAMPLES, "derandomize": True, "database": None, "deadline": None}
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a counterexample need not be small here
    hypothesis.settings.register_profile("mutation", phases=phases, **few)
    hypothesis.settings.load_profile("mutation")
    # Plain asserts: rewriting costs time, and warns of what is imported already.
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider"]
    for file in files:  # one at a time: most mutants die in the first, and never see the others
        if code := pytest.main([*options, file]):
            return int(code)
    return 0


def warm_up(folder: Path) -> None:
    """Run one property test in this process: what pytest and hypothesis load on first use is then there for all."""
    import pytest

    test = folder / "test_warm_up.py"
    test.write_text(WARM_UP, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = ["-q", "--assert=plain", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={folder}"]
    if pytest.main([*arguments, str(test)]) != 0:
        raise SystemExit("pytest does not run here")


def finished(slot: Slot, timeout: float) -> str:
    """``killed``, ``survived`` or ``timeout``; empty while the process runs."""
    pid, status = os.waitpid(slot.pid, os.WNOHANG)
    if pid == 0:
        if time.monotonic() - slot.started < timeout:
            return ""
        os.killpg(slot.pid, signal.SIGKILL)
        os.waitpid(slot.pid, 0)
        return "timeout"
    return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"


def run_all(mutants: Sequence[Mutant], slots: Sequence[Slot], *, timeout: float) -> list[tuple[Mutant, str]]:
    """Every mutant's fate, two at a time."""
    waiting, results = list(mutants), []
    while waiting or any(slot.mutant for slot in slots):
        for slot in slots:
            if slot.mutant is None and waiting:
                start(slot, waiting.pop(0))
            outcome = finished(slot, timeout) if slot.mutant else ""
            if slot.mutant and outcome:
                shutil.copyfile(ROOT / slot.mutant.path, slot.folder / slot.mutant.path)
                results.append((slot.mutant, outcome))
                report(slot.mutant, outcome, f"{len(results)}/{len(mutants)}")
                slot.mutant = None
        time.sleep(0.02)
    return results


def report(mutant: Mutant, outcome: str, count: str) -> None:
    """One line for each mutant that was not simply killed, and a sign of life."""
    if outcome != "killed" or count.split("/")[0].endswith("0"):
        print(f"[{count}] {outcome:8} {mutant.path}:{mutant.line}  {mutant.change}", flush=True)


def make_slots(folder: Path) -> list[Slot]:
    """Copies of what the tests need."""
    slots = []
    for number in range(NUM_PROCESSES):
        target = folder / str(number)
        target.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, target / name)
        slots.append(Slot(target))
    return slots


def unchanged_seconds(slot: Slot) -> float:
    """Measure the tests without a mutant; they must pass."""
    path = next(iter(sorted((ROOT / PACKAGE).glob("[a-z]*.py"))))
    start(slot, Mutant(path.relative_to(ROOT), 0, "nothing", path.read_text(encoding="utf-8")))
    while not (outcome := finished(slot, timeout=900.0)):
        time.sleep(0.1)
    if outcome != "survived":
        raise SystemExit("the tests fail without any mutation")
    slot.mutant = None
    return time.monotonic() - slot.started


def main() -> None:
    """Run every mutant of the chosen files and print what survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="names such as kl or surrogates; all if none is named")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample: only every N-th mutant")
    options = parser.parse_args()
    chosen = options.modules
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.dont_write_bytecode = True  # a stale .pyc would hide a mutant
    paths = [PACKAGE / f.name for f in sorted((ROOT / PACKAGE).glob("[a-z]*.py")) if not chosen or f.stem in chosen]
    mutants = [mutant for path in paths for mutant in mutants_of(path, root=ROOT)][:: options.every]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        warm_up(Path(folder))
        slots = make_slots(Path(folder))
        seconds = unchanged_seconds(slots[0])
        print(f"{len(mutants)} mutants of {len(paths)} files; the unchanged tests take {seconds:.0f} s", flush=True)
        results = run_all(mutants, slots, timeout=4 * seconds + 30)
    survivors = [mutant for mutant, outcome in results if outcome == "survived"]
    timeouts = sum(outcome == "timeout" for _, outcome in results)
    killed = len(results) - len(survivors)
    print(
        f"\nkilled {killed} of {len(results)} ({killed / max(1, len(results)):.1%}), {timeouts} of them by the timeout"
    )
    for mutant in survivors:
        print(f"survived  {mutant.path}:{mutant.line}  {mutant.change}")


if __name__ == "__main__":
    main()
