"""Inputs of a champion, and their comparison with the present inputs.

The last accepted data are the champion's training data. Their sketches are stored with its version in MLflow. Thus a
promotion accepts data, a rejection does not, and a rollback withdraws the acceptance.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlcore.errors import DataError, RlcoreError, StorageError
from rlcore.tasks.keys.cache_keys import key_of, without_outcome
from rlcore.tasks.run.pages import page_folder
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import KeyInputs
from rlcore.tasks.store.locks import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.lineage import (
    ChampionLineage,
    add_past,
    find_record,
    note_past,
    read_past,
)
from rlcore.tasks.tracking.mlflow_model import PAST
from rlcore.tasks.tracking.registry import ModelVersion
from rlcore.tasks.tracking.runs import Tracker, open_tracker

logger = logging.getLogger(__name__)
Result = Literal["unchanged", "judged"]


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """Result of a retraining: nothing to do, or a decision. ``page``: Markdown; ``outcome``: a sentence."""

    result: Result
    outcome: str
    page: str
    refs: Mapping[str, ArtifactRef]


def lineage_of(home: Home, champion: ModelVersion) -> ChampionLineage:
    """Return the inputs of the champion from its record in MLflow.

    Raises:
        DataError: the record is missing or damaged, and this state directory lacks what it is made from.
    """
    tracker = open_tracker(home)
    try:
        return read_past(home, tracker, champion)
    except StorageError as error:
        name = f"{champion.name}/{champion.version}"
        try:
            _write_past_again(home, tracker, champion)
        except RlcoreError as gone:
            raise DataError(
                f"the record of the training data of {name} cannot be read ({error.what}), nor made again "
                f"({gone.what}), so nothing can be compared with it",
                where=f"MLflow, {PAST}/ of {name}",
                fix="retrain in the state directory that trained it, or restore its datasets there from a backup",
            ) from error
        logger.warning("the record of the training data of %s was written again: %s", name, error.what)
        return read_past(home, tracker, champion)


def _write_past_again(home: Home, tracker: Tracker, champion: ModelVersion) -> None:
    tags, records, record = find_record(home, f"{champion.name}/{champion.version}")
    with scratch_folder(home.work) as temporary:
        folder = temporary / PAST
        digest = note_past(home, records, record, folder, recipe=recipe_of(home, record.ingredients))
        kept = read_json(folder / "past.json")["datasets"]
        if gone := sorted(_named(tags.get("data", "")).items() - kept.items()):
            raise DataError(f"its data are gone: {', '.join(f'{name} {sha}' for name, sha in gone)}")
        add_past(tracker, champion, folder, digest)


def _named(text: str) -> dict[str, str]:
    """Parse the digests in ``prompts:ab,pairs:cd``, as a version's tags have them, by stage."""
    return dict(each.rsplit(":", 1) for each in text.split(",") if each)


def recipe_of(home: Home, ingredients: KeyInputs) -> str:
    """Return a digest of all inputs of a run except its starting checkpoint.

    Datasets count by the digest of their rows: equal rows under another name are the same data. The machine does not
    count: rounding is no reason to continue the training of a champion.
    """
    arguments = dict(ingredients["arguments"])
    start = arguments.pop("start", "")
    if start and arguments.get("reference") == start:  # a run that measures KL to its start also starts from a champion
        del arguments["reference"]
    inputs = {name: _content(home, name, sha) for name, sha in ingredients["inputs"].items() if name != start}
    return key_of({**without_outcome(ingredients), "inputs": inputs, "arguments": arguments, "machine": {}})


def _content(home: Home, stage: str, sha256: str) -> str:
    path = home.artifacts / "dataset" / sha256 / "report.json"
    return str(read_json(path)["digest"]) if stage.startswith("prepare_") and path.is_file() else sha256


def page_of(home: Home, preset: str, refs: Mapping[str, ArtifactRef]) -> str:
    """Join the pages of a retraining's stages, as far as they exist: drift, reward model, decision."""
    files = {"drift": "drift.md", "reward_gate": "reward_gate.md", "promote": "verdict.md"}
    folders = {stage: page_folder(home, preset, stage, refs[stage]) for stage in files if stage in refs}
    paths = [folder / files[stage] for stage, folder in folders.items()]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
