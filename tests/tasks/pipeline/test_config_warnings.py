"""Warnings about unusual values: none for the committed presets, and one for each value beyond all recipes."""

from __future__ import annotations

import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.pipeline.config_warnings import unusual_values
from tests.flows.micro import PRESETS

FOLDER = ("model.source=folder", "model.path=model")
WEIGHTS, LORA = "recipes that train all weights of a pretrained model", "recipes that train LoRA of a pretrained model"


def rates(preset: str, *overrides: str) -> list[str]:
    """The warnings about learning rates."""
    config = open_preset(preset, overrides)
    return [each for each in unusual_values(config, config.stages) if "learning_rate" in each]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_learning_rates_of_committed_presets_are_usual(preset: str) -> None:
    assert rates(preset) == []


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
