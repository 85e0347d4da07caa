"""What orchestration costs: the share of a run's time that is spent outside of rlcore, and milliseconds per task.

``python -m benchmarks.overhead [--preset tiny] [--set key=value]`` runs the pipeline under the engine that
``RLCORE_ENGINE`` names while a thread looks, a hundred times a second, at what the working thread is in. Start-up
(imports, the API) is over when the pipeline begins. The wall and processor seconds since the last look count for the
innermost part of ours on the stack, so the work of a library counts for whoever called it. On a machine with other
work the processor seconds are the ones to compare; those of the threads beside the pipeline's (what MLflow and Prefect
write in the background) are a part of their own, all of it outside of rlcore.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 0.01  # between two looks
ITERATION, PIPELINE = "iterate", "run_pipeline"
BESIDE = "other threads"
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


@dataclass
class Seconds:
    """Seconds by part, of one clock each."""

    wall: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)

    def shares(self) -> dict[str, dict[str, float]]:
        """Shares by part."""
        return {"wall": shares(self.wall), "cpu": shares(self.cpu)}


class Looker(threading.Thread):
    """Says where the pipeline's thread spends its time, within iterations of RL and in all."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.total, self.in_iterations = Seconds(), Seconds()
        self._places: dict[CodeType, str] = {}
        self._over = threading.Event()
        self._last: dict[str, float] = {}  # of each clock; none before the pipeline begins

    def run(self) -> None:
        while not self._over.wait(SECONDS):
            for thread, frame in sys._current_frames().items():
                if thread != self.ident:
                    self._look(thread, frame)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _look(self, thread: int, frame: FrameType) -> None:
        codes = list(_codes(frame))
        names = {code.co_name for code in codes if self._place(code) == "tasks"}
        if PIPELINE not in names:
            return
        now = _clocks(thread)
        passed = {clock: now[clock] - self._last.get(clock, now[clock]) for clock in now}
        self._last = now
        part = part_of([place for code in codes if (place := self._place(code))])
        for seconds in (self.total, self.in_iterations) if ITERATION in names else (self.total,):
            seconds.wall[part] += passed["wall"]
            seconds.cpu[part] += passed["pipeline"]
            seconds.cpu[BESIDE] += passed["process"] - passed["pipeline"] - passed["looker"]

    def _place(self, code: CodeType) -> str:
        if code not in self._places:
            self._places[code] = place_of(code.co_filename)
        return self._places[code]


def _clocks(thread: int) -> dict[str, float]:
    """The wall clock, and the processor seconds of the process, the thread that looks, and ``thread``."""
    return {
        "wall": time.perf_counter(),
        "process": time.process_time(),
        "looker": time.thread_time(),
        "pipeline": time.clock_gettime(time.pthread_getcpuclockid(thread)),
    }


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def shares(seconds: Counter[str]) -> dict[str, float]:
    """Share of the seconds by part."""
    return {part: spent / seconds.total() for part, spent in seconds.most_common()}


def seconds_per_task(*, count: int) -> list[float]:
    """Wall seconds of empty tasks in a flow of their own."""
    from prefect import flow

    from tasks.pipeline.bridge import call_flow, task

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
    from tasks.home.settings import find_home
    from tasks.pipeline.bridge import call_flow

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
    spent, count, tasks = looker.in_iterations, len(rows), seconds_per_task(count=100)
    return {
        "wall_seconds": round(wall, 1),
        "start_up_seconds": round(wall - looker.total.wall.total(), 1),
        "cpu_seconds": round(cpu, 1),
        "whole_run": looker.total.shares(),
        "iterations": spent.shares(),
        "iterations_counted": count,
        "wall_seconds_per_iteration": spent.wall.total() / count,
        "of_these_outside_rlcore": (spent.wall.total() - spent.wall["rlcore"]) / count,
        "cpu_seconds_per_iteration": spent.cpu.total() / count,
        "of_these_outside_rlcore_cpu": (spent.cpu.total() - spent.cpu["rlcore"]) / count,
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
    from tasks.home.settings import Home, configure_environment, configure_logging

    with tempfile.TemporaryDirectory(prefix="rlcore-overhead-", ignore_cleanup_errors=True) as folder:
        configure_environment(Home(options.home or Path(folder)))
        configure_logging()
        print(json.dumps(measure(options.preset, tuple(options.set)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
