"""Reproduction of a registered version: find its inputs, check that they exist, rerun, compare files.

The model that a run started from, such as an earlier champion, is used unchanged; reproduce it by its own name. Only
the model's files are compared: the artifact of RL also has a history with times, which differ in every run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.config import to_dict
from rlcore.errors import DataError, ModelError
from rlcore.hardware.machine import find_machine, hardware_config_for
from rlcore.strict_config import build
from rlcore.tasks.keys.cache_keys import explain_miss, key_of, read_by, whole_config
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig, validated
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import Record, StageCache, describe_machine
from rlcore.tasks.store.code_hash import code_version
from rlcore.tasks.store.locks import announced
from rlcore.tasks.store.settings import Home, configure_environment
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.lineage import Origins, find_record, is_import
from rlcore.tasks.tracking.registry import ModelVersion

_CARD = "model_card.json"  # record of an imported model
_NAMED = ("data", "stages")  # sections of which a stage selects a part


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Registered version and the records of the stages that made it, its own last."""

    version: ModelVersion
    tags: Mapping[str, str]
    chain: tuple[Record, ...]

    @property
    def record(self) -> Record:
        return self.chain[-1]

    @property
    def start(self) -> ModelVersion | None:
        """Registered version that its run started from, or None."""
        record = next((each for each in self.chain if is_import(each)), None)
        if record is None:
            return None
        name, _, number = record.ingredients["arguments"]["uri"].removeprefix("models:/").partition("/")
        model_id, sha256 = record.ingredients["external"], record.ingredients["arguments"]["sha256"]
        return ModelVersion(name=name, version=int(number), model_id=model_id, sha256=sha256)


def find_origin(home: Home, model: str) -> Origin:
    """Find the records behind ``tiny-grpo@champion`` or ``tiny-grpo/3``.

    Raises:
        ModelError: no such version, or this state directory lacks a record of how it was made.
    """
    tags, records, record = find_record(home, model)
    version = ModelVersion(
        name=tags["name"],
        version=int(tags["version"]),
        model_id=tags.get("model_id", ""),
        sha256=tags.get("sha256", ""),
    )
    chain: dict[str, Record] = {}
    _collect(home, Origins(records), record, chain)
    return Origin(version=version, tags=tags, chain=tuple(chain.values()))


def config_of(origin: Origin, preset: RunConfig) -> RunConfig:
    """Return the configuration of that run: the recorded sections, and ``preset`` for those that no stage read.

    It requests the device, precision and number of threads that made the version.
    """
    document = to_dict(preset)
    for record in origin.chain:
        stage, known = _name(record), deepcopy(whole_config(record.ingredients))  # paths are put into it
        document |= {name: value for name, value in known.items() if name in document and name not in _NAMED}
        if "stage" in known:  # of its datasets it has no sizes: those are in the records that prepared them
            document["stages"] |= {stage: known["stage"]} if stage in document["stages"] else {}
        else:
            document["data"] |= known.get("data", {})
        for key, path in record.files.items():
            _place(document, key.replace("stage.", f"stages.{stage}.", 1) if key.startswith("stage.") else key, path)
    machine = origin.record.ingredients.get("machine", {})
    document["hardware"] = to_dict(preset.hardware) | document["hardware"] | hardware_config_for(machine)
    document["seed"] = origin.record.ingredients["seed"]
    source = f"the records of {origin.version.name}"
    return validated(build(RunConfig, _without_none(document), source=source), source)


def with_date(home: Home, origin: Origin, config: RunConfig) -> RunConfig:
    """Return the configuration with the date in the base's chat template, if it was the import's date."""
    for record in origin.chain:
        path = home.root / record.ref.uri / MODEL / _CARD
        if path.is_file() and (day := read_json(path).get("template_date")):
            return replace(config, model=replace(config.model, template_date=day))
    return config


def changes(home: Home, origin: Origin, table: Sequence[Stage], config: RunConfig) -> tuple[list[str], list[str]]:
    """Return what is missing, which prevents a run, and what has changed."""
    gone, changed = [], []
    store = ArtifactStore(home.root)
    by_name = {stage.name: stage for stage in table}
    for record in origin.chain:
        name = _name(record)
        if is_import(record) or record is origin.record:
            gone += [f"{name}: {error}" for error in store.errors(record.ref)[:1]]
        inputs = {each: _known(sha256) for each, sha256 in read_by(record.ingredients).items()}
        try:
            difference = explain_miss(key_inputs(by_name[name], config, inputs), [record])
        except DataError as error:
            gone.append(f"{name}: {error.what} ({error.where})")
            continue
        changed += [f"{name}: {difference}"] if difference else []
    if changed and origin.tags.get("code") != code_version():
        changed.append(f"made by code {origin.tags.get('code', 'unknown')}, this is {code_version()}")
    return gone, changed


