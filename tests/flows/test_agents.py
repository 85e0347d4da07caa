"""Agents that are programs: the preset towns_agent, and the page on own agents with its three programs."""

from __future__ import annotations

import json
import re
import runpy
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.agents import requests
from rlcore.flows.cli.app import main
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, environment, ran
from tests.flows.homes import folder, kill_when
from tests.flows.test_agentic import SETTINGS, history_of, masks
from tests.flows.test_tutorials import BLOCK, FOLDER, PAGES, with_overrides
from tests.flows.warm import run_warm
from tests.rlcore.agents.gateways import names_read
from tests.rlcore.sandbox.conftest import require_bubblewrap

ITERATIONS = 3
TOWNS = (
    "data.prompts.num_train=64",
    f"stages.grpo.num_iterations={ITERATIONS}",
    "stages.grpo.eval_every=3",
    "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",  # right answers are rare so early
)
EPISODES = 4 * 4
ARGUMENTS = [part for each in (*SETTINGS, *TOWNS) for part in ("--set", each)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("towns_agent")
    ran(home, "towns_agent", *SETTINGS, *TOWNS)
    return home


def books(played: Path) -> list[tuple[int, int, int]]:
    found = []
    for row in history_of(played):
        table = read_table(folder(played, "grpo") / "rollouts" / f"iteration-{row['iteration']:05d}.parquet")
        episodes = table[table["branch"] == 0]
        places = episodes.groupby("prompt_id").size()
        found.append((len(episodes), len(places), int(row["rollouts/count"])))
    return found


@pytest.mark.slow
def test_what_the_program_sends_is_read_and_not_trained_and_checkpoints_are_evaluated_by_it(played: Path) -> None:
    called, _ = masks(played, "search", 1)
    assert all(mask[-1] for mask in called)
    assert all(1.0 <= row["agents/calls"] <= 2.0 and row["agents/failed"] == 0.0 for row in history_of(played))
    assert books(played) == [(EPISODES, 4, EPISODES)] * ITERATIONS
    answers = read_table(folder(played, "evaluate_sft") / "answers.parquet")
    assert answers["completion"].str.contains("[search] ", regex=False).any()


@pytest.mark.slow
def test_its_version_is_made_once_more_with_the_files_of_the_agent(played: Path) -> None:
    """Agents answer at their own pace, so that other completions share a batch: the weights may differ in bits."""
    done = run_warm(["reproduce", "towns_agent-grpo/1"], environment(played), ROOT)
    assert f"iteration {ITERATIONS}/{ITERATIONS}" in done.stderr, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("gone", "changed", "sft"))] == []


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_with_exact_books(played: Path, tmp_path: Path) -> None:
    code = f"from rlcore.flows.run import run_targets; run_targets('towns_agent', {(*SETTINGS, *TOWNS)!r}, ['grpo'])"
    command = [sys.executable, "-c", code]
    kill_when(tmp_path, "work/*/checkpoints/step-000001", command)
    done = subprocess.run(command, env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False)
    assert "resume: after iteration" in done.stderr, done.stderr
    assert books(tmp_path) == books(played)


@pytest.mark.slow
def test_agent_check_shows_the_calls_of_some_episodes(played: Path) -> None:
    done = run_warm(["agent-check", "towns_agent", "--episodes", "2", *ARGUMENTS], environment(played), ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("towns-") for line in lines) == 2
    assert any(line.startswith("  1 chat") for line in lines)
    assert lines[-1] == "2 of 2 episodes are sound"


@pytest.mark.slow
def test_agent_check_names_what_is_wrong(played: Path) -> None:
    broken = "stages.grpo.sampling.agent.command=['python','-c','print(1); 1/0']"
    done = run_warm(["agent-check", "towns_agent", *ARGUMENTS, "--set", broken], environment(played), ROOT)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "warning: 3 of 3 agents had no call answered" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 of 3 episodes are sound"


@pytest.mark.slow
def test_agent_check_trains_nothing(tmp_path: Path) -> None:
    done = run_warm(["agent-check", "towns_agent", *ARGUMENTS], environment(tmp_path), ROOT)
    assert done.returncode == 2
    assert "stages.grpo needs sft, which has no result yet" in done.stderr
    base = [*ARGUMENTS, "--set", "stages.grpo.init_from=base", "--episodes", "1"]
    done = run_warm(["agent-check", "towns_agent", *base], environment(tmp_path), ROOT)
    assert done.stdout.count("towns-") >= 1, done.stderr
    assert not list(tmp_path.glob("cache/sft/*"))


