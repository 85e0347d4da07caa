"""Runs as users see them: progress, Ctrl-C, two at once, and what a change between two runs costs."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from tests.flows.conftest import ROOT, environment, flows_arguments, flows_command
from tests.flows.homes import kill_when, without
from tests.flows.micro import ONE_LAYER
from tests.flows.warm import run_warm
from tests.waiting import LONG

pytestmark = pytest.mark.slow


SHAPE = ShapeConfig(
    hidden_size=192, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=384, max_positions=256
)
FIRST_LINE_SECONDS = 5.0  # of processor time
PRESET = """extends = "chat"
name = "{name}"
[model]
source = "folder"
path = "model"
license = "MIT"
[data.prompts]
adapter = "prompts"
path = "train.jsonl"
num_train = 40
num_eval = 12
max_tokens = 128
[stages.grpo]
num_iterations = 2
prompts_per_iteration = 8
group_size = 8
sampling.max_new_tokens = 48
eval_every = 1
rewards = [{{ kind = "length", options = {{ limit = 40, buffer = 20 }} }}]
[evaluation]
num_problems = 12
max_new_tokens = 48
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Screen of a run until it ended, without control codes; processor seconds at its first line; its exit code."""

    screen: str
    first_line_seconds: float
    code: int


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder / "model", seed=0)
    rows = [
        {
            "prompt_id": f"p{n}",
            "messages": [{"role": "user", "content": f"{n} + {n}"}],
            "reference": f"{2 * n}",
            "task": "t",
        }
        for n in range(60)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("mine", "other"):
        (folder / f"{name}.toml").write_text(PRESET.format(name=name))
    return folder


def variables_of(**more: str) -> dict[str, str]:
    ours = ("RLCORE_HOME", "RLCORE_ENGINE")
    kept = {name: value for name, value in environment(ROOT).items() if name not in ours}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlcore.flows", *arguments]


def watch(folder: Path, arguments: Sequence[str], *, interrupt_at: str) -> Seen:
    """Run a command on a terminal of 140 columns, and press Ctrl-C when it shows ``interrupt_at``."""
    ours, theirs = pty.openpty()
    variables = variables_of(TERM="xterm-256color", COLUMNS="140", LINES="30")
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=variables,
        stdout=theirs,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs)
    screen, seconds, is_pressed = "", 0.0, False
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed: EIO on Linux
            break
        if not part:
            break
        if not screen:
            times = psutil.Process(process.pid).cpu_times()
            seconds = times.user + times.system
        screen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part.decode(errors="replace"))
        if not is_pressed and interrupt_at in screen:
            is_pressed = True
            os.killpg(process.pid, signal.SIGINT)
    os.close(ours)
    return Seen(screen=screen, first_line_seconds=seconds, code=process.wait(LONG))


@pytest.fixture(scope="module")
def seen(project: Path) -> Seen:
    return watch(project, command("run", "mine.toml"), interrupt_at="grpo: iteration 1/2")


def test_the_first_line_says_what_begins_before_the_slow_imports(seen: Seen, project: Path) -> None:
    assert seen.screen.startswith(f"mine: grpo from model; state in {project / '.rlcore'}")
    assert seen.first_line_seconds <= FIRST_LINE_SECONDS


def test_the_terminal_is_never_silent_between_the_start_and_the_end_of_the_first_iteration(seen: Seen) -> None:
    first = seen.screen[seen.screen.index("grpo: start") : seen.screen.index("grpo: iteration 1/2")]
    assert re.search(r"grpo iterations +─+ +0/2", first)
    assert re.search(r"grpo rollout +[━─]+ +\d+/64 answers +[\d,]+ tokens/s +\d+ s left", first)
    assert re.search(r"grpo update +[━─]+ +\d+/1 minibatches", first)


def test_an_iteration_is_one_line_and_no_line_is_for_developers(seen: Seen) -> None:
    assert seen.screen.count("grpo: iteration 1/2") == 1
    assert "DEBUG" not in seen.screen
    assert "Task run 'iteration 1'" not in seen.screen


def test_ctrl_c_ends_a_run_which_prefect_shows_as_cancelled(seen: Seen, project: Path) -> None:
    assert seen.code == 130
    assert seen.screen.rstrip().splitlines()[-1].startswith("interrupted; the same command resumes from ")
    with closing(sqlite3.connect(project / ".rlcore" / "prefect" / "prefect.db")) as database:
        assert database.execute("SELECT name, state_type FROM flow_run").fetchall() == [
            ("post-train mine.toml", "CANCELLED")
        ]


def test_two_runs_at_once_each_print_their_own_report_and_are_named_after_preset_and_stage(
    seen: Seen, project: Path
) -> None:
    runs = {
        name: subprocess.Popen(
            command("run", f"{name}.toml"),
            cwd=project,
            env=variables_of(RLCORE_ENGINE="inline"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("mine", "other")
    }
    for name, process in runs.items():
        output, _ = process.communicate()
        assert process.returncode == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("report ")]
        report = project / line.split(maxsplit=1)[1]
        assert f"<title>{name}: run report</title>" in report.read_text(encoding="utf-8")
    with closing(sqlite3.connect(project / ".rlcore" / "mlflow.db")) as database:
        names = {name for (name,) in database.execute("SELECT name FROM runs")}
        figures = "SELECT DISTINCT key FROM latest_metrics JOIN runs USING (run_uuid) WHERE name = 'other'"
        columns = {name for (name,) in database.execute(figures)}
    assert {"mine post-train", "mine import_sft", "mine grpo", "other"} <= names
    assert [name for name in names if not re.fullmatch("(mine|other)( [a-z_-]+)?", name)] == []
    assert {"accuracy/base", "accuracy/grpo"} <= columns  # of the runs at the top, so that presets can be compared


SMALL = (
    *ONE_LAYER,
    "without=['stages.ppo']",
    "stages.sft.num_steps=6",
    "stages.reward_model.audit_folds=0",
    "stages.grpo.rewards=[{kind='reward_model',stage='reward_model',weight=1.0}]",  # differs within groups
    "stages.grpo.sampling.max_new_tokens=8",
    "stages.grpo.eval_every=2",
    "stages.grpo.checkpoints.every_iterations=1",
    "data.prompts.num_train=60",
    "data.demonstrations.num_train=100",
    "evaluation.num_problems=16",
    "evaluation.num_samples=0",
    "evaluation.max_new_tokens=8",
)
ADAPTER = "rlcore.examples.arithmetic:ADAPTER"
WATCHED = (
    "stages.grpo.eval_every=1",
    "evaluation.num_problems=8",
    "evaluation.confidence=0.9",
    "evaluation.verifiers=[{kind='reward_model',stage='reward_model'}]",
    "health.action='warn'",
    "health.audit.action='off'",
)
OTHER_DATA = (
    f"data.more={{contract='prompts',adapter='{ADAPTER}',num_train=9,num_eval=8,max_tokens=96}}",
    "evaluation.data=['more']",
)
GRPO, STAGES = "stages.grpo", ("sft", "grpo", "evaluate_grpo")


def iterations(count: int) -> str:
    return f"{GRPO}.num_iterations={count}"


def started(home: Path, command: str, *overrides: str) -> str:
    done = run_warm(flows_arguments(command, *SMALL, *overrides), environment(home), ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def planned(home: Path, *overrides: str) -> dict[str, str]:
    lines = (line.split() for line in started(home, "plan", *overrides).splitlines())
    return {words[0]: " ".join(words[1:]) for words in lines if words and words[0] in STAGES}


def result(home: Path, count: int) -> dict[str, Any]:
    records = [json.loads(path.read_text()) for path in (home / "cache/grpo").glob("*.json")]
    (uri,) = (
        each["ref"]["uri"] for each in records if each["ingredients"]["config"]["stage"]["num_iterations"] == count
    )
    checkpoint = home / "checkpoints/tiny/grpo/checkpoints" / f"step-{count:06d}"
    tables = sorted((home / uri / "rollouts").glob("*.parquet"))
    costs = ("second", "memory", "tokens_per")
    return {
        "history": [
            {name: value for name, value in row.items() if not any(word in name for word in costs)}
            for row in json.loads((home / uri / "history.json").read_text())
        ],
        "rollouts": {path.name: path.read_bytes() for path in tables},
        "model": (home / uri / "model/model.safetensors").read_bytes(),
        **{name: (checkpoint / f"{name}.safetensors").read_bytes() for name in ("policy", "optimizer")},
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run with four iterations."""
    home = tmp_path_factory.mktemp("four") / "home"
    started(home, "run", iterations(4))
    return home