def machines(origin: Origin, config: RunConfig) -> list[str]:
    """Compare this machine with the one that made the version, in a line."""
    then, now = origin.record.ingredients.get("machine"), to_dict(find_machine(config.hardware))
    if then == {}:
        return []
    if then == now:
        return [f"machine: {describe_machine(now)} (unchanged)"]
    before = describe_machine(then) if then else "unknown"
    return [f"machine changed: {before} -> {describe_machine(now)}; results may differ in bits"]


@contextmanager
def scratch_home(home: Home, origin: Origin, table: Sequence[Stage], config: RunConfig) -> Iterator[Home]:
    """Make a state directory below ``home`` with its own tracking database and the artifacts that the run starts from.

    It stays, unless the block is killed: then the next command removes it. Its name is unique: MLflow would continue to
    use a removed database.
    """
    prefix = f"reproduce-{origin.version.name}-{origin.version.version}-"
    scratch = Home(Path(tempfile.mkdtemp(prefix=prefix, dir=home.work)))
    names = ("RLCORE_HOME", "MLFLOW_TRACKING_URI")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= {"RLCORE_HOME": str(scratch.root), "MLFLOW_TRACKING_URI": scratch.tracking_uri}
    try:
        with announced(home.work, home.work, scratch.root.name):
            configure_environment(scratch)
            for record in filter(is_import, origin.chain):
                _link_artifact(
                    home, scratch, record, next(stage for stage in table if stage.name == _name(record)), config
                )
            yield scratch
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compare(home: Home, origin: Origin, scratch: Home, refs: Mapping[str, ArtifactRef]) -> list[str]:
    """Return the stages and files that differ, in the order of the stages; empty if the model's files are identical."""
    lines = []
    for record in origin.chain:
        name = _name(record)
        old, new = _files(home, record.ref), _files(scratch, refs[name])
        if not old:
            continue
        differing = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
        lines += [f"{name}: {len(differing)} of {len(old)} files differ: {', '.join(differing[:5])}"] * bool(differing)
    return lines


def _place(document: dict[str, Any], key: str, path: str) -> None:
    *tables, last = key.split(".")
    node: Any = document
    for name in tables:
        node = node.get(name, {})
    if isinstance(node, list):
        node[int(last) : int(last) + 1] = [path]
    else:
        node[last] = path


def _collect(home: Home, origins: Origins, record: Record, chain: dict[str, Record]) -> None:
    for stage, sha256 in read_by(record.ingredients).items():
        if stage in chain:
            continue
        made = origins.made(record, stage, sha256)
        if made is None:
            raise ModelError(
                f"this state directory has no record of how {stage} {sha256[:12]} was made",
                where=str(home.cache),
                fix="set RLCORE_HOME to the state directory that trained it",
            )
        _collect(home, origins, made, chain)
    chain[_name(record)] = record


def _link_artifact(home: Home, scratch: Home, record: Record, stage: Stage, config: RunConfig) -> None:
    target = scratch.root / record.ref.uri
    if not target.exists():
        shutil.copytree(home.root / record.ref.uri, target)
    ingredients = key_inputs(stage, config, {})
    lent = replace(record, key=key_of(ingredients), ingredients=ingredients, seconds=0.0)
    StageCache(scratch.cache).write(stage.name, lent)


def _files(home: Home, ref: ArtifactRef) -> dict[str, str]:
    path = home.root / ref.uri / MANIFEST
    if not path.is_file():
        return {}
    files = {str(entry["path"]): str(entry["sha256"]) for entry in read_json(path)["files"]}
    return {name: sha256 for name, sha256 in files.items() if name.startswith(f"{MODEL}/")} or files


def _name(record: Record) -> str:
    return str(record.ingredients["stage"]["name"])


def _known(sha256: str) -> ArtifactRef:
    return ArtifactRef(kind="", uri="", sha256=sha256, bytes=0)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
