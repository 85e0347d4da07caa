"""Presets to extend and presets for a GPU: short, valid, and run with a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import ConfigError
from rlcore.flows.plan import every_target, plan_run
from rlcore.flows.presets import FOLDER, open_preset
from rlcore.models.importing import import_model
from rlcore.tasks.presets.graph import rl_stages
from rlcore.tasks.store.settings import Home
from tests.flows.conftest import ran
from tests.flows.homes import folder

SHAPE = ShapeConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=1024)
OWN = """extends = "{name}"
name = "mine"
[model]
source = "folder"
path = "model"
license = "MIT"
[data.prompts]
adapter = "prompts"
path = "train.jsonl"
eval_path = "test.jsonl"
max_tokens = 160
[stages.grpo]
num_iterations = 2
prompts_per_iteration = 4
sampling.max_new_tokens = 8
[evaluation]
num_problems = 6
max_new_tokens = 8
"""
PAIRS = '[data.pairs]\nadapter = "preferences"\nmax_tokens = 160\n'
JUDGED = "[stages.win_rate.sampling]\nmax_new_tokens = 8\n"
PATHS = {"base": "", "chat": "", "preferences": PAIRS + 'path = "pairs.jsonl"\n' + JUDGED}


def question(number: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"{number} + {number}"}], "reference": str(2 * number)}


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of somebody's own: a model, questions in two files, pairs, and a preset for each that is extended."""
    folder = tmp_path_factory.mktemp("project")
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder / "model", seed=0)
    for name, numbers in (("train", range(30)), ("test", range(30, 36))):
        rows = [{"prompt_id": f"p{number}", "task": "sums", **question(number)} for number in numbers]
        write_rows(folder / f"{name}.jsonl", rows)
    pairs = [
        {"pair_id": f"p{n}", "messages": question(n)["messages"], "chosen": str(2 * n), "rejected": "?", "source": "me"}
        for n in range(40, 80)
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    for name, extra in PATHS.items():
        text = OWN.format(name=name) + extra
        assert len(text.splitlines()) <= 24
        (folder / f"my_{name}.toml").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", sorted(PATHS))
def test_by_itself_it_names_all_that_is_missing_at_once(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset(name)
    missing = {line.strip().partition(":")[0] for line in caught.value.what.splitlines()[1:]}
    assert missing >= {"name", "model.source", "model.path", "model.license", "data.prompts.adapter"}
    assert caught.value.where == str(FOLDER / f"{name}.toml")


def test_a_model_of_another_licence_is_not_taken_under_that_of_the_preset_that_is_extended(
    project: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((project / "my_chat.toml").read_text().replace('license = "MIT"\n', ""))
    with pytest.raises(ConfigError, match=r"model\.license: missing") as caught:
        open_preset(str(path))
    assert len(caught.value.what.splitlines()) == 2


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_short_preset_that_extends_it_plans_every_stage(name: str, project: Path, home: Home) -> None:
    preset = str(project / f"my_{name}.toml")
    targets = every_target(preset, ())
    rows = plan_run(preset, (), targets).rows
    assert {row.stage for row in rows} == set(targets) >= {"import_sft", "prepare_prompts", "grpo", "compare"}
    assert plan_run(preset, (), targets).lines


@pytest.mark.parametrize("name", sorted(PATHS))
def test_its_settings_are_for_real_models(name: str, project: Path) -> None:
    config = open_preset(str(project / f"my_{name}.toml"), ["stages.grpo.sampling.max_new_tokens=512"])
    (rl,) = rl_stages(config).values()
    assert config.hardware.gradient_checkpointing
    assert rl.update.lora.rank
    assert rl.learning_rate <= 1e-5
    assert rl.sampling.temperature == 1.0
    assert rl.group_size >= 8
    assert config.model.shape == ShapeConfig()


def test_the_critic_of_ppo_against_preferences_starts_from_the_reward_model(project: Path) -> None:
    critic = 'stages.grpo.critic={ architecture = "lora", init_from = "reward_model" }'
    ppo = ("stages.grpo.algorithm=ppo", "stages.grpo.group_size=1", critic)
    assert every_target(str(project / "my_preferences.toml"), ppo)


def test_a_project_of_files_beside_its_preset_runs_to_the_comparison(project: Path, tmp_path: Path) -> None:
    """From another folder: its paths are its own."""
    done = ran(tmp_path, project / "my_chat.toml")
    assert "prepare_prompts: dataset train=30 eval=6 unused=0 quarantined=0 contract=prompts/v1" in done.stderr
    assert "warning: there are fewer rows than requested" in done.stderr
    card = folder(tmp_path, "import_sft") / "model" / "model_card.json"
    assert json.loads(card.read_text())["licence"] == "MIT"
    (page,) = tmp_path.glob("pages/mine/prepare_prompts/*/data.md")
    assert page.read_text().startswith("**30 for training, 6 held out, 0 unused, 0 quarantined**")
    (comparison,) = tmp_path.glob("pages/mine/compare/*/comparison.md")
    assert "grpo" in comparison.read_text()


PRESETS = ("gsm8k_0_5b", "countdown_3b", "hh_8b")


@pytest.mark.parametrize("name", PRESETS)
def test_model_and_data_are_named_with_a_commit(name: str) -> None:
    config = open_preset(name)
    assert re.fullmatch(r"[0-9a-f]{40}", config.model.revision)
    assert all(not data.path or re.match(r"hub:[\w/.-]+@[0-9a-f]{40}/", data.path) for data in config.data.values())


def rows_of(kind: str, number: int) -> dict[str, Any]:
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
def published(project: Path) -> Path:
    for kind in ("gsm8k", "problems", "hh"):
        for part, numbers in (("train", range(10, 60)), ("eval", range(60, 70))):
            lines = [json.dumps(rows_of(kind, number)) + "\n" for number in numbers]
            (project / f"{kind}.{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return project


def small(name: str, published: Path) -> str:
    config = open_preset(name)
    paths = [
        f'data.{data}.{key} = "{published / f"{settings.adapter}.{part}.jsonl"}"'
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
        f'model = {{ source = "folder", path = "{folder}", revision = "", license = "-", extra_eos = [] }}',
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
def test_with_a_tiny_model_and_few_rows_it_runs_to_its_comparison(name: str, published: Path, tmp_path: Path) -> None:
    preset = tmp_path / "small.toml"
    preset.write_text(small(name, published), encoding="utf-8")
    ran(tmp_path, preset)
    history = json.loads((folder(tmp_path, "grpo") / "history.json").read_text())
    assert [row["iteration"] for row in history] == [1, 2]
    assert [*tmp_path.glob("pages/small/compare/*/comparison.md")]