TEXT = (FOLDER / "own-agent.md").read_text(encoding="utf-8")
PAGE_COMMANDS = PAGES["own-agent"].commands
SMALL = (
    *SETTINGS,
    "data.demonstrations.options.direct_share=0.0",  # so that most episodes search
    "stages.grpo.prompts_per_iteration=2",
    "stages.grpo.group_size=2",
    "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",  # right answers are rare so early
    "evaluation.num_problems=2",
    "evaluation.num_sampled_problems=1",
    "evaluation.num_monitor_problems=1",
)
PAGE_EPISODES = 2 * 2  # of an iteration


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder with the presets of the page, and the programs that its script copies."""
    here = tmp_path_factory.mktemp("own_agent")
    for name, text in PAGES["own-agent"].files.items():
        (here / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        runpy.run_path("make_towns.py")
    return here


def test_what_the_page_shows_of_the_programs_is_in_them(here: Path) -> None:
    shown = [text for kind, title, text in BLOCK.findall(TEXT) if kind in ("python", "sh") and not title]
    programs = [(here / name).read_text(encoding="utf-8") for name in re.findall(r"`(towns_\w+\.\w+)`", TEXT)]
    assert len(programs) == 3
    assert all(text in program for text, program in zip(shown, programs, strict=True))
    assert len(programs[-1].splitlines()) == 15


def test_the_page_names_every_parameter_that_is_served_decided_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        row.split("|")[1].strip().partition(" ")[0]: set(re.findall(r"`(\w+)`", row))
        for row in re.findall(r"^\| (?:served|decided|refused) .*$", TEXT, re.MULTILINE)
    }
    assert rows["served"] - {"required", "auto"} == names_read(monkeypatch) - {
        "model",
        *requests.OFFER.refused,
        *requests.OFFER.ignored,
    }
    assert rows["decided"] == requests.DECIDED_BY_THE_RUN
    assert rows["refused"] == set(requests.OFFER.refused)


def test_an_untrained_model_is_reached_by_the_agent_of_the_sdk(
    here: Path, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_bubblewrap()
    monkeypatch.chdir(here)
    (check,) = [command for command in PAGE_COMMANDS if command[0] == "agent-check" and "--set" in command]
    assert main([*with_overrides(check, SMALL), "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  1 responses ") for line in lines) == 2
    assert lines[-1] == "2 of 2 episodes are sound"


@pytest.fixture(scope="module")
def trained(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of the runs of the page; all but the first begin with the data and the SFT of the first."""
    require_bubblewrap()
    home = tmp_path_factory.mktemp("trained")
    for command in PAGE_COMMANDS:
        if command[0] == "run":
            done = run_warm(with_overrides(command, SMALL), environment(home), here)
            assert done.returncode == 0, done.stderr
    return home


@pytest.mark.slow  # three minutes on two cores
@pytest.mark.parametrize("program", ["towns_openai_agents.py", "towns_langgraph.py", "towns_agent.sh"])
def test_every_planned_episode_of_a_program_is_in_the_books(trained: Path, program: str) -> None:
    artifact, _ = grpo_of(trained, program)
    history = json.loads((artifact / "history.json").read_text(encoding="utf-8"))
    assert [row["iteration"] for row in history] == [1, 2]
    for row in history:
        table = read_table(artifact / "rollouts" / f"iteration-{row['iteration']:05d}.parquet")
        assert len(table) == row["rollouts/count"] == PAGE_EPISODES
        assert set(table.groupby("prompt_id").size()) == {2}
        assert row["agents/failed"] == row["agents/timed_out"] == row["agents/late_calls"] == 0.0


@pytest.mark.slow
def test_a_trace_of_an_episode_with_a_search_is_a_tree_of_its_turns(trained: Path) -> None:
    for program in ("towns_openai_agents.py", "towns_langgraph.py"):
        trees = traces(trained, grpo_of(trained, program)[1])
        assert {"rollout": ("turn 1", "turn 2")} in trees


@pytest.mark.slow
def test_the_calls_of_a_trained_model_are_shown(trained: Path, here: Path) -> None:
    (check,) = [command for command in PAGE_COMMANDS if command[0] == "agent-check" and "--set" not in command]
    done = run_warm(with_overrides(check, SMALL), environment(trained), here)
    assert done.returncode == 0, done.stderr
    assert "'<tool:search>" in done.stdout and done.stdout.splitlines()[-1] == "3 of 3 episodes are sound"


def grpo_of(home: Path, program: str) -> tuple[Path, str]:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (home / "cache" / "grpo").glob("*.json")]
    (ref,) = [record["ref"] for record in records if program in record["ingredients"]["external"]]
    return home / ref["uri"], ref["mlflow_run_id"]


def traces(home: Path, run_id: str) -> list[dict[str, tuple[str, ...]]]:
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        rows = database.execute(
            "SELECT child.trace_id, parent.name, child.name FROM spans child JOIN spans parent "
            "ON parent.trace_id = child.trace_id AND parent.span_id = child.parent_span_id "
            "JOIN trace_tags tag ON tag.request_id = child.trace_id AND tag.key = 'of_run' AND tag.value = ? "
            "ORDER BY child.trace_id, child.start_time_unix_nano",
            (run_id,),
        ).fetchall()
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for trace, parent, child in rows:
        tree = found.setdefault(trace, {})
        tree[parent] = (*tree.get(parent, ()), child)
    return list(found.values())
