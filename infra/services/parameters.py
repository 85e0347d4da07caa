"""The parameters of deployments as the server checks them, before anything is queued, whoever asks.

Prefect makes a JSON schema of a flow's signature. It takes parameters that the flow has not, and it cannot say that
the stages of one preset are not those of another. :func:`tell_parameters` makes the schemas on the server say both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlcore.errors import ConfigError
from rlcore.flows.presets import FOLDER, open_unvalidated
from rlcore.tasks.presets.graph import checkpoints

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

# A parameter, and the names that a preset has for it.
_NAMES = {"stage": lambda config: config.stages, "checkpoint": checkpoints}


async def tell_parameters(client: PrefectClient, deployments: Iterable[str]) -> None:
    """Close the schemas of these deployments (``flow/name``)."""
    from prefect.client.schemas.actions import DeploymentUpdate

    names = names_by_preset()
    for deployment in deployments:
        known = await client.read_deployment_by_name(deployment)
        schema = closed(known.parameter_openapi_schema or {}, names)
        await client.update_deployment(known.id, DeploymentUpdate(parameter_openapi_schema=schema))


def names_by_preset() -> dict[str, dict[str, list[str]]]:
    """For each committed preset that is whole: the values that ``stage`` and ``checkpoint`` may have."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        try:
            config = open_unvalidated(file.stem)
        except ConfigError:  # a part that others extend
            continue
        found[file.stem] = {parameter: list(names(config)) for parameter, names in _NAMES.items()}
    return found


def closed(schema: Mapping[str, Any], names: Mapping[str, Mapping[str, list[str]]]) -> dict[str, Any]:
    """A flow's schema that takes no further parameter, and of stages and checkpoints only those that its preset has."""
    rules = [
        _rule(preset, parameter, values[parameter], values["stage"])
        for preset, values in names.items()
        for parameter in _NAMES
        if parameter in schema.get("properties", {})
    ]
    # Not at the top: a form in Prefect's interface would take rules there for fields.
    return {**schema, "additionalProperties": False, "dependentSchemas": {"preset": {"allOf": rules}} if rules else {}}


def _rule(preset: str, parameter: str, values: list[str], stages: list[str]) -> dict[str, Any]:
    # An override may add a stage, or a checkpoint that a stage starts from or learns from.
    adds = rf"^stages(=|\.(?!({'|'.join(stages)})[.=])|.*\.(init_from|policy|baseline|ref_policy)\b)"
    plain = {"overrides": {"not": {"contains": {"pattern": adds}}}}
    return {
        "if": {"properties": {"preset": {"const": preset}, **plain}},
        "then": {"properties": {parameter: {"enum": values}}},
    }
