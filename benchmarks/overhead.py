"""What orchestration costs: the share of a run's wall time that is spent outside of rlcore, and milliseconds per task.

``python -m benchmarks.overhead [--preset tiny] [--set key=value]`` runs the pipeline under the engine that
``RLCORE_ENGINE`` names while a thread looks, two hundred times a second, at what the working thread is in. Start-up
(imports, the API) is over when the pipeline begins. Each look counts for the innermost part of ours on the stack, so
the work of a library counts for whoever called it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 0.005  # between two looks
ITERATION, PIPELINE = "run_iteration", "run_pipeline"
# Time of ours that is spent in these is orchestration or tracking.
LIBRARIES = {"prefect": "prefect", "mlflow": "mlflow", "sqlalchemy": "mlflow"}


def place_of(file: str) -> str:
    """The part of this repository, or the library, that a source file belongs to; empty for everything else."""
    path = Path(file)
    if "site-packages" in path.parts:
        return LIBRARIES.get(path.parts[path.parts.index("site-packages") + 1], "")
    return path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""


def part_of(places: Sequence[str]) -> str:
    """Whose time a look is, from the places on the stack, innermost first.

    The deepest of ours counts (``rlcore`` calling torch is rlcore); of the tasks' own time, what is spent in MLflow or
    Prefect counts for those.
    """
    for place in places:
        if place in {"rlcore", "data_contracts", "mlflow", "prefect"}:
            return place
        if place in {"tasks", "flows"}:
            return "tasks"
    return "prefect"


class Looker(threading.Thread):
    """Counts where the pipeline's thread is, within iterations of RL and in all."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.total: Counter[str] = Counter()
        self.in_iterations: Counter[str] = Counter()
        self._places: dict[CodeType, str] = {}
        self._over = threading.Event()
        self._first = self._last = 0.0

    @property
    def seconds(self) -> float:
        """Wall seconds of the pipeline."""
        return self._last - self._first

    def run(self) -> None:
        while not self._over.wait(SECONDS):
            for thread, frame in sys._current_frames().items():
                if thread != self.ident:
                    self._look(frame)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _look(self, frame: FrameType) -> None:
        codes = list(_codes(frame))
        names = {code.co_name for code in codes if self._place(code) == "tasks"}
        if PIPELINE not in names:
            return
        self._last = time.perf_counter()
        self._first = self._first or self._last
        part = part_of([place for code in codes if (place := self._place(code))])
        self.total[part] += 1
        if ITERATION in names:
            self.in_iterations[part] += 1

    def _place(self, code: CodeType) -> str:
        if code not in self._places:
            self._places[code] = place_of(code.co_filename)
        return self._places[code]


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def shares(counts: Counter[str]) -> dict[str, float]:
    """Share of the looks by part."""
    return {part: count / counts.total() for part, count in counts.most_common()}


def seconds_per_task(*, count: int) -> list[float]:
    """Wall seconds of empty tasks in a flow of their own."""
    from prefect import flow

    from tasks.engine import call_flow, task

    @task(name="empty")
    def empty() -> None:
        return None

    @flow(name="empty tasks", persist_result=False)
    def many() -> list[float]:
        took = []
        for _ in range(count):
            started = time.perf_counter()
            empty()
            took.append(time.perf_counter() - started)
        return took

    return call_flow(many)


def measure(preset: str, overrides: tuple[str, ...]) -> dict[str, object]:
    """Run the pipeline in a fresh home and give the shares, the seconds per iteration and the cost of a task."""
    from flows.post_train import post_train
    from tasks.engine import call_flow
    from tasks.settings import find_home

    looker = Looker()
    looker.start()
    started, cpu = time.perf_counter(), time.process_time()
    refs = call_flow(post_train, preset=preset, overrides=overrides)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    looker.stop()
    root = find_home().root
    rows = [
        row
        for name in ("grpo", "ppo")
        if name in refs
        for row in json.loads((root / refs[name].uri / "history.json").read_text(encoding="utf-8"))
    ]
    parts = shares(looker.in_iterations)
    in_iterations = looker.seconds * looker.in_iterations.total() / looker.total.total()
    tasks = seconds_per_task(count=100)
    return {
        "wall_seconds": round(wall, 1),
        "start_up_seconds": round(wall - looker.seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "whole_run": shares(looker.total),
        "iterations": parts,
        "iterations_counted": len(rows),
        "seconds_per_iteration": in_iterations / len(rows),
        "of_these_outside_rlcore": in_iterations / len(rows) * (1.0 - parts["rlcore"]),
        "milliseconds_per_task": {
            "median": 1e3 * statistics.median(tasks), "p90": 1e3 * statistics.quantiles(tasks, n=10)[8]
        },
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--home", type=Path, help="an empty folder to keep the run's state in; else it is temporary")
    options = parser.parse_args(arguments)
    from tasks.settings import Home, configure_environment, configure_logging

    with tempfile.TemporaryDirectory(prefix="rlcore-overhead-", ignore_cleanup_errors=True) as folder:
        configure_environment(Home(options.home or Path(folder)))
        configure_logging()
        print(json.dumps(measure(options.preset, tuple(options.set)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
