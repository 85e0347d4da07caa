"""A taskset of verifiers as docs/coming-from.md connects it: planned, trained on, changed and refused.

The Python that has verifiers is the one that ``VERIFIERS_PYTHON`` names, or a virtual environment made here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from tests.flows.conftest import ROOT

pytestmark = pytest.mark.slow

VERSION = "0.4.0"
PYTHON = ".venv-verifiers/bin/python"
BLOCK = re.compile(r"```\w* title=\"(verifiers[^\"]+)\"\n(.*?)```", re.DOTALL)
SHAPE = ShapeConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=512)
TASKSET = """import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class AddTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def digits(self, trace: vf.Trace) -> float:
        return sum(map(str.isdigit, trace.last_reply)) / max(len(trace.last_reply), 1)


class AddConfig(vf.TasksetConfig):
    num_tasks: int = 3


class AddTaskset(vf.Taskset[AddTask, AddConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            data = Sum(prompt=f"What is {number} + {number}?", answer=str(2 * number), system_prompt="Be brief.")
            yield AddTask(data, self.config.task)


__all__ = ["AddTaskset"]
"""
PROJECT = '[project]\nname = "addition-v1"\nversion = "0.1.0"\n[tool.setuptools]\npackages = ["addition_v1"]\n'
SMALL = (
    "model.source=folder",
    "model.path=model",
    "model.license=MIT",
    "stages.grpo.num_iterations=2",
    "stages.grpo.prompts_per_iteration=4",
    "stages.grpo.sampling.max_new_tokens=8",
    "stages.grpo.eval_every=2",
    "evaluation.num_problems=8",
    "evaluation.num_monitor_problems=4",
    "evaluation.max_new_tokens=8",
    "hardware.num_threads=1",
)


def installed(folder: Path) -> Path:
    """The interpreter of a new environment with verifiers; skips, with the reason, where it cannot be installed."""
    uv = Path(sys.executable).with_name("uv")
    for command in (["venv", "--python", sys.executable, str(folder)], ["pip", "install", f"verifiers=={VERSION}"]):
        done = subprocess.run(
            [uv, *command], capture_output=True, text=True, env=os.environ | {"VIRTUAL_ENV": str(folder)}, check=False
        )
        if done.returncode:
            pytest.skip(f"verifiers=={VERSION} cannot be installed: {done.stderr.strip()[-500:]}")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "environments" / "addition_v1" / "addition_v1").mkdir(parents=True)
    (folder / "environments" / "addition_v1" / "addition_v1" / "__init__.py").write_text(TASKSET)
    (folder / "environments" / "addition_v1" / "pyproject.toml").write_text(PROJECT)
    for name, text in BLOCK.findall((ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")):
        (folder / name).write_text(text, encoding="utf-8")
    named = os.environ.get("VERIFIERS_PYTHON", "")
    python = Path(named) if named else installed(folder / "environment")
    (folder / ".venv-verifiers").symlink_to(python.parent.parent)
    subprocess.run(
        [
            Path(sys.executable).with_name("uv"),
            "pip",
            "install",
            "--quiet",
            "--editable",
            folder / "environments" / "addition_v1",
        ],
        env=os.environ | {"VIRTUAL_ENV": str(python.parent.parent)},
        check=True,
    )
    subprocess.run([PYTHON, "verifiers_tasks.py"], cwd=folder, check=True)
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder / "model", seed=0)
    return folder


def rlcore(folder: Path, command: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    ours = ("PREFECT_", "MLFLOW_", "RLCORE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PYTHONPATH": str(ROOT), "RLCORE_ENGINE": "inline", "OMP_NUM_THREADS": "1"}
    settings = [part for each in (*SMALL, *overrides) for part in ("--set", each)]
    line = [sys.executable, "-m", "rlcore.flows", command, "verifiers.toml", *settings]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@contextmanager
def changed(folder: Path, old: str, new: str) -> Iterator[None]:
    """The taskset with other code; the installation is editable."""
    assert TASKSET.count(old) == 1
    source = folder / "environments" / "addition_v1" / "addition_v1" / "__init__.py"
    source.write_text(TASKSET.replace(old, new))
    try:
        yield
    finally:
        source.write_text(TASKSET)


def expected(prompt: str, text: str) -> float:
    """The sum of the taskset's rewards."""
    (number, _), reply = re.findall(r"\d+", prompt), text.strip()
    return float(reply == str(2 * int(number))) + 0.5 * sum(map(str.isdigit, reply)) / max(len(reply), 1)


def test_a_run_scores_replies_as_the_taskset_does(project: Path) -> None:
    done = rlcore(project, "run")
    assert done.returncode == 0, done.stderr
    rows = pd.concat(map(pd.read_parquet, (project / ".rlcore" / "artifacts" / "policy").glob("*/rollouts/*.parquet")))
    assert len(rows) == 64 and set(rows["iteration"]) == {1, 2}
    wanted = [expected(prompt, text) for prompt, text in zip(rows["prompt"], rows["text"], strict=True)]
    assert rows["value"].tolist() == pytest.approx(wanted) and rows["value"].nunique() > 1


def test_a_changed_taskset_trains_again_on_the_same_rows(project: Path) -> None:
    assert re.search(r"^grpo +cached", rlcore(project, "plan").stdout, re.MULTILINE)
    with changed(project, "weight=0.5", "weight=0.25"):
        output = rlcore(project, "plan").stdout
    assert re.search(rf"^grpo +run +restarts: source files changed: packages of {PYTHON}$", output, re.MULTILINE)
    assert re.search(r"^prepare_prompts +cached", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("class AddTask(vf.Task[Sum]):", "class AddTask(vf.Task[Sum]):\n    toolsets = lambda *_: [1]\n", "tools"),
        ("def right(self, trace: vf.Trace)", "def right(self, trace, runtime)", "a runtime"),
        ('prompt=f"What is {number} + {number}?", ', "", "a simulated user"),
    ],
)
def test_tasks_of_more_than_one_reply_are_refused_before_the_run(
    project: Path, old: str, new: str, reason: str
) -> None:
    with changed(project, old, new):
        done = rlcore(project, "plan")
    assert done.returncode == 2
    output = " ".join(done.stderr.split())
    assert "stages.grpo.rewards.0.kind: .venv-verifiers/bin/python cannot import the function" in output
    assert f"addition-v1 needs {reason}; only rewards of one reply to a prompt are supported" in output


def test_an_error_in_a_reward_stops_the_run_and_is_named(project: Path) -> None:
    with changed(project, "max(len(trace.last_reply), 1)", "0"):
        done = rlcore(project, "run")
    output = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "raised TaskError: task AddTask scoring: ZeroDivisionError: division by zero" in output
