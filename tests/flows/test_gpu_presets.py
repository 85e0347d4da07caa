"""Presets for a GPU: with a tiny model and few rows each runs to its end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.flows.presets import open_preset
from rlcore.models.importing import import_model
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.warm import run_warm

PRESETS = ("gsm8k_0_5b", "countdown_3b", "hh_8b")


@pytest.mark.parametrize("name", PRESETS)
def test_model_and_data_are_named_with_a_commit(name: str) -> None:
    config = open_preset(name)
    assert re.fullmatch(r"[0-9a-f]{40}", config.model.revision)
    assert all(not data.path or re.match(r"hub:[\w/.-]+@[0-9a-f]{40}/", data.path) for data in config.data.values())


def rows_of(kind: str, number: int) -> dict[str, Any]:
    """A row of a data set in the form in which it is published."""
    question, right, wrong = f"What is {number} + {number}?", f"It is {2 * number}.", f"No idea {number}."
    match kind:
        case "gsm8k":
            return {"question": question, "answer": f"<<{number}+{number}={2 * number}>>So.\n#### {2 * number}"}
        case "problems":
            return {"problem": question, "answer": str(2 * number)}
        case _:
            asked = f"\n\nHuman: {question}\n\nAssistant: "
            return {"chosen": asked + right, "rejected": asked + wrong}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand weights, and a file of training and of held-out rows for each adapter."""
    path = tmp_path_factory.mktemp("project")
    shape = ShapeConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=1024
    )
    import_model(ModelConfig(source="scratch", shape=shape), path / "model", seed=0)
    for kind in ("gsm8k", "problems", "hh"):
        for part, numbers in (("train", range(10, 60)), ("eval", range(60, 70))):
            lines = [json.dumps(rows_of(kind, number)) + "\n" for number in numbers]
            (path / f"{kind}.{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return path


def small(name: str, project: Path) -> str:
    """A preset that extends one of them: the tiny model, the files, two iterations, one process that samples itself."""
    config = open_preset(name)
    paths = [
        f'data.{data}.{key} = "{project / f"{settings.adapter}.{part}.jsonl"}"'
        for data, settings in config.data.items()
        for key, part in (("path", "train"), ("eval_path", "eval"))
        if settings.path
    ]
    sizes = ("num_train = 40", "num_eval = 8", "max_tokens = 700")
    left_out = ["engine", "distributed"] if config.distributed.learner_ranks > 1 else ["engine"]
    small_stages = {
        "reward_model": ("batch_size = 8", "min_accuracy = 0.0"),
        "judge_model": ("batch_size = 8", "min_accuracy = 0.0"),
        "win_rate": ("sampling.max_new_tokens = 8",),
    }
    lines = [
        f'extends = "{name}"',
        'name = "small"',
        f"without = {json.dumps(left_out)}",
        f'model = {{ source = "folder", path = "{project / "model"}", revision = "", license = "-", extra_eos = [] }}',
        *paths,
        *(f"data.{data}.{size}" for data in config.data for size in sizes),
        *(f"stages.{stage}.{key}" for stage in config.stages for key in small_stages.get(stage, ())),
        "stages.grpo.num_iterations = 2",
        "stages.grpo.prompts_per_iteration = 4",
        "stages.grpo.group_size = 2",
        "stages.grpo.eval_every = 0",
        "stages.grpo.sampling.max_new_tokens = 8",
        "evaluation.num_problems = 8",
        "evaluation.max_new_tokens = 8",
        "evaluation.num_monitor_problems = 4",
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_with_a_tiny_model_and_few_rows_it_runs_to_its_comparison(name: str, project: Path, tmp_path: Path) -> None:
    preset = tmp_path / "small.toml"
    preset.write_text(small(name, project), encoding="utf-8")
    done = run_warm(["run", "--preset", str(preset)], environment(tmp_path), ROOT)
    assert done.returncode == 0, done.stderr
    history = json.loads((folder(tmp_path, "grpo") / "history.json").read_text())
    assert [row["iteration"] for row in history] == [1, 2]
    assert [*tmp_path.glob("pages/small/compare/*/comparison.md")]
