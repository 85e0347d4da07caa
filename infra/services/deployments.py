"""Deployments: those of ``infra/prefect.yaml``, and one of online RL per row of the table of algorithms.

The form of an algorithm's deployment has the keys that its row uses; the server refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.services.layout import CODE
from rlcore.flows.presets import open_preset

FILE = CODE / "infra" / "prefect.yaml"
SOURCES = (FILE, Path(__file__), CODE / "rlcore" / "algorithms" / "table.py", CODE / "rlcore" / "config" / "rl.py")
_PRESETS = ("tiny", "distil")  # where a row can run without further settings; the first one that can
_KEYS = ("learning_rate", "num_iterations", "prompts_per_iteration", "group_size", "kl", "update", "critic")


def write_deployments(path: Path) -> None:
    """Write all deployments to a file for ``prefect deploy``."""
    import yaml

    document = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**document, "deployments": all_deployments()}, sort_keys=False), encoding="utf-8")


def all_deployments() -> list[dict[str, Any]]:
    """Return all deployments: first one per algorithm, which brings torch."""
    import yaml

    from rlcore.algorithms.table import ALGORITHMS

    document = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    own, others = document["definitions"]["algorithm"], document["deployments"]
    return [*(_deployment(name, own) for name in ALGORITHMS), *others]


def names_of(path: Path) -> list[str]:
    """Return the names of the deployments in a file, as ``flow/name``; a flow is named as its function."""
    import yaml

    each = yaml.safe_load(path.read_text(encoding="utf-8"))["deployments"]
    return [f"{one['entrypoint'].partition(':')[2].replace('_', '-')}/{one['name']}" for one in each]


def with_form(schema: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return the parameter schema of online RL for one algorithm, with the form of its keys."""
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
    """Return the preset and the stage that a deployment runs unless others are named."""
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


def _inlined(schema: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with its tables in place, and without defaults, which a form would send."""
    if "$ref" in schema:
        return _inlined(tables[schema["$ref"].rpartition("/")[2]], tables)
    found = {name: value for name, value in schema.items() if name != "default"}
    if "properties" in found:
        found["properties"] = {name: _inlined(each, tables) for name, each in found["properties"].items()}
    return found
