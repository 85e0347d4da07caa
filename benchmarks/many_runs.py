"""What becomes of pages and commands when MLflow holds many runs: ``python -m benchmarks.many_runs``.

A small run of the preset tiny is made in a home of its own, and its commands are timed. Then its GRPO run is made long
and copied within the database (``--runs`` 100, ``--steps`` 1000), and everything is timed again. Prints a table of
processor seconds; what a server's page needs is what its requests to the store take.
"""

from __future__ import annotations

import argparse
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.home.settings import Home
from tasks.tracking.runs import open_tracker

ROUNDS = 3
OF_A_RUN = ("runs", "params", "tags", "latest_metrics", "metrics")
SMALL = (
    "hardware.num_threads=1",
    "without=['stages.ppo']",
    "data.prompts.num_train=200",
    "data.demonstrations.num_train=800",
    "data.preferences.num_train=64",
    "data.preferences.num_eval=32",
    "stages.sft.num_steps=20",
    "stages.reward_model.min_accuracy=0.0",
    "stages.grpo.num_iterations=4",
    "stages.grpo.eval_every=2",
    "evaluation.num_problems=40",
    "evaluation.num_samples=0",
)
FIRST = ("promotion.min_accuracy=0.0", "promotion.max_truncated=1.0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlcore-many-runs-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        command(home, "run", "--preset", "tiny", *overrides(SMALL))
        command(home, "promote", "--preset", "tiny", *overrides((*SMALL, *FIRST)))
        few = figures(home)
        points = fill(home, runs=options.runs, steps=options.steps)
        many = figures(home)
        size = (home / "mlflow.db").stat().st_size / 2**20
    print(f"| processor seconds | one run | {options.runs} runs more, of {options.steps} steps |\n|---|---|---|")
    for label in few:
        print(f"| {label} | {few[label]:.2f} | {many[label]:.2f} |")
    print(f"\n{points:,} points more, {size:,.0f} MiB of database; the least of {ROUNDS} each.")
    return 0


def overrides(settings: tuple[str, ...]) -> list[str]:
    """Settings as a command takes them."""
    return [part for setting in settings for part in ("--set", setting)]


def command(home: Path, *arguments: str) -> float:
    """Processor seconds of a command, its children's too."""
    variables = {**os.environ, "RLCORE_HOME": str(home), "RLCORE_ENGINE": "inline", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "flows", *arguments], check=True, env=variables, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(home: Path) -> dict[str, float]:
    """What each thing takes that a user waits for."""
    client = open_tracker(Home(home)).client
    (experiment,) = (each.experiment_id for each in client.search_experiments() if each.name == "tiny")
    run = the_run(home)
    work: dict[str, Callable[[], float]] = {
        "the table of runs": timed(lambda: client.search_runs([experiment], max_results=100)),
        "one curve": timed(lambda: client.get_metric_history(run, "reward/mean")),
        "all curves of a run": timed(lambda: [client.get_metric_history(run, name) for name in curves(client, run)]),
        "`rlcore plan`": lambda: command(home, "plan", "--preset", "tiny", *overrides(SMALL)),
        "`rlcore run`, all cached": lambda: command(home, "run", "--preset", "tiny", *overrides(SMALL)),
        "`rlcore lineage`": lambda: command(home, "lineage", "tiny-grpo@champion"),
        "`rlcore promote`, judged before": lambda: command(
            home, "promote", "--preset", "tiny", *overrides((*SMALL, *FIRST))
        ),
    }
    return {label: min(measure() for _ in range(ROUNDS)) for label, measure in work.items()}


def curves(client: Any, run: str) -> list[str]:
    """The names of a run's metrics."""
    return sorted(client.get_run(run).data.metrics)


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """What gives the processor seconds of ``work``."""

    def measure() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return measure


def the_run(home: Path) -> str:
    """The run of the GRPO stage."""
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        query = "SELECT run_uuid FROM runs WHERE name = 'grpo' AND status = 'FINISHED'"
        return str(database.execute(query).fetchone()[0])


def fill(home: Path, *, runs: int, steps: int) -> int:
    """Make the curves of the GRPO run ``steps`` long, and copies of it; how many points that adds."""
    run = the_run(home)
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        (before,) = database.execute("SELECT count(*) FROM metrics").fetchone()
        columns = '"key", value, timestamp, run_uuid, step, is_nan'
        last = f"SELECT {columns} FROM latest_metrics WHERE run_uuid = ? AND step > 0"
        for key, value, moment, owner, step, is_nan in database.execute(last, (run,)).fetchall():
            more = ((key, value + n, moment + n, owner, n, is_nan) for n in range(step + 1, steps + 1))
            database.executemany(f"INSERT INTO metrics ({columns}) VALUES (?, ?, ?, ?, ?, ?)", more)
            database.execute(
                "UPDATE latest_metrics SET step = ? WHERE run_uuid = ? AND key = ?", (max(step, steps), owner, key)
            )
        for number in range(runs):
            for table in OF_A_RUN:
                _copy(database, table, run, f"{uuid.uuid5(uuid.NAMESPACE_URL, str(number)).hex}")
        database.commit()
        (after,) = database.execute("SELECT count(*) FROM metrics").fetchone()
    return int(after - before)


def _copy(database: sqlite3.Connection, table: str, run: str, copy: str) -> None:
    names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    given = ", ".join("?" if name == "run_uuid" else f'"{name}"' for name in names)
    wanted = ", ".join(f'"{name}"' for name in names)
    # A stage's key stands in the tags of the run that has made its result, and of no other.
    beside = " AND key NOT LIKE 'stage%'" if table == "tags" else ""
    query = f"INSERT INTO {table} ({wanted}) SELECT {given} FROM {table} WHERE run_uuid = ?{beside}"
    database.execute(query, (copy, run))


if __name__ == "__main__":
    sys.exit(main())
