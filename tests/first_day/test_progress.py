"""Seeing a run work: its first line, progress on a terminal, one line an iteration, Ctrl-C, and two runs at once."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from tests.waiting import LONG

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
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
    """A user's folder with a model, prompts and two presets."""
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


def environment(**more: str) -> dict[str, str]:
    ours = ("PREFECT_", "MLFLOW_", "RLCORE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlcore.flows", *arguments]


def watch(folder: Path, arguments: Sequence[str], *, interrupt_at: str) -> Seen:
    """Run a command on a terminal of 140 columns, and press Ctrl-C when it shows ``interrupt_at``."""
    ours, theirs = pty.openpty()
    variables = environment(TERM="xterm-256color", COLUMNS="140", LINES="30")
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
            env=environment(RLCORE_ENGINE="inline"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("mine", "other")
    }
    for name, process in runs.items():
        said, _ = process.communicate()
        assert process.returncode == 0, said
        (line,) = [line for line in said.splitlines() if line.startswith("report ")]
        report = project / line.split(maxsplit=1)[1]
        assert f"<title>{name}: run report</title>" in report.read_text(encoding="utf-8")
    with closing(sqlite3.connect(project / ".rlcore" / "mlflow.db")) as database:
        names = {name for (name,) in database.execute("SELECT name FROM runs")}
        figures = "SELECT DISTINCT key FROM latest_metrics JOIN runs USING (run_uuid) WHERE name = 'other'"
        columns = {name for (name,) in database.execute(figures)}
    assert {"mine post-train", "mine import_sft", "mine grpo", "other"} <= names
    assert [name for name in names if not re.fullmatch("(mine|other)( [a-z_-]+)?", name)] == []
    assert {"accuracy/base", "accuracy/grpo"} <= columns  # of the runs at the top, so that presets can be compared