@pytest.fixture(scope="module")
def six(four: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of six iterations that were asked for at once."""
    home = without(four, tmp_path_factory.mktemp("six") / "home", "grpo")
    started(home, "run", iterations(6))
    return result(home, 6)


def copied(home: Path, folder: Path) -> Path:
    return Path(shutil.copytree(home, folder / "home"))


def test_what_only_watches_a_run_trains_nothing_anew(four: Path, tmp_path: Path) -> None:
    home, expected = copied(four, tmp_path), result(four, 4)
    assert any(row["gradient_norm"] > 0.0 for row in expected["history"])
    assert planned(home, iterations(4))["grpo"] == "cached"
    found = planned(home, iterations(4), *WATCHED)
    assert found["grpo"].startswith(
        "cached weights and recorded curve are reused although evaluation.confidence changed (0.95 -> 0.9)"
    )
    assert "eval_every changed (2 -> 1)" in found["grpo"]
    assert 'health.action changed ("stop" -> "warn")' in found["grpo"]
    assert "evaluation.num_problems changed (16 -> 8)" in found["evaluate_grpo"]
    output = started(home, "run", iterations(4), *WATCHED, *OTHER_DATA)
    assert "grpo: cached" in output and " grpo: start" not in output and "evaluate_grpo: start" in output
    assert " reward_model: start" not in output and "| greedy accuracy | 90 % interval |" in output
    others = "Cached with intervals of another level: reward_model (95 %), grpo (95 %)."
    assert [path for path in home.glob("reports/*/report.html") if others in path.read_text()]
    assert others in output and result(home, 4) == expected


def test_more_iterations_extend_a_finished_run_to_what_it_would_be_at_once(
    four: Path, six: dict[str, Any], tmp_path: Path
) -> None:
    home = copied(four, tmp_path)
    assert planned(home, iterations(6))["grpo"] == "run extends from 4 to 6"
    output = started(home, "run", iterations(6))
    assert "grpo: extends from 4 to 6" in output and "iteration 4/6" not in output and "iteration 5/6" in output
    assert result(home, 6) == six
    assert planned(home, iterations(4))["grpo"] == planned(home, iterations(6))["grpo"] == "cached"


def test_more_iterations_extend_a_killed_run_to_what_it_would_be_at_once(
    four: Path, six: dict[str, Any], tmp_path: Path
) -> None:
    home = without(four, tmp_path / "home", "grpo")
    kill_when(home, "work/*/checkpoints/step-000002", flows_command("run", *SMALL, iterations(4)))
    (newest,) = (max(int(path.name[-1]) for path in home.glob("work/*/checkpoints/step-*")),)
    if newest < 4:
        assert planned(home, iterations(4))["grpo"] == f"run resumes at iteration {newest + 1} of 4"
    words = f"resumes at iteration {newest + 1} of 6"
    assert planned(home, iterations(6))["grpo"] == f"run {words}"
    assert f"grpo: {words}" in started(home, "run", iterations(6))
    assert result(home, 6) == six


def test_a_plan_says_what_restarts_a_run_and_why(four: Path) -> None:
    rate = planned(four, iterations(4), f"{GRPO}.learning_rate=2e-5", "stages.sft.eval_every=5")
    assert rate["grpo"] == "run restarts: learning_rate changed (0.0003 -> 2e-05)"
    assert rate["sft"].startswith("cached weights and recorded curve are reused although eval_every changed")
    fewer = planned(four, iterations(2))
    assert fewer["grpo"] == "run restarts: num_iterations changed (4 -> 2): no usable checkpoint up to 2 is kept"
    assert planned(four, iterations(3))["grpo"] == "run resumes after iteration 3 of 3, the last"
    ahead = planned(four, iterations(6), f"{GRPO}.update.optim.schedule=linear")["grpo"]
    assert ahead.startswith("run restarts: num_iterations changed (4 -> 6), update.optim.schedule changed (")
    longer = planned(four, "stages.sft.num_steps=7")
    assert longer["sft"] == (
        "run restarts: num_steps changed (6 -> 7): the kind 'sft' keeps no checkpoint to continue from"
    )
