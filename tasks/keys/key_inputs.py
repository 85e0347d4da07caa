"""Key inputs of a stage: everything that determines its result."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rlcore.config import to_dict
from rlcore.tasks.keys.cache_keys import OBSERVED, OBSERVERS, TRAINED, function_of, split_observers
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.graph import terms_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.sections import Sections, idle_packages, sampling_parts
from rlcore.tasks.store.artifacts import REPORT, ArtifactRef
from rlcore.tasks.store.cache import KeyInputs
from rlcore.tasks.store.code_hash import NOTHING_CHOSEN, Chosen, closure_digests, libraries
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
        "stage": {"name": stage.name, "version": stage.version, "kind": stage.artifact},
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
    path = find_home().root / ref.uri / REPORT
    return str(read_json(path).get("train_digest", "")) if path.is_file() else ""


def _with_machine(sections: Sections) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    counted = sections.for_key()
    if "hardware" not in counted:
        return counted, {}
    machine = known_machine(sections.hardware)
    kept = {name: value for name, value in counted["hardware"].items() if name not in machine.resolved}
    return {**counted, "hardware": kept}, machine.facts


UNKNOWN = "unknown"  # of a server that does not answer
_SECONDS, _LONG = 20.0, 300.0  # of a server; of an interpreter: without its answer the stage would run again
_ASK = "from importlib.metadata import version; print(version('vllm'))"
# Libraries that determine tokens and digits, although no source imports them.
_BENEATH = {"transformers": ("tokenizers",), "sympy": ("mpmath",)}


def versions(module: str, sections: Sections, *, chosen: Chosen = NOTHING_CHOSEN) -> Mapping[str, str]:
    """Return the versions of Python and of the packages that a stage's ``module`` uses; empty: not installed.

    ``chosen``: the rows of tables that these sections use.
    """
    names = {name for each in (module, *_own_modules(sections)) for name in libraries(each, chosen=chosen)}
    names -= idle_packages(sections)
    names |= {name for each in names for name in _BENEATH.get(each, ())}
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    found |= {name: version for each in sorted(names) for name, version in _installed(each)}
    _, _, engine = sampling_parts(sections)
    if engine is not None and engine.kind == "vllm":
        found["vllm"] = _of_engine(engine.python, engine.urls)
    return found


def _own_modules(sections: Sections) -> set[str]:
    stage, (episodes, _, _) = sections.declared.get("stage"), sampling_parts(sections)
    terms = [term for term in terms_of(stage).values() if not term.python] if stage else []
    return {each.module for each in (episodes, *terms) if each} - {""}


@cache
def _installed(module: str) -> tuple[tuple[str, str], ...]:
    try:
        return ((_name(module), metadata.version(module)),)
    except metadata.PackageNotFoundError:
        brought = sorted(set(_packages().get(module, ()))) if find_spec(module) else []
    return tuple((_name(each), metadata.version(each)) for each in brought) or ((_name(module), ""),)


@cache
def _packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


@cache
def _of_engine(python: str, urls: tuple[str, ...]) -> str:
    if urls:
        return " ".join(sorted({_of_server(url) for url in urls}))
    if not python:
        return _installed("vllm")[0][1]
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_LONG, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _of_server(url: str) -> str:
    from rlcore.sampling.vllm.client import EngineUnreachableError, address_of, call

    try:
        status, answer = call(address_of(url), "/version", None, seconds=_SECONDS)
    except EngineUnreachableError:
        return UNKNOWN
    known = answer.get("version") if status == 200 and isinstance(answer, Mapping) else None
    return known if isinstance(known, str) else UNKNOWN
