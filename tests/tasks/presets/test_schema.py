"""The schema for editors accepts every committed preset and finds what one mistypes."""

from __future__ import annotations

import tomllib
from typing import Any

import jsonschema
import pytest

from rlcore.flows.presets import FOLDER
from rlcore.tasks.presets.overrides import apply_override
from rlcore.tasks.presets.schema import preset_schema
from tests.flows.micro import PRESETS


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(preset_schema())
    return jsonschema.Draft202012Validator(preset_schema())


def faults(validator: Any, document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the location and message of each error."""
    found = sorted(validator.iter_errors(document), key=str)
    return [(".".join(map(str, error.absolute_path)), error.message) for error in found]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_committed_preset_is_valid(validator: Any, preset: str) -> None:
    assert faults(validator, tomllib.loads((FOLDER / f"{preset}.toml").read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("override", "where", "text"),
    [
        ("stages.grpo.learning_rat=1e-6", "stages.grpo", "learning_rat"),
        ("hardwar.dtype=float32", "", "hardwar"),
        ("stages.grpo.kl.coefficent=0.1", "stages.grpo.kl", "coefficent"),
        ("stages.grpo.learning_rate=fast", "stages.grpo.learning_rate", "number"),
        ("stages.grpo.learning_rate=0.0", "stages.grpo.learning_rate", "minimum"),
        ("stages.grpo.group_size=1.5", "stages.grpo.group_size", "integer"),
        ("hardware.dtype=bf16", "hardware.dtype", "bfloat16"),
        ("stages.grpo.rewards.0.wieght=1.0", "stages.grpo.rewards.0", "wieght"),
        ("stages.grpo.kind=rll", "stages.grpo.kind", "reward_model"),
        ("data.prompts.contract=prompt", "data.prompts.contract", "code_tasks"),
    ],
)
def test_what_is_mistyped_is_found_where_it_stands(validator: Any, override: str, where: str, text: str) -> None:
    document = tomllib.loads((FOLDER / "tiny.toml").read_text(encoding="utf-8"))
    apply_override(document, override)
    ((place, message),) = faults(validator, document)
    assert place == where
    assert text in message


def test_what_a_whole_preset_needs_a_file_that_extends_may_leave_out(validator: Any) -> None:
    part = {"name": "mine", "stages": {"grpo": {"learning_rate": 1e-6}}}
    assert faults(validator, {"extends": "tiny", **part}) == []
    assert {message for _, message in faults(validator, part)} == {
        f"{key!r} is a required property" for key in ("seed", "model", "data", "evaluation")
    }
    assert faults(validator, {"extends": "tiny", "stages": {"grpo": {"learning_rat": 1e-6}}})[0][0] == "stages.grpo"
