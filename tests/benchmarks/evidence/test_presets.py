"""Presets of the evidence: no arm keeps another one's sizes, and no policy is judged by the model that trained it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.evidence.__main__ import TASKS
from benchmarks.evidence.runs import other_figures
from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.models.importing import import_model
from rlcore.tasks.presets.graph import rl_stages, sampling_of
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.warm import run_warm

DATA = ("prompts", "pairs", "judge_pairs")
SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=32, max_positions=256)


@pytest.mark.parametrize("name", ["smollm2", "tiny", "qwen"])
def test_all_arms_of_rl_have_equal_sizes_and_rates(name: str) -> None:
    config = open_preset(TASKS[name].preset)
    arms = rl_stages(config)
    assert len(arms) == 15
    sizes = {
        (
            each.num_iterations,
            each.prompts_per_iteration,
            each.group_size,
            each.update.tokens_per_microbatch,
            round(each.learning_rate / (10 if each.update.lora.rank else 1), 12),
        )
        for each in arms.values()
    }
    assert len(sizes) == 1
    assert len({each.critic.learning_rate for arm, each in arms.items() if arm.startswith("ppo")}) == 1
    lengths = {found.max_new_tokens for each in config.stages.values() if (found := sampling_of(each))}
    assert lengths == {config.evaluation.max_new_tokens}


def test_no_stage_on_a_gpu_keeps_the_settings_of_the_small_model() -> None:
    large, small = open_preset(TASKS["qwen"].preset), open_preset(TASKS["smollm2"].preset)
    assert large.stages.keys() == small.stages.keys()
    assert not [name for name, stage in large.stages.items() if stage == small.stages[name]]
    assert not [name for name, data in large.data.items() if data.max_tokens == small.data[name].max_tokens]


def test_the_chat_preset_asks_for_the_file_of_each_dataset() -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset(TASKS["chat"].preset)
    missing = [line.strip().partition(":")[0] for line in caught.value.what.splitlines()[1:]]
    assert missing == [f"data.{name}.path" for name in DATA]


def small_chat(project: Path) -> list[str]:
    """Overrides of the chat preset: a tiny model, few rows, one iteration."""
    rows = [
        {"id": f"{n}", "prompt": f"Name {n} things.", "chosen": "a " * (n % 7), "rejected": "b", "annotator": "me"}
        for n in range(1, 200)
    ]
    pairs = project / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows if row["chosen"]), encoding="utf-8")
    import_model(ModelConfig(source="scratch", shape=SHAPE), project / "model", seed=0)
    return [
        *(f"data.{name}.path={pairs}" for name in DATA),
        *(f"data.{name}.{key}" for name in DATA for key in ("num_train=30", "num_eval=20")),
        "model.source=folder",
        f"model.path={project / 'model'}",
        "model.file=",
        "model.license=MIT",
        *(f"stages.{name}.backbone.layers=1" for name in ("reward_model", "judge_model")),
        *(f"stages.{name}.num_iterations=1" for name in ("grpo_chat", "ppo_chat")),
        *(f"stages.{name}.sampling.max_new_tokens=8" for name in ("grpo_chat", "ppo_chat", "win_grpo", "win_ppo")),
        "evaluation.num_problems=8",
        "evaluation.max_new_tokens=8",
    ]


def test_the_judge_of_the_chat_preset_is_trained_on_other_pairs_than_the_reward(tmp_path: Path) -> None:
    config = open_preset(TASKS["chat"].preset, small_chat(tmp_path))
    rewards = {term.stage for each in rl_stages(config).values() for term in each.rewards}
    judges = {config.stages[name].settings.judge.stage for name in ("win_grpo", "win_ppo")}
    assert (rewards, judges) == ({"reward_model"}, {"judge_model"})
    parts = [config.data[data].adapter.partition(":")[2] for data in DATA]
    assert parts == ["POLICY", "POLICY", "JUDGE"]
    assert [config.stages[name].data for name in ("reward_model", "judge_model")] == [("pairs",), ("judge_pairs",)]


@pytest.mark.slow
def test_the_chat_preset_runs_and_the_benchmark_finds_the_figures_of_its_models(tmp_path: Path) -> None:
    overrides = [part for each in small_chat(tmp_path) for part in ("--set", each)]
    done = run_warm(["run", TASKS["chat"].preset, *overrides], environment(tmp_path), ROOT)
    assert done.returncode == 0, done.stderr
    wanted = {
        "reward_model": {"rm/eval_accuracy", "rm/gain_over_length"},
        "win_grpo": {"win_rate/rate", "win_rate/length_controlled", "judge/agreement", "judge/beyond_length"},
        "win_ppo": {"win_rate/rate_low", "win_rate/rate_high", "judge/pairs"},
    }
    for stage, names in wanted.items():
        assert names <= other_figures(folder(tmp_path, stage)).keys()
