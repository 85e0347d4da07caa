"""``python -m tests.soak.year``: daily retrainings for a year; what grows, and what ``rlcore gc`` brings back?

Every day has new rows, a policy that starts from the champion, an evaluation and a decision, through the real store,
cache, tracking and registry. Two of three become champion. Then all times are moved as if a day had passed between two
runs. Prints the size of the state and the processor time of commands, before and after a collection.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home, configure_environment
from rlcore.tasks.tracking.lineage import read_records
from tests.tasks.operations.daily import DAY, NAME, PRESET, retrain

COMMANDS: Mapping[str, Sequence[str]] = {
    "--help": ["--help"],
    "plan": ["plan", PRESET],
    "show": ["show", PRESET],
    "show a version": ["show", f"{NAME}@champion"],
    "lineage": ["lineage", f"{NAME}@champion"],
    "gc": ["gc"],
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a state directory: bytes on the disk, files and folders, bytes of MLflow's database."""

    bytes: int
    names: int
    database: int


def live(home: Home, days: Iterable[int]) -> list[float]:
    """Retrain every day; return when each run began."""
    begun = []
    for day in days:
        begun.append(time.time())
        retrain(home, day, is_better=day % 3 < 2)
        if day % 20 == 19:
            sys.stderr.write(f"day {day + 1}: {begun[-1] - begun[0]:.0f} s, {size_of(home)}\n")
    return begun


def spread(home: Home, begun: Sequence[float]) -> None:
    """Move all times as if a day had passed between two runs, and the last were of today."""

    def moved(at: float) -> float:
        number = sum(start <= at for start in begun)
        return at - (len(begun) - number) * DAY

    cache = StageCache(home.cache)
    for record in read_records(home):
        created = datetime.fromtimestamp(moved(datetime.fromisoformat(record.created).timestamp()), UTC)
        older = replace(record, created=created.isoformat(timespec="milliseconds"))
        path = home.cache / record.ingredients["stage"]["name"] / f"{record.key}.json"
        at = path.stat().st_mtime
        cache.write(record.ingredients["stage"]["name"], older)
        os.utime(path, (at, at))
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database, database:
        database.create_function("moved", 1, lambda at: at and int(moved(at / 1000) * 1000))
        for table, column in (("model_versions", "creation_time"), ("runs", "start_time"), ("runs", "end_time")):
            database.execute(f"UPDATE {table} SET {column} = moved({column})")
    for path in sorted(home.root.rglob("*"), reverse=True):
        at = moved(path.stat(follow_symlinks=False).st_mtime)
        os.utime(path, (at, at), follow_symlinks=False)


def size_of(home: Home) -> Size:
    """Measure a state directory; a file with two names counts once."""
    facts = [path.stat(follow_symlinks=False) for path in home.root.rglob("*")]
    blocks = {(fact.st_dev, fact.st_ino): fact.st_blocks * 512 for fact in facts}
    return Size(bytes=sum(blocks.values()), names=len(facts), database=(home.root / "mlflow.db").stat().st_size)


def seconds_of(home: Home, arguments: Sequence[str]) -> float:
    """Return the processor seconds of a command: the smaller of two."""
    env = os.environ | {"RLCORE_HOME": str(home.root), "RLCORE_ENGINE": "inline", "OMP_NUM_THREADS": "1"}
    env.pop("MLFLOW_TRACKING_URI", None)
    found = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "rlcore.flows", *arguments], env=env, stdout=subprocess.DEVNULL
        )
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        found.append(usage.ru_utime + usage.ru_stime)
    return min(found)


def report(stages: Mapping[str, tuple[Size, Mapping[str, float]]]) -> str:
    """Return the table."""
    lines = [f"| after | {' | '.join(stages)} |", f"|---|{'---|' * len(stages)}"]
    rows: dict[str, list[str]] = {}
    for size, seconds in stages.values():
        rows.setdefault("disk, MiB", []).append(f"{size.bytes / 2**20:.1f}")
        rows.setdefault("files and folders", []).append(f"{size.names:,}")
        rows.setdefault("mlflow.db, MiB", []).append(f"{size.database / 2**20:.1f}")
        for name, each in seconds.items():
            rows.setdefault(f"rlcore {name}, s of a processor", []).append(f"{each:.2f}")
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in rows.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--keep", type=Path, help="folder for the state, which stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlcore-year-") as folder:
        home = Home((options.keep or Path(folder)) / "home")
        os.environ["RLCORE_ENGINE"] = "inline"
        configure_environment(home)
        stages = {}
        begun = live(home, [0])
        stages["1 day"] = (size_of(home), timings(home))
        begun += live(home, range(1, options.days))
        spread(home, begun)
        stages[f"{options.days} days"] = (size_of(home), timings(home))
        command = [sys.executable, "-m", "rlcore.flows", "gc", "--delete"]
        subprocess.run(command, check=True)
        stages["gc"] = (size_of(home), timings(home))
        print(report(stages))
    return 0


def timings(home: Home) -> dict[str, float]:
    """Return the processor seconds of every command."""
    return {name: seconds_of(home, arguments) for name, arguments in COMMANDS.items()}


if __name__ == "__main__":
    sys.exit(main())
