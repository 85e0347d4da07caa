"""A user's environment in a run: the micro agentic preset, whose calculator is a class of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.flows.conftest import environment, states_of
from tests.flows.homes import folder
from tests.flows.test_agentic import SETTINGS
from tests.flows.warm import run_warm

CODE = '''
class Sums:
    def reset(self, prompt):
        self.has_asked = False

    def calculator(self, expression: str) -> int:
        """Multiplies two numbers.

        Args:
            expression: such as 47*86
        """
        first, _, second = expression.partition("*")
        if not (first.isdigit() and second.isdigit()):
            from rlcore.environments.base import CallError

            raise CallError("write two numbers, such as 47*86")
        self.has_asked = True
        return int(first) * int(second)

    def get_reward(self) -> float:
        return float(self.has_asked)
'''
OWN = (
    "stages.grpo.sampling.episodes.tools=[]",
    "stages.grpo.sampling.episodes.environment=sums:Sums",
    "stages.grpo.rewards=[{kind='environment'}]",
)


def arguments(command: str) -> list[str]:
    return [command, "--preset", "agentic", *(part for each in (*SETTINGS, *OWN) for part in ("--set", each))]


def test_a_users_environment_is_played_paid_evaluated_and_in_the_keys(tmp_path: Path) -> None:
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    (project / "sums.py").write_text(CODE, encoding="utf-8")
    done = run_warm(arguments("run"), environment(home), project)
    assert done.returncode == 0, done.stderr
    history = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert all(0.0 < row["episode/parsed"] <= 1.0 for row in history)
    assert any(row["reward/mean"] > 0.0 for row in history)
    assert all(row["mismatch/max_abs"] < 1e-3 for row in history)
    planned = states_of(run_warm(arguments("plan"), environment(home), project).stdout)
    assert (planned["sft"], planned["grpo"], planned["evaluate_grpo"]) == ("cached", "cached", "cached")
    (project / "sums.py").write_text(CODE.replace("float(self.has_asked)", "0.5"), encoding="utf-8")
    planned = states_of(run_warm(arguments("plan"), environment(home), project).stdout)
    assert (planned["sft"], planned["grpo"], planned["evaluate_sft"]) == ("cached", "run", "run")
