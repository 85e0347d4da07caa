"""A plan after another one: cheap if nothing has changed that decides on a finding, and right if something has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.flows.cli.app import main
from rlcore.tasks.store.settings import Home
from tests.first_day.conftest import rows, write

PRESET = """extends = "chat"
name = "mine"
[model]
source = "folder"
path = "model"
license = "MIT"
chat_template = "own.jinja"
[data.prompts]
adapter = "prompts"
path = "rows.jsonl"
eval_path = "held_out.jsonl"
num_train = 40
num_eval = 10
max_tokens = 128
[stages.grpo]
rewards = [{ kind = "math" }, { kind = "own_rewards:brief", weight = 0.1 }]
sampling.max_new_tokens = 32
[evaluation]
max_new_tokens = 32
"""
REWARDS = "def brief(rollouts):\n    return [1.0 for rollout in rollouts]\n"
HEAVY = ("torch", "transformers", "numpy", "pandas", "pyarrow", "pandera", "mlflow", "prefect", "datasets")
COMMAND = f"""
import json, sys
from rlcore.flows.cli.app import main
for arguments in json.loads(sys.argv[1]):
    code = main(["plan", "mine.toml", *arguments])
    print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


@pytest.fixture
def project(tmp_path: Path, home: Home, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    shutil.copytree(model, "model")
    shutil.move("model/chat_template.jinja", "own.jinja")
    Path("mine.toml").write_text(PRESET)
    Path("own_rewards.py").write_text(REWARDS)
    write("rows.jsonl", rows())
    write("held_out.jsonl", rows(100))
    return folder


def planned(project: Path, *plans: list[str]) -> tuple[list[Any], list[str], str]:
    """Plan in a process of its own, in a folder without a state directory.

    Returns code and heavy modules after each plan, the beginnings of the other lines, and all text.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RLCORE_", "MLFLOW_"))}
    variables |= {"XDG_CACHE_HOME": str(project.parent / "cache"), "PYTHONPATH": str(project)}
    command = [sys.executable, "-c", COMMAND, json.dumps(plans)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=project, check=False)
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    lines = [line.partition(" ")[0] for line in done.stdout.splitlines() if ": " in line]
    return ends, lines, done.stdout + done.stderr


def test_an_edited_preset_of_the_same_model_and_rows_is_planned_without_a_library_and_before_any_run(
    project: Path,
) -> None:
    (first,), lines, text = planned(project, [])
    assert first[0] == 0 and first[1], text
    edits = ("learning_rate=2e-6", "num_iterations=70", "prompts_per_iteration=3", "sampling.temperature=0.9")
    edited = [word for edit in edits for word in ("--set", f"stages.grpo.{edit}")]
    wrong = ["--set", "stages.grpo.learning_rat=1", "--set", "data.prompts.path=none.jsonl"]
    later, again, text = planned(project, edited, wrong)
    assert (later, again) == ([[0, []], [2, []]], lines), text
    assert not (project / ".rlcore").exists()
    assert "did you mean stages.grpo.learning_rate?" in text and "'none.jsonl': no such file" in text


def edit_json(path: str, **changes: Any) -> None:
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | changes))


BREAKS: dict[str, tuple[Callable[[], object], str]] = {
    "a row": (lambda: write("rows.jsonl", rows(reference=4)), "data.prompts: reference: must be a text"),
    "a held-out row": (lambda: write("held_out.jsonl", rows(100, messages=[])), "data.prompts: messages"),
    "no file of rows": (lambda: Path("rows.jsonl").unlink(), "data.prompts.path = 'rows.jsonl': no such file"),
    "a row without a reference": (lambda: write("rows.jsonl", rows(reference="")), "stages.grpo.rewards.0: 'math'"),
    "the template": (lambda: Path("own.jinja").write_text("{{ messages }}"), "model.path: the chat template"),
    "positions": (lambda: edit_json("model/config.json", max_position_embeddings=100), "data.prompts.max_tokens = 128"),
    "an architecture": (lambda: edit_json("model/config.json", model_type="none"), "model.path: model_type = 'none'"),
    "the vocabulary": (lambda: Path("model/tokenizer.json").unlink(), "model.path: "),
    "a setting": (
        lambda: Path("mine.toml").write_text(PRESET.replace("128", "8")),
        "data.prompts.max_tokens: ",
    ),
    "the algorithm": (
        lambda: Path("mine.toml").write_text(PRESET.replace("[stages.grpo]", '[stages.grpo]\nalgorithm = "grop"')),
        "stages.grpo.algorithm",
    ),
    "a reward": (lambda: Path("own_rewards.py").write_text("import none\n"), "stages.grpo.rewards.1.kind: cannot"),
}


@pytest.mark.parametrize(("damage", "error"), BREAKS.values(), ids=BREAKS)
def test_what_is_broken_after_a_good_plan_is_named_by_the_next_one(
    project: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[], object], error: str
) -> None:
    assert main(["plan", "mine.toml"]) == 0
    kept = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    damage()
    sys.modules.pop("own_rewards", None)
    assert main(["plan", "mine.toml"]) == 2
    output = capsys.readouterr().err
    assert [line for line in output.splitlines() if line.strip().startswith(error)], output
    for path, content in kept.items():
        path.write_bytes(content)
    sys.modules.pop("own_rewards", None)
    assert main(["plan", "mine.toml"]) == 0


def test_names_of_peers_lead_to_the_right_key(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.toml").write_text("""extends = "rlhf_dpo"
name = "mine"
actor_rollout_ref.rollout.n = 4
algorithm.adv_estimator = "grpo"
[stages.grpo]
kind = "rl"
init_from = "sft"
num_generations = 8
beta = 0.04
max_completion_length = 64
per_device_train_batch_size = 4
num_train_epochs = 1
top_p = 0.9
[stages.grpo.update]
epsilon_high = 0.28
[stages.dpo]
lr = 1e-6
per_device_train_batch_size = 4
""")
    assert main(["plan", "mine.toml"]) == 2
    output = capsys.readouterr().err
    for theirs, ours in {
        "actor_rollout_ref": "stages.grpo.group_size",
        "algorithm": "stages.grpo.algorithm",
        "stages.grpo.num_generations": "stages.grpo.group_size",
        "stages.grpo.beta": "stages.grpo.kl.coefficient",
        "stages.grpo.max_completion_length": "stages.grpo.sampling.max_new_tokens",
        "stages.grpo.per_device_train_batch_size": "stages.grpo.prompts_per_iteration",
        "stages.grpo.num_train_epochs": "stages.grpo.num_iterations",
        "stages.grpo.update.epsilon_high": "stages.grpo.update.objective.clip_high",
        "stages.dpo.lr": "stages.dpo.learning_rate",
        "stages.dpo.per_device_train_batch_size": "stages.dpo.batch_size",
    }.items():
        assert f"{theirs}: unknown key; did you mean {ours}?" in output
    assert "stages.grpo.top_p: unknown key; TRL's top_p has no counterpart: a filtered distribution" in output
