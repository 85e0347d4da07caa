"""Deployments and automations: their descriptions, and schemas as the server's own validator reads them."""

from __future__ import annotations

import importlib
from typing import Any
from uuid import UUID

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from infra.services.deployments import all_deployments, closed, names_by_preset, read_yaml, resolve_ids, with_form
from infra.services.layout import CODE, POOL, QUEUE
from rlcore.algorithms.table import ALGORITHMS
from rlcore.flows.flows import online_rl
from rlcore.flows.plan import preflight_lines
from rlcore.flows.presets import open_preset
from rlcore.tasks.run.reconciliation import HEAL
from rlcore.tasks.store.settings import Home

DEPLOYMENTS = all_deployments()
AUTOMATIONS = read_yaml(CODE / "infra" / "automations.yaml")
IDS = {"retrain/retrain": UUID(int=1)}


def flow_name(deployment: dict[str, Any]) -> str:
    """The name of a deployment's flow: that of its file, as Prefect writes it."""
    return str(deployment["entrypoint"].partition(":")[2].replace("_", "-"))


def schema_of(deployment: dict[str, Any]) -> dict[str, Any]:
    path, _, name = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
    found: dict[str, Any] = parameter_schema(flow).model_dump()
    return found


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_a_deployment_describes_itself_and_every_parameter(deployment: dict[str, Any]) -> None:
    fields = schema_of(deployment)["properties"]
    assert deployment["description"]
    assert set(deployment.get("parameters", {})) <= set(fields)
    assert all(each.get("description") for each in fields.values()), fields


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["name"])
def test_a_deployment_can_be_healed_ends_in_time_and_shares_the_gpu(deployment: dict[str, Any]) -> None:
    tags, pool = set(deployment["tags"]), deployment["work_pool"]
    assert HEAL in tags
    assert len(tags & {"within-6h", "within-7d"}) == 1
    computes = deployment["name"] not in ("rollback", "gc", "dump", "approve", "reject")
    assert (pool["name"], pool.get("work_queue_name")) == (POOL, QUEUE if computes else None)


def test_every_flow_has_a_deployment() -> None:
    deployed = {each["entrypoint"].partition(":")[0] for each in DEPLOYMENTS}
    flows = {str(path.relative_to(CODE)) for path in (CODE / "flows").glob("*.py") if "@flow(" in path.read_text()}
    assert flows == deployed


@pytest.mark.parametrize("automation", AUTOMATIONS, ids=lambda each: each["name"])
def test_prefect_takes_an_automation(automation: dict[str, Any]) -> None:
    assert resolve_ids(automation, IDS).enabled
    assert automation["description"]


def test_the_name_of_a_deployment_becomes_its_id() -> None:
    filled = {each["name"]: resolve_ids(each, IDS) for each in AUTOMATIONS}
    (retraining,) = filled["a new snapshot of preferences starts retrain"].actions
    assert retraining.deployment_id == UUID(int=1)  # type: ignore[union-attr]
    names = {f"{flow_name(each)}/{each['name']}" for each in DEPLOYMENTS}
    used = {action["deployment_id"] for each in AUTOMATIONS for action in each["actions"] if "deployment_id" in action}
    assert used <= names


def test_automations_select_runs_by_tags_that_deployments_have() -> None:
    tags = {tag for each in DEPLOYMENTS for tag in each["tags"]}
    related = {each["trigger"].get("match_related", {}).get("prefect.resource.id", "") for each in AUTOMATIONS}
    assert {tag.removeprefix("prefect.tag.") for tag in related - {""}} <= tags


NAMES = names_by_preset()
DECISIONS, SIGNED = ("approve", "reject"), "-----BEGIN SSH SIGNATURE-----\nU1NI\n-----END SSH SIGNATURE-----\n"


def refusal(flow: str, **parameters: Any) -> str:
    function = getattr(importlib.import_module("flows.flows"), flow)
    schema = closed(dict(parameter_schema(function)), NAMES)
    if algorithm := parameters.get("algorithm"):
        schema = with_form(schema, algorithm)
    try:
        validate(parameters, schema, raise_on_error=True)
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
        ("rollback", {"model": "tiny/2", "version": 1, "reason": "r"}, "does not match"),
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


RL = {each["name"]: each["parameters"] for each in all_deployments() if each["entrypoint"].endswith(":online_rl")}


def test_every_row_of_the_table_has_a_deployment_and_nothing_else_is_one_of_online_rl() -> None:
    assert list(RL) == list(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_deployment_of_an_algorithm_runs_it_with_its_own_parameters(
    algorithm: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("rlcore.flows.flows.run_targets", lambda *given: ran.append(given))
    keys = {"learning_rate": 2e-5, "update": {"objective": {"weighting": "sequence_sum"}}, "kl": None}
    assert refusal("online_rl", **RL[algorithm], keys={**keys, "kl": {}}) == ""
    online_rl.fn(**RL[algorithm], keys=keys, overrides=("seed=7",))
    ((preset, overrides, targets),) = ran
    config = open_preset(preset, overrides)
    preflight_lines(config, targets, preset=preset, home=home)  # no error
    (stage,) = targets
    settings: Any = config.stages[stage]
    assert (settings.settings.algorithm, settings.settings.learning_rate, config.seed) == (algorithm, 2e-5, 7)
    assert settings.settings.update.objective.weighting == "sequence_sum"


@pytest.mark.parametrize(
    ("algorithm", "keys", "message"),
    [
        ("sapo", {"update": {"objective": {"gate_positive": 1.5}}}, ""),
        ("gspo", {"update": {"objective": {"gate_positive": 1.5}}}, "'gate_positive' was unexpected"),
        ("ppo", {"critic": {"lam": 0.9}}, ""),
        ("grpo", {"critic": {"lam": 0.9}}, "'critic' was unexpected"),
        ("grpo", {"lerning_rate": 0.1}, "'lerning_rate' was unexpected"),
        ("grpo", {"learning_rate": -1.0}, "-1.0 is less than or equal to the minimum"),
        ("grpo", {"update": {"objective": {"scale": "batsh"}}}, "'batsh' is not one of"),
    ],
)
def test_the_form_of_an_algorithm_has_the_keys_that_its_row_uses(
    algorithm: str, keys: dict[str, Any], message: str
) -> None:
    found = refusal("online_rl", **RL[algorithm], keys=keys)
    assert message in found and bool(message) == bool(found)


def test_another_algorithm_is_not_run_by_a_deployment() -> None:
    assert "'grpo' is not one of ['dapo']" in str(_refused_by("dapo", algorithm="grpo"))


def _refused_by(name: str, **parameters: Any) -> ValidationError:
    schema = with_form(closed(dict(parameter_schema(online_rl)), NAMES), name)
    with pytest.raises(ValidationError) as caught:
        validate({**RL[name], **parameters}, schema, raise_on_error=True)
    return caught.value
