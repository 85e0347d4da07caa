"""Budget of a run: the amounts that it has spent, and the stop at a limit.

A period is one run of a preset with its resumes: it begins with the first attempt at a command with these values, its
budget apart, and ends when an attempt completes. Each attempt has a file in ``budgets/``, written every few seconds, so
that a kill loses no more than that; each finished stage has another.

In an RL run a reached limit is raised like an interruption, so that the loop writes a checkpoint of its last iteration.
With prefetch or several ranks it writes none, and the run resumes from its newest checkpoint.
Outside of the stage it is an error with a fix, and Prefect shows the run as failed, not as crashed: nothing heals it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

from rlcore.config import to_dict
from rlcore.errors import StorageError
from rlcore.tasks.keys.cache_keys import key_of
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import BudgetConfig
from rlcore.tasks.run.prefect_bridge import report_progress, run_as_task
from rlcore.tasks.store.settings import BudgetReachedError, Home
from rlcore.tasks.store.storage import read_column, read_json, write_json
from rlcore.tasks.store.toml_files import read_prices

R = TypeVar("R")
WRITE_SECONDS = 5.0  # between two writes of an attempt's file


class _LimitReached(KeyboardInterrupt):
    """A reached limit, within a stage."""

    def __init__(self, key: str, text: str, *, higher: str) -> None:
        super().__init__(text)
        self.key, self.text, self.higher = key, text, higher


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Amounts of a period, or of one attempt."""

    seconds: float = 0.0
    tokens: float = 0.0
    judge_cost: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Meter:
    """Amounts of the running attempt, added to those of the earlier ones in ``folder``, and their limits."""

    def __init__(self, folder: Path, limits: BudgetConfig, price: float) -> None:
        self._path, self._limits, self._price = folder / f"{uuid.uuid4().hex}.json", limits, price
        self._earlier = sum(map(_read, folder.glob("*.json")), start=Spent())
        self._began, self._counted = time.monotonic(), Spent()

    @property
    def spent(self) -> Spent:
        return self._earlier + self._own

    @property
    def _own(self) -> Spent:
        return self._counted + Spent(seconds=time.monotonic() - self._began)

    def add(self, spent: Spent) -> None:
        self._counted += spent

    def write(self) -> None:
        write_json(vars(self._own), self._path)

    def check(self, before: str) -> None:
        """Raise an interruption if a limit is reached; ``before``: the work that is not begun."""
        now = self.spent
        hours = now.seconds / 3600.0
        amounts = {"hours": hours, "cost": hours * self._price, "judge_cost": now.judge_cost, "tokens": now.tokens}
        for key, amount in amounts.items():
            limit = getattr(self._limits, key)
            if limit is not None and amount >= limit:
                text = ", ".join(f"{name} {_shown(name, value)}" for name, value in amounts.items() if value)
                text = f"budget.{key} = {limit:g} is reached (spent: {text}); stopped before {before}"
                raise _LimitReached(f"budget.{key}", text, higher=_raised(limit, amount))

    def run_task(self, name: str, number: int, work: Callable[[], R]) -> R:
        self.check(f"{name} {number}")
        return run_as_task(name, number, work)

    def report_progress(self, label: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None:
        self.add(Spent(tokens=(metrics or {}).get("rollouts/tokens", 0.0)))
        report_progress(label, done, total, metrics)

    def count_stage(self, folder: Path, work: Path, metrics: Mapping[str, float]) -> None:
        """Add what a finished stage has sampled besides RL, and the cost of its judge: once, whatever kills it then."""
        spent = Spent(tokens=_sampled_tokens(folder, work), judge_cost=metrics.get("win_rate/cost", 0.0))
        counted = self._path.with_name(f"{work.name}.json")
        self._earlier += Spent() if counted.exists() else spent
        write_json(vars(spent), counted)

    @contextmanager
    def stops(self, preset: str, stage: str) -> Iterator[None]:
        """Check the limits, then turn a stop of the block into an error.

        Raises:
            BudgetReachedError: a limit is reached.
        """
        try:
            self.check(f"the stage {stage}")
            yield
        except _LimitReached as stop:
            limit = f"{stop.key}={stop.higher}"
            raise BudgetReachedError(stop.text, where=f"{stage} of {preset}", fix=limit) from None


@contextmanager
def metered(home: Home, config: RunConfig) -> Iterator[Meter]:
    """Measure an attempt while the block runs.

    Raises:
        ConfigError: the prices cannot be read.
    """
    price = read_prices(home).of(known_machine(config.hardware).facts) or 0.0
    meter, ended = Meter(_folder(home, config), config.budget, price), threading.Event()
    thread = threading.Thread(target=_write_until, args=(meter, ended), name="budget", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        ended.set()
        thread.join()


@contextmanager
def budget_period(home: Home, config: RunConfig, *, resume: Callable[[str], str]) -> Iterator[None]:
    """End the period if the block completes. ``resume`` returns the command that resumes it with a higher limit."""
    try:
        yield
    except BudgetReachedError as error:
        raise BudgetReachedError(error.what, where=error.where, fix=f"resume it: {resume(error.fix)}") from None
    rmtree(_folder(home, config), ignore_errors=True)


def unlimited(config: RunConfig) -> RunConfig:
    """Return a preset without its budget, which changes neither results nor the identity of a run."""
    return dataclasses.replace(config, budget=BudgetConfig())


def _folder(home: Home, config: RunConfig) -> Path:
    return home.root / "budgets" / f"{config.name}-{key_of(to_dict(unlimited(config)))[:16]}"


def _read(path: Path) -> Spent:
    with suppress(StorageError, TypeError):  # of another version
        return Spent(**read_json(path))
    return Spent()


def _write_until(meter: Meter, ended: threading.Event) -> None:
    while True:
        is_over = ended.wait(WRITE_SECONDS)
        with suppress(StorageError):  # the run itself ends on a full disk
            meter.write()
        if is_over:
            return


def _sampled_tokens(folder: Path, work: Path) -> float:
    answers = folder / "answers.parquet"
    counts = (sum(rows) for rows in read_column(answers, "num_tokens")) if answers.is_file() else ()
    chunks = (ids for path in work.glob("chunks/*.parquet") for ids in read_column(path, "completion_ids"))
    return float(sum(counts) + sum(len(each) for ids in chunks for each in ids))


def _shown(key: str, value: float) -> str:
    return f"{value:,.0f}" if key == "tokens" else f"{value:.4g}"


def _raised(limit: float, amount: float) -> str:
    higher = max(2 * limit, limit + amount)
    return f"{math.ceil(higher)}" if isinstance(limit, int) else f"{math.ceil(1000 * higher) / 1000:.3f}"
