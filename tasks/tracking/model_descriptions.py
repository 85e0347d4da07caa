"""Descriptions of versions on MLflow's pages: the card, also stored with the version's files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import read_records, record_of
from rlcore.tasks.tracking.mlflow_model import CARD
from rlcore.tasks.tracking.model_card import body_of, write_cards
from rlcore.tasks.tracking.registry import ModelVersion, read_tags
from rlcore.tasks.tracking.runs import Tracker

_MAX_LETTERS = 5000  # characters of a description in MLflow's tables
_MORE = f"\n\n(The whole card is the file {CARD} of the model.)"


def refresh_cards(home: Home, tracker: Tracker, versions: Iterable[ModelVersion]) -> None:
    """Write the cards of versions: after the registration, an evaluation, a decision, or a rollback.

    Versions without a record in this state directory are unchanged. A repeated call changes nothing.
    """
    records = read_records(home)
    for version in versions:
        tags = read_tags(tracker, version)
        record = record_of(tags, records)
        if record is not None and version.model_id:
            cards = write_cards(home, records, record, name=version.name, version=version.version, tags=tags)
            _replace(tracker, version, cards.model)


def _replace(tracker: Tracker, version: ModelVersion, card: str) -> None:
    """Replace the card in the version's files and, truncated if it is long, its description."""
    known = tracker.client.get_model_version(version.name, str(version.version)).description
    if known == _description(card):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CARD
        path.write_text(card, encoding="utf-8")
        tracker.client.log_model_artifact(version.model_id, str(path))
    # Last, so that a killed call is repeated.
    tracker.client.update_model_version(version.name, str(version.version), _description(card))


def _description(card: str) -> str:
    body = body_of(card)
    return body if len(body) <= _MAX_LETTERS else body[: _MAX_LETTERS - len(_MORE)].rpartition("\n")[0] + _MORE
