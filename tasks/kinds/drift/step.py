"""Drift gate: new data is compared with the champion's training data, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcore.data_contracts.drift.comparison import (
    ColumnDrift,
    DriftLimits,
    Level,
    compare_columns,
    not_compared,
    worst_level,
)
from rlcore.errors import DataError
from rlcore.tasks.presets.settings import DriftConfig, RetrainConfig
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.store.storage import read_json, write_json

_DIGITS = 12
_NAME = 40  # characters of a value in messages


@dataclass(frozen=True, kw_only=True)
class DatasetDrift:
    """Drift of one dataset from its last accepted version; ``accepted`` is empty if there is none.

    ``new`` and ``accepted`` are digests of rows. ``left_out``: columns that only the new rows have; ``lost``: columns
    of the accepted rows that cannot be compared. ``is_excused``: the preset accepts the new rows unchanged.
    """

    name: str
    new: str
    accepted: str
    columns: tuple[ColumnDrift, ...]
    left_out: tuple[str, ...]
    lost: tuple[str, ...]
    is_excused: bool

    @property
    def level(self) -> Level:
        """Return the worst level of its columns, or ``refuse`` if one cannot be compared.

        At most ``warn`` if the rows are excused.
        """
        is_compared = self.accepted and not self.lost and (self.columns or self.accepted == self.new)
        level = worst_level(self.columns) if is_compared else "refuse"
        return "warn" if level == "refuse" and self.is_excused else level


def run_drift(context: StageContext, *, accepted: Mapping[str, str]) -> StageResult:
    """Compare each input dataset with its last accepted snapshot, given as an artifact's digest by the stage's name.

    Only the report of that snapshot remains, in the folder ``past`` of the state directory.
    Raises:
        DataError: a column has drifted too far or cannot be compared. The page stays in the work folder, which the
            error
            names.
    """
    settings: RetrainConfig = context.config.retrain
    root = find_home().past
    found = [
        compare_snapshots(name, folder, root / accepted[name] if name in accepted else None, settings.drift)
        for name, folder in sorted(context.inputs.items())
    ]
    write_json([asdict(one) for one in found], context.folder / "drift.json")
    metrics = _metrics([column for one in found for column in one.columns])
    context.tracker.log_metrics(metrics)
    for one in found:
        context.log(sentence_of(one))
    refused = [one for one in found if one.level == "refuse"]
    if refused:
        raise DataError(
            "the new data drift from the last accepted, or cannot be compared with them: "
            + "; ".join(map(sentence_of, refused)),
            where=str(context.work / "drift.md"),
            fix="check the page; if the change is intended, accept these rows: retrain.drift.accepted="
            + str([one.new[:_DIGITS] for one in refused]),
        )
    return StageResult(metrics=metrics)


def compare_snapshots(name: str, new: Path, accepted: Path | None, settings: DriftConfig) -> DatasetDrift:
    """Compare the sketches of two snapshots; ``accepted`` is None if the champion saw no such dataset."""
    report = read_json(new / "report.json")
    before: Mapping[str, Any] = read_json(accepted / "report.json") if accepted else {"digest": "", "sketches": {}}
    missing = not_compared(before["sketches"], report["sketches"])
    limits = DriftLimits(
        warn_psi=settings.warn_psi,
        refuse_psi=settings.refuse_psi,
        warn_ks=settings.warn_ks,
        refuse_ks=settings.refuse_ks,
        chance=settings.false_alarm_rate,
    )
    return DatasetDrift(
        name=name.removeprefix("prepare_"),
        new=report["digest"],
        accepted=before["digest"],
        columns=compare_columns(before["sketches"], report["sketches"], limits),
        left_out=tuple(name for name in missing if name not in before["sketches"]) if before["digest"] else (),
        lost=tuple(name for name in missing if name in before["sketches"]),
        is_excused=any(report["digest"].startswith(digest) for digest in settings.accepted),
    )


def sentence_of(one: DatasetDrift) -> str:
    """Describe the drift of a dataset in a sentence."""
    how = ", accepted by a person" if one.is_excused else ""
    if not one.accepted:
        return f"{one.name}: the champion was trained on no data of that name, so there is nothing to compare with{how}"
    if one.accepted == one.new:
        return f"{one.name}: the accepted rows, unchanged"
    if not one.columns:
        return f"{one.name}: no column can be compared{how}"
    moved = [column for column in one.columns if column.level != "calm"]
    if not moved and not one.lost:
        return f"{one.name}: no column of {len(one.columns)} has moved"
    words = [f"{column.column} ({_distance(column)}: {moves_of(column)})" for column in moved]
    words += [f"{name} (cannot be compared)" for name in one.lost]
    return f"{one.name}: {', '.join(words)}{how}"


def _distance(column: ColumnDrift) -> str:
    return f"PSI {column.psi:.2f}" + (f", KS {column.ks:.2f}" if column.means else "")


def moves_of(column: ColumnDrift) -> str:
    """Return the names and bins whose fractions changed most."""
    moves = (f"{' '.join(move.name.split())[:_NAME]} {move.before:.1%} → {move.after:.1%}" for move in column.moves)
    return "; ".join(moves) or "nothing"


def _metrics(columns: Sequence[ColumnDrift]) -> dict[str, float]:
    return {
        "drift/psi": max((column.psi for column in columns), default=0.0),
        "drift/ks": max((column.ks for column in columns), default=0.0),
        "drift/columns_moved": float(sum(column.level != "calm" for column in columns)),
    }
