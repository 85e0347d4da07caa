"""Parameter schemas of deployments, by which the server checks each request before it is queued.

Prefect derives a JSON schema from a flow's signature. It accepts unknown parameters, and does not know the stages of
each preset. :func:`tell_parameters` adds both rules to the schemas on the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from infra.services.deployments import with_form
from rlcore.errors import ConfigError
from rlcore.flows.presets import FOLDER, open_draft
from rlcore.tasks.presets.graph import checkpoints

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

# parameter, and the function that returns a preset's names for it
_NAMES = {"stage": lambda config: config.stages, "checkpoint": checkpoints}


async def tell_parameters(client: PrefectClient, deployments: Iterable[str]) -> None:
    """Close the schemas of these deployments (``flow/name``), and give those of algorithms their form."""
    from prefect.client.schemas.actions import DeploymentUpdate

    names = names_by_preset()
    for deployment in deployments:
        known = await client.read_deployment_by_name(deployment)
        schema = closed(known.parameter_openapi_schema or {}, names)
        if algorithm := known.parameters.get("algorithm"):
            schema = with_form(schema, algorithm)
        await client.update_deployment(known.id, DeploymentUpdate(parameter_openapi_schema=schema))


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
