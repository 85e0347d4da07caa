"""A command that is killed again and again until it ends by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.killer import VARIABLE
from tests.flows.conftest import ROOT, environment
from tests.flows.warm import run_warm

COMMAND, TOY, TABLES = "rlcore.flows.cli.app:main", "tests.chaos.toy:main", "tests.chaos.tables:main"
KILLED = -9


def run_killed(
    arguments: Sequence[str],
    home: Path,
    ledger: Path,
    *,
    plan: str,
    variables: Mapping[str, str] | None = None,
    call: str = COMMAND,
) -> int:
    """Start the command until it ends; how many kills that took.

    ``plan``: percent of the events that kill and a seed (``3:5``), or a point of the stage runner (``noted``).

    Raises:
        AssertionError: it ended by itself with an error.
    """
    env = environment(home) | {VARIABLE: f"{ledger}:{plan}"} | dict(variables or {})
    kills = 0
    while True:
        done = run_warm(arguments, env, ROOT, call=call)
        if done.returncode == 0:
            return kills
        last = ledger.read_text(encoding="utf-8").splitlines()[-1:] if ledger.exists() else []
        assert done.returncode == KILLED, f"after {kills} kills, the last at {last}:\n{done.stdout}{done.stderr}"
        kills += 1
