"""The schemas of deployments, as the server's own validator reads them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from infra.services.parameters import closed, names_by_preset

NAMES = names_by_preset()
DECISIONS, SIGNED = ("approve", "reject"), "-----BEGIN SSH SIGNATURE-----\nU1NI\n-----END SSH SIGNATURE-----\n"


def refusal(flow: str, **parameters: Any) -> str:
    """Reasons for which the server would refuse these parameters; empty where it would take them."""
    function = getattr(importlib.import_module(f"flows.{flow}"), flow)
    try:
        validate(parameters, closed(dict(parameter_schema(function)), NAMES), raise_on_error=True)
    except ValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("flow", "parameters"),
    [
        ("online_rl", {"preset": "tiny", "stage": "ppo"}),
        ("online_rl", {"preset": "two_rl", "stage": "dapo"}),
        ("online_rl", {"preset": "/data/mine.toml", "stage": "mine"}),
        ("online_rl", {"preset": "tiny", "stage": "second", "overrides": ["stages.second.kind=rl"]}),
        ("online_rl", {"preset": "tiny", "stage": "grpo", "overrides": ["stages.grpo.learning_rate=1e-5"]}),
        ("evaluate", {"preset": "tiny", "checkpoint": "base"}),
        ("evaluate", {"preset": "reasoning", "checkpoint": "sft_kept"}),
        ("evaluate", {"preset": "tiny", "checkpoint": "other", "overrides": ["stages.grpo.init_from=models:/other/3"]}),
        ("compare", {"preset": "tiny"}),
        ("rollback", {"model": "tiny-grpo", "version": 2, "reason": "worse"}),
        *((flow, {"version": "tiny-grpo/4", "document": '{"a": 1}\n', "signature": SIGNED}) for flow in DECISIONS),
    ],
)
def test_parameters_that_a_preset_has_are_taken(flow: str, parameters: dict[str, Any]) -> None:
    assert refusal(flow, **parameters) == ""


@pytest.mark.parametrize(
    ("flow", "parameters", "message"),
    [
        ("online_rl", {"preset": "tiny", "stage": "grpoo"}, "'grpoo' is not one of"),
        ("online_rl", {"preset": "tiny", "stage": "dapo"}, "'dapo' is not one of"),  # three_way has it
        ("online_rl", {"stage": "grpoo", "preset": "tiny", "overrides": ["stages.grpo.seed=1"]}, "'grpoo' is not one"),
        ("sft", {"preset": "r1_zero", "stage": "sft"}, "'sft' is not one of"),
        ("evaluate", {"preset": "tiny", "checkpoint": "grpo2"}, "'grpo2' is not one of"),
        ("evaluate", {"preset": "tiny", "checkpoint": "reward_model"}, "'reward_model' is not one of"),
        ("compare", {"preset": "tiny", "checkpoint": "sft"}, "'checkpoint' was unexpected"),
        ("retrain", {"preset": "retrain", "cfg": {}}, "'cfg' was unexpected"),
        ("rollback", {"model": "m", "version": 1, "reason": "r", "force": True}, "'force' was unexpected"),
        *(
            (flow, {"version": "tiny-grpo/4", "document": "{}"}, "'signature' is a required property")
            for flow in DECISIONS
        ),
        *((flow, {"version": "tiny/4", "document": "{}", "signature": "anna"}, "does not match") for flow in DECISIONS),
    ],
)
def test_what_no_preset_and_no_flow_has_is_refused(flow: str, parameters: dict[str, Any], message: str) -> None:
    assert message in refusal(flow, **parameters)


def test_every_whole_preset_has_its_names() -> None:
    assert NAMES["tiny"] == {
        "stage": ["sft", "reward_model", "grpo", "ppo"],
        "checkpoint": ["base", "sft", "grpo", "ppo"],
    }
    assert len(NAMES) > 20
