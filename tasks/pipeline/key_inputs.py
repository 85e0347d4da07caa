"""Key inputs of a stage: everything that determines its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.config import to_dict
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.pipeline.cache_keys import OBSERVED, OBSERVERS, TRAINED, function_of, split_observers
from rlcore.tasks.pipeline.machine import known_machine
from rlcore.tasks.pipeline.versions import versions
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.store.artifacts import REPORT, ArtifactRef
from rlcore.tasks.store.cache import KeyInputs
from rlcore.tasks.store.code_hash import closure_digests
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.store.storage import read_json


def key_inputs(stage: Stage, config: RunConfig, inputs: Mapping[str, ArtifactRef]) -> KeyInputs:
    """Return everything that determines the stage's result, as JSON values."""
    module, arguments = function_of(stage.run)
    whole = stage.sections(config)
    sections = Sections({name: value for name, value in whole.declared.items() if name not in stage.observers})
    (counted, machine), chosen = _with_machine(whole), stage.chosen(sections)
    counted, watching = split_observers(counted, stage.observers)
    digests = {name: inputs[name].sha256 for name in stage.inputs if name in inputs}
    found = {
        "stage": {"name": stage.name, "version": stage.version, "kind": stage.kind},
        "inputs": {name: digest for name, digest in digests.items() if name not in stage.observed},
        "external": stage.source_digest(sections),
        "code": closure_digests(module, chosen=chosen),
        "arguments": to_dict(arguments),
        "config": counted,
        "machine": machine,
        "seed": config.seed,
        "versions": versions(module, sections, chosen=chosen),
    }
    observed = {name: digest for name, digest in digests.items() if name in stage.observed}
    rows = {name: _train_digest(inputs[name]) for name in stage.trains_on if name in inputs}
    trained = {name: digest for name, digest in rows.items() if digest}
    others = {OBSERVERS: watching, OBSERVED: observed, TRAINED: trained}
    return found | {name: values for name, values in others.items() if values}


def _train_digest(ref: ArtifactRef) -> str:
    """Return the digest of a dataset's training rows; empty if its report does not have it."""
    path = find_home().root / ref.uri / REPORT
    return str(read_json(path).get("train_digest", "")) if path.is_file() else ""


def _with_machine(sections: Sections) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the configuration for a stage's key: its sections, with the detected machine in place of ``hardware``.

    Thus ``auto`` counts as its resolved value. Without ``hardware`` the machine is empty.
    """
    counted = sections.for_key()
    if "hardware" not in counted:
        return counted, {}
    machine = known_machine(sections.hardware)
    kept = {name: value for name, value in counted["hardware"].items() if name not in machine.resolved}
    return {**counted, "hardware": kept}, machine.facts
