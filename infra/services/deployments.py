"""Deployments, automations and the schemas of their parameters, from their files, the presets and the algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra.services.layout import CODE
from rlcore.errors import ConfigError
from rlcore.flows.presets import FOLDER, open_draft, open_preset
from rlcore.tasks.presets.graph import checkpoints

if TYPE_CHECKING:
    from prefect.events.schemas.automations import AutomationCore

AUTOMATIONS, DEPLOYMENTS = CODE / "infra" / "automations.yaml", CODE / "infra" / "prefect.yaml"
DEPLOYMENT_ID = "deployment_id"
_PRESETS = ("tiny", "distil")  # where a row can run without further settings; the first one that can
_KEYS = ("learning_rate", "num_iterations", "prompts_per_iteration", "group_size", "kl", "update", "critic")
# parameter, and the function that returns a preset's names for it
_NAMES = {"stage": lambda config: config.stages, "checkpoint": checkpoints}


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file."""
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def write_deployments(path: Path) -> None:
    """Write all deployments to a file for ``prefect deploy``."""
    import yaml

    document = read_yaml(DEPLOYMENTS)
    path.write_text(yaml.safe_dump({**document, "deployments": all_deployments()}, sort_keys=False), encoding="utf-8")


def all_deployments() -> list[dict[str, Any]]:
    """Return all deployments: first one per algorithm, which brings torch."""
    from rlcore.algorithms.table import ALGORITHMS

    document = read_yaml(DEPLOYMENTS)
    own, others = document["definitions"]["algorithm"], document["deployments"]
    return [*(_deployment(name, own) for name in ALGORITHMS), *others]


def _deployment(algorithm: str, own: Mapping[str, Any]) -> dict[str, Any]:
    preset, stage = _start(algorithm)
    return {
        **own,
        "name": algorithm,
        "description": f"Online RL by {algorithm}: a stage of a preset and what it needs.",
        "parameters": {"preset": preset, "stage": stage, "algorithm": algorithm},
        "tags": [algorithm, *own["tags"]],
    }


def _start(algorithm: str) -> tuple[str, str]:
    """Return the default preset and stage of a deployment."""
    from rlcore.algorithms.table import ALGORITHMS
    from rlcore.checks.settings import algorithm_errors
    from rlcore.tasks.presets.graph import rl_stages

    for preset in _PRESETS:
        for stage, own in rl_stages(open_preset(preset)).items():
            rl = replace(own, algorithm=algorithm)
            same = ALGORITHMS[own.algorithm].uses_critic == ALGORITHMS[algorithm].uses_critic
            if same and not any(algorithm_errors(rl)):
                return preset, stage
    raise LookupError(f"no stage of {_PRESETS} can run {algorithm}: add a preset that can")


def names_of(path: Path) -> list[str]:
    """Return the names of the deployments in a file, as ``flow/name``; a flow is named as its function."""
    each = read_yaml(path)["deployments"]
    return [f"{one['entrypoint'].partition(':')[2].replace('_', '-')}/{one['name']}" for one in each]


def resolve_ids(automation: Mapping[str, Any], ids: Mapping[str, UUID]) -> AutomationCore:
    """Replace names of deployments in an automation by ids."""
    from prefect.events.schemas.automations import AutomationCore

    actions = [
        {**action, DEPLOYMENT_ID: ids[action[DEPLOYMENT_ID]]} if DEPLOYMENT_ID in action else action
        for action in automation["actions"]
    ]
    return AutomationCore.model_validate({**automation, "actions": actions})


def names_by_preset() -> dict[str, dict[str, list[str]]]:
    """Return for each complete built-in preset the valid values of ``stage`` and ``checkpoint``."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        try:
            config = open_draft(file.stem).whole
        except ConfigError:  # a part for other presets to extend
            continue
        found[file.stem] = {parameter: list(names(config)) for parameter, names in _NAMES.items()}
    return found


def closed(schema: Mapping[str, Any], names: Mapping[str, Mapping[str, list[str]]]) -> dict[str, Any]:
    """Return a flow's schema without further parameters, and with the stages and checkpoints of each preset."""
    rules = [
        _rule(preset, parameter, values[parameter], values["stage"])
        for preset, values in names.items()
        for parameter in _NAMES
        if parameter in schema.get("properties", {})
    ]
    # Not at the top: a form in Prefect's interface would show the rules as fields.
    return {**schema, "additionalProperties": False, "dependentSchemas": {"preset": {"allOf": rules}} if rules else {}}


def _rule(preset: str, parameter: str, values: list[str], stages: list[str]) -> dict[str, Any]:
    # An override may add a stage, or a checkpoint that a stage starts from or learns from.
    adds = rf"^stages(=|\.(?!({'|'.join(stages)})[.=])|.*\.(init_from|policy|baseline|ref_policy)\b)"
    plain = {"overrides": {"not": {"contains": {"pattern": adds}}}}
    return {
        "if": {"properties": {"preset": {"const": preset}, **plain}},
        "then": {"properties": {parameter: {"enum": values}}},
    }


def with_form(schema: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return the schema of online RL for one algorithm, with the form of its keys."""
    fields = schema["properties"]
    form = {name: value for name, value in fields["keys"].items() if name in ("title", "description", "position")}
    form |= keys_form(algorithm)
    chosen = {**fields["algorithm"], "enum": [algorithm]}
    return {**schema, "properties": {**fields, "algorithm": chosen, "keys": form}}


def keys_form(algorithm: str) -> dict[str, Any]:
    """Return the JSON schema of the keys of a stage that the row of an algorithm uses."""
    from rlcore.algorithms.table import ALGORITHMS, constants_of
    from rlcore.tasks.presets.key_reference import preset_schema

    row, tables = ALGORITHMS[algorithm], preset_schema()["$defs"]
    constants = {"weighting"} | constants_of(row)
    objective = tables["ObjectiveConfig"]
    used = {name: each for name, each in objective["properties"].items() if name in constants}
    tables = {**tables, "ObjectiveConfig": {**objective, "properties": used}}
    keys = {
        name: _inlined(each, tables)
        for name, each in tables["RlStage"]["properties"].items()
        if name in _KEYS and (name != "critic" or row.uses_critic)
    }
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _inlined(schema: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with its tables in place and no defaults, which a form would send."""
    if "$ref" in schema:
        return _inlined(tables[schema["$ref"].rpartition("/")[2]], tables)
    found = {name: value for name, value in schema.items() if name != "default"}
    if "properties" in found:
        found["properties"] = {name: _inlined(each, tables) for name, each in found["properties"].items()}
    return found
