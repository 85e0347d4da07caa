"""The preset towns_agent on a micro model: a program plays, is trained, evaluated and checked; books stay exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder, kill_when
from tests.flows.test_agentic import SETTINGS
from tests.flows.warm import run_warm

pytestmark = pytest.mark.slow

ITERATIONS = 3
OWN = (
    "data.prompts.num_train=64",
    f"stages.grpo.num_iterations={ITERATIONS}",
    "stages.grpo.eval_every=3",
    "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",  # right answers are rare so early
)
EPISODES = 4 * 4
ARGUMENTS = [part for each in (*SETTINGS, *OWN) for part in ("--set", each)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run."""
    home = tmp_path_factory.mktemp("towns_agent")
    done = run_warm(["run", "--preset", "towns_agent", *ARGUMENTS], environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    return home


def books(home: Path) -> list[tuple[int, int, int]]:
    """Return per iteration the number of episodes, of their prompts, and of the counted rollouts."""
    history = json.loads((folder(home, "grpo") / "history.json").read_text())
    found = []
    for row in history:
        table = read_table(folder(home, "grpo") / "rollouts" / f"iteration-{row['iteration']:05d}.parquet")
        episodes = table[table["branch"] == 0]
        places = episodes.groupby("prompt_id").size()
        found.append((len(episodes), len(places), int(row["rollouts/count"])))
    return found


def test_what_the_program_sends_is_read_and_not_trained(home: Path) -> None:
    table = read_table(folder(home, "grpo") / "rollouts" / "iteration-00001.parquet")
    called = table[table["text"].str.contains("[search] ", regex=False)]
    assert len(called) > 0
    for row in called.itertuples():
        own = list(row.loss_mask)
        assert own[0] and own[-1] and not all(own)
        assert all(logprob == 0.0 for logprob, is_own in zip(row.sampler_logprobs, own, strict=True) if not is_own)
    history = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert all(1.0 <= row["agents/calls"] <= 2.0 and row["agents/failed"] == 0.0 for row in history)
    assert all(row["mismatch/max_abs"] < 1e-3 for row in history)
    assert books(home) == [(EPISODES, 4, EPISODES)] * ITERATIONS


def test_checkpoints_are_evaluated_by_the_same_program(home: Path) -> None:
    answers = read_table(folder(home, "evaluate_sft") / "answers.parquet")
    assert answers["completion"].str.contains("[search] ", regex=False).any()


def test_its_version_is_made_once_more_with_the_files_of_the_agent(home: Path) -> None:
    """Agents answer at their own pace, so that other completions share a batch: the weights may differ in bits."""
    done = run_warm(["reproduce", "towns_agent-grpo/1"], environment(home), ROOT)
    assert f"iteration {ITERATIONS}/{ITERATIONS}" in done.stderr, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("gone", "changed", "sft"))] == []


def test_a_run_that_was_killed_resumes_with_exact_books(home: Path, tmp_path: Path) -> None:
    code = f"from rlcore.flows.run import run_targets; run_targets('towns_agent', {(*SETTINGS, *OWN)!r}, ['grpo'])"
    command = [sys.executable, "-c", code]
    kill_when(tmp_path, "work/*/checkpoints/step-000001", command)
    done = subprocess.run(command, env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False)
    assert "resume: after iteration" in done.stderr, done.stderr
    assert books(tmp_path) == books(home)


def test_agent_check_shows_the_calls_of_some_episodes(home: Path) -> None:
    done = run_warm(["agent-check", "towns_agent", "--episodes", "2", *ARGUMENTS], environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("towns-") for line in lines) == 2
    assert any(line.startswith("  1 chat") for line in lines)
    assert lines[-1] == "2 of 2 episodes are sound"


def test_agent_check_names_what_is_wrong(home: Path) -> None:
    broken = "stages.grpo.sampling.agent.command=['python','-c','print(1); 1/0']"
    done = run_warm(["agent-check", "towns_agent", *ARGUMENTS, "--set", broken], environment(home), ROOT)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "warning: 3 of 3 agents had no call answered" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 of 3 episodes are sound"


def test_agent_check_trains_nothing(tmp_path: Path) -> None:
    done = run_warm(["agent-check", "towns_agent", *ARGUMENTS], environment(tmp_path), ROOT)
    assert done.returncode == 2
    assert "stages.grpo needs sft, which has no result yet" in done.stderr
    base = [*ARGUMENTS, "--set", "stages.grpo.init_from=base", "--episodes", "1"]
    done = run_warm(["agent-check", "towns_agent", *base], environment(tmp_path), ROOT)
    assert done.stdout.count("towns-") >= 1, done.stderr
    assert not list(tmp_path.glob("cache/sft/*"))
