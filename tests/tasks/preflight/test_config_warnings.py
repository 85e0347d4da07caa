"""Warnings about unusual values: none for the committed presets, and one for each value beyond all recipes."""

from __future__ import annotations

import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.preflight.config_warnings import unread_data, unusual_values
from tests.flows.micro import PRESETS

FOLDER = ("model.source=folder", "model.path=model")
WEIGHTS, LORA = "recipes that train all weights of a pretrained model", "recipes that train LoRA of a pretrained model"


def rates(preset: str, *overrides: str) -> list[str]:
    """The warnings about learning rates."""
    config = open_preset(preset, overrides)
    return [each for each in unusual_values(config, config.stages) if "learning_rate" in each]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_values_and_data_of_committed_presets_are_usual(preset: str) -> None:
    config = open_preset(preset)
    assert [*unusual_values(config, config.stages), *unread_data(config)] == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.sft.optim.warmup_steps=481", "stages.sft.optim.warmup_steps = 481: the stage has at most 480 steps"),
        (
            "stages.reward_model.optim.warmup_steps=301",
            "stages.reward_model.optim.warmup_steps = 301: the stage has at most 300 steps",
        ),
        (
            "stages.ppo.update.optim.warmup_steps=41",
            "stages.ppo.update.optim.warmup_steps = 41: the stage has at most 40 steps",
        ),
        (
            "stages.ppo.critic.warmup_iterations=20",
            "stages.ppo.critic.warmup_iterations = 20: none of the 20 iterations trains the policy",
        ),
    ],
)
def test_a_warmup_beyond_its_stage_is_named_with_both_numbers(override: str, expected: str) -> None:
    key, _, value = override.partition("=")
    config = open_preset("tiny", (f"{key}={int(value) - 1}",))
    assert unusual_values(config, config.stages) == []
    config = open_preset("tiny", (override,))
    assert unusual_values(config, config.stages) == [f"warning: {expected}; is this intended?"]


def test_a_dataset_that_no_stage_reads_is_named() -> None:
    config = open_preset("tiny", ("without=['stages.reward_model', 'stages.ppo']",))
    assert unread_data(config) == [
        "warning: data.preferences: no stage reads it; leave it out: without = ['data.preferences']"
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("stages.grpo.learning_rate=1e-4",), []),
        (("stages.grpo.learning_rate=2e-4",), [("stages.grpo.learning_rate = 0.0002", WEIGHTS)]),
        (("stages.sft.learning_rate=2e-3",), [("stages.sft.learning_rate = 0.002", WEIGHTS)]),
        (("stages.grpo.learning_rate=1e-3", "stages.grpo.update.lora.rank=8"), []),
        (
            ("stages.grpo.learning_rate=2e-3", "stages.grpo.update.lora.rank=8"),
            [("stages.grpo.learning_rate = 0.002", LORA)],
        ),
        (("stages.grpo.learning_rate=1.0",), [("stages.grpo.learning_rate = 1.0", "recipes have at most 0.1")]),
        (("stages.grpo.learning_rate=3e-4", "model.source=scratch", "model.path="), []),
    ],
)
def test_a_rate_that_wrecks_a_pretrained_model_is_named(
    overrides: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    usual = ("stages.sft.learning_rate=1e-5", "stages.reward_model.learning_rate=1e-5", "stages.ppo.learning_rate=1e-6")
    found = rates("tiny", *FOLDER, "stages.grpo.learning_rate=1e-6", *usual, *overrides)
    assert len(found) == len(expected)
    for line, (value, recipes) in zip(found, expected, strict=True):
        assert line.startswith(f"warning: {value}: {recipes}")
