"""Registered models: a chat model that a pipeline of two stages makes, and versions that are nothing but files."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.promotion import champion
from rlcore.tasks.promotion.champion import Grounds
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore
from rlcore.tasks.store.audit_log import AuditEntry
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.mlflow_model import Card, Package
from rlcore.tasks.tracking.registry import ModelVersion, register_model
from rlcore.tasks.tracking.runs import Tracker
from tests.chat_models import make_checkpoint
from tests.toys import ToyConfig, no_sections


def rows(context: StageContext) -> StageResult:
    report = {"contract": "prompts/v1", "source": "my|sums.jsonl", "digest": "d" * 64, "num_train": 9, "num_eval": 3}
    (context.folder / "report.json").write_text(json.dumps(report | {"rows_read": 12, "accepted": 12}))
    return StageResult(metrics={}, rows=12)


def train(context: StageContext) -> StageResult:
    make_checkpoint(context.folder / "model")
    return StageResult(metrics={"sft/loss": 0.5})


ANNA = {"user": "anna", "host": "here"}


def register_versions(tracker: Tracker, folder: Path, name: str) -> list[ModelVersion]:
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    package = Package(checkpoint=folder, card=Card(text="", license_id=""))
    run = tracker.start_run("e", "grpo", tags={})
    return [register_model(run, package, name=name, tags={"sha256": digest}) for digest in ("a", "b", "c")]


class Killed(BaseException):
    """End of a process at a call of MLflow."""


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the process end at a call of MLflow that writes a tag or an alias: the first is 0."""
    done = 0

    def killed_at(call: str) -> Callable[..., object]:
        real = getattr(MlflowClient, call)

        def write(*args: object, **kwargs: object) -> object:
            nonlocal done
            done += 1
            if done > after:
                raise Killed
            return real(*args, **kwargs)

        return write

    removes = ("delete_registered_model_alias", "delete_model_version_tag")
    for call in ("set_model_version_tag", "set_registered_model_tag", "set_registered_model_alias", *removes):
        monkeypatch.setattr(MlflowClient, call, killed_at(call))


def kills_until_done(act: Callable[[], object]) -> int:
    """Repeat an act that is killed at each of its calls in turn; return the number of kills."""
    for after in range(20):
        with pytest.MonkeyPatch.context() as killed, suppress(Killed):
            dying(killed, after)
            act()
            return after
    raise AssertionError("an act without end")


def promote(home: Home, tracker: Tracker, version: ModelVersion, *, over: ModelVersion | None) -> AuditEntry | None:
    grounds = Grounds(over=over, verdict=f"verdict-{version.version}", sentence="Promoted: better.")
    return champion.promote(home, tracker, version, grounds, actor=ANNA)


def roll_back(home: Home, tracker: Tracker, name: str, *, version: int, reason: str) -> ModelVersion:
    return champion.roll_back(home, tracker, name, version=version, reason=reason, actor=ANNA)[0]


ROWS = Stage(name="rows", artifact="dataset", run=rows, sections=no_sections)
SFT = Stage(name="sft", artifact="checkpoint", run=train, sections=no_sections, inputs=("rows",), registered_as="sft")


def sealed(checkpoint: Path, card: Card | None = None) -> tuple[Package, str]:
    """A package of ``<artifact>/model``, with the artifact's manifest, and the artifact's digest."""
    folder = checkpoint.parent
    ref = ArtifactStore(folder).seal(folder, kind="checkpoint")
    card = card or Card(text="", license_id="")
    return Package(checkpoint=checkpoint, card=card, beside={MANIFEST: folder / MANIFEST}), ref.sha256


def register_toy(home: Home, name: str = "toy") -> ArtifactRef:
    return run_pipeline([ROWS, SFT], ToyConfig.run(name=name), ["sft"], home=home, experiment=name)["sft"]
