from __future__ import annotations

from pathlib import Path

from rlcore.tasks.presets.run import RunConfig, load_preset
from rlcore.tasks.report.run_page import from_defaults, from_preset

TINY = Path(__file__).resolve().parents[3] / "flows" / "presets" / "tiny.toml"


def tiny(*overrides: str) -> RunConfig:
    return load_preset(TINY, overrides)


def test_a_setting_that_has_its_default_is_left_out_and_one_that_has_none_is_there() -> None:
    found = {change.name: (change.value, change.other) for change in from_defaults(tiny())}
    assert found["model.shape.num_layers"] == ("2", "4")
    assert found["stages.grpo.kl.coefficient"][0] == "0.005"
    assert found["evaluation.num_problems"] == ("600", "")
    assert "model.shape.num_heads" not in found and "model.path" not in found
    assert found["stages.ppo.rewards.0.kind"] == ('"math"', "")
    assert found["data.prompts.adapter"] == ('"rlcore.examples.arithmetic:ADAPTER"', '""')


def test_the_names_are_those_by_which_a_setting_is_overridden() -> None:
    names = [change.name for change in from_defaults(tiny())]
    again = tiny(*(f"{name}=1" for name in names if name in ("seed", "stages.sft.num_steps", "data.prompts.num_train")))
    assert (again.data["prompts"].num_train, again.stages["sft"].settings.num_steps) == (1, 1)


def test_two_presets_differ_in_what_was_overridden_and_in_nothing_else() -> None:
    changes = from_preset(tiny("stages.grpo.learning_rate=1e-5", "name=mine", "seed=3"), tiny())
    assert {change.name: (change.value, change.other) for change in changes} == {
        "seed": ("3", "0"),
        "stages.grpo.learning_rate": ("1e-05", "0.0003"),
    }
    assert from_preset(tiny(), tiny()) == []


def test_a_stage_that_only_one_preset_has_is_empty_in_the_other() -> None:
    changes = from_preset(tiny('without=["stages.ppo", "promotion"]'), tiny())
    found = {change.name: change for change in changes if change.name.startswith("stages.ppo.")}
    assert {change.value for change in found.values()} == {""}
    assert found["stages.ppo.algorithm"].other == '"ppo"'
