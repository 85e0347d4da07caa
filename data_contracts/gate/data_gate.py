"""Gate between any source and training: every row is accepted or quarantined.

A first scan of all rows keeps numbers, on which comparisons between rows are decided (``cross_row_checks.py``). Then
the kept rows are read again for the snapshot; only a small source stays in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.contracts.contract import Contract
from rlcore.data_contracts.drift.sketches import GROUP, Sketch, sketch
from rlcore.data_contracts.errors import LEFT_OUT, ContractError
from rlcore.data_contracts.gate.cross_row_checks import (
    ResolvedRows,
    RowSummaries,
    drop_overlaps,
    resolve_rows,
    summarize_foreign,
    summarize_row,
)
from rlcore.data_contracts.gate.eval_leakage import NEAR, Evaluated, Overlap, SharedWords, evaluated_of, texts_of
from rlcore.data_contracts.gate.ledger import EVAL, NO_ROWS, SPLITS, TRAIN, Ledger, LedgerBuilder, Mask, Rows
from rlcore.data_contracts.gate.records import Origin, Quarantined, canonical_json, excerpt
from rlcore.data_contracts.gate.report import GateReport, RuleResult
from rlcore.data_contracts.gate.row_hashes import Found, hash_rows, look_up, source_changed_error
from rlcore.data_contracts.gate.row_rules import RowCheckConfig, check_rows
from rlcore.data_contracts.gate.rules import DatasetRule, DatasetState, RuleOutcome, dataset_rules
from rlcore.data_contracts.gate.stream import HeldStream, RowStream
from rlcore.data_contracts.gate.token_budget import TokenMeter, completed_lengths

__all__ = ["GateLimits", "GateReport", "GateResult", "check"]

Sink = Callable[[pd.DataFrame], None]
MANY_LEAKS = 0.01  # fraction of rows
IF_DIFFERENT = "where they are different questions, set near_duplicates = 'ignore'"


@dataclass(frozen=True, kw_only=True)
class GateLimits(RowCheckConfig):
    """Number of kept rows, and the limits that reject a row or a dataset.

    ``max_quarantined``: largest fraction of quarantined rows. ``evaluated``: prompts of other datasets that must not be
    trained on. ``shared_words``: the n-grams that training rows must not share with such prompts. ``group_column``:
    names the document of each row, for the drift of its columns; empty if rows are independent.
    """

    num_train: int
    num_eval: int
    max_quarantined: float
    evaluated: Sequence[Messages] = ()
    shared_words: SharedWords = field(default_factory=SharedWords)
    group_column: str = ""


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """Result of the gate. ``quarantine``: rejected rows by line, the first 100,000 of each kind.

    The dataset may be used if ``report.passed``.
    """

    quarantine: tuple[Quarantined, ...]
    report: GateReport


def check(stream: RowStream, contract: Contract, limits: GateLimits, *, meter: TokenMeter, sink: Sink) -> GateResult:
    """Apply row rules, token budget, comparisons, selection and dataset rules; write kept rows to ``sink``.

    Frames of kept rows in contract columns go to ``sink`` in their order if the dataset passes.
    Raises:
        ContractError: the source cannot be read or has changed meanwhile, or its rows cannot be checked.
    """
    source_state, stream = stream.source.state(), HeldStream.of(stream)
    scanned = scan_rows(stream, contract, limits, meter=meter)
    evaluated = evaluated_of(limits.evaluated, limits)
    resolved = resolve_rows(
        stream,
        scanned.ledger,
        contract,
        evaluated,
        num_train=limits.num_train,
        num_eval=limits.num_eval,
        keeps_apart=limits.keeps_apart,
    )
    if limits.shared_words.action != "warn":
        resolved = drop_overlaps(stream, resolved, evaluated, limits.shared_words)
    state, fatal = resolved.state, [*scanned.fatal, *_shared_errors(resolved, limits)]
    outcomes = [(rule, rule.check(state)) for rule in dataset_rules(contract)] if state.is_kept.any() else []
    counts = _counts(scanned, resolved)
    is_refused = bool(fatal) or _has_too_many(counts, state, limits)
    is_refused |= any(rule.severity == "error" and not outcome.ok for rule, outcome in outcomes)
    overlap = _overlap(stream, state, evaluated, limits)
    kept = KeptRows(state, overlap, meter=meter, group_column=limits.group_column, sink=None if is_refused else sink)
    details = _read_again(stream, resolved, outcomes, evaluated, take=kept.take)
    if stream.source.state() != source_state:
        raise source_changed_error(stream.source.name)
    quarantine = _quarantine(scanned, resolved, details)
    results = [_result(rule, outcome, details) for rule, outcome in outcomes]
    results += [_apart_result(resolved), kept.overlap()] if outcomes else []
    errors = [*fatal, *_rate_errors(quarantine, counts, state, limits)]
    errors += [one.detail for one in results if one.severity == "error" and not one.ok]
    report = _report(stream, scanned, state, kept, counts=counts, rules=tuple(results), errors=tuple(errors))
    return GateResult(quarantine=quarantine, report=report)


def _report(
    stream: RowStream,
    scanned: ScannedRows,
    state: DatasetState,
    kept: KeptRows,
    *,
    counts: Counter[str],
    rules: tuple[RuleResult, ...],
    errors: tuple[str, ...],
) -> GateReport:
    sides = state.split[state.is_kept]
    return GateReport(
        contract=state.contract.name,
        source=stream.source.label,
        lines_read=scanned.lines_read,
        merged=scanned.merged,
        rows_read=len(state.ledger) + scanned.lost_reasons.total(),
        accepted=int(state.is_accepted.sum()),
        quarantined=counts.total(),
        num_train=int((sides == TRAIN).sum()),
        num_eval=int((sides == EVAL).sum()),
        digest=kept.digest,
        train_digest=kept.train_digest,
        reasons=dict(counts.most_common()),
        rules=rules,
        sketches=kept.sketches(),
        errors=errors,
    )


def _overlap(stream: RowStream, state: DatasetState, evaluated: Evaluated, limits: GateLimits) -> Overlap:
    found = look_up(stream, state.ledger, np.flatnonzero(state.is_kept & (state.split == EVAL)))
    own = [row["messages"] for some in found for row in some.rows]
    return Overlap([*own, *evaluated.messages], size=limits.shared_words.size)


def _read_again(
    stream: RowStream,
    resolved: ResolvedRows,
    outcomes: Sequence[tuple[DatasetRule, RuleOutcome]],
    evaluated: Evaluated,
    *,
    take: Callable[[Found], None],
) -> RowSummaries:
    state = resolved.state
    spoken = [rows[:MAX_LISTED] for one in resolved.flagged for rows in (one.rows, one.others)]
    places = np.unique(np.concatenate([*spoken, *(outcome.rows for _, outcome in outcomes), NO_ROWS]))
    details = {place: summarize_foreign(evaluated.messages[-1 - place]) for place in places[places < 0].tolist()}
    is_spoken_of = np.zeros(len(state.ledger), dtype=bool)
    is_spoken_of[places[places >= 0]] = True
    for found in look_up(stream, state.ledger, np.flatnonzero(state.is_kept | is_spoken_of)):
        for at in np.flatnonzero(is_spoken_of[found.places]).tolist():
            details[int(found.places[at])] = summarize_row(found.rows[at], found.origins[at], state.contract)
        take(found.only(state.is_kept[found.places]))
    return details


def _quarantine(scanned: ScannedRows, resolved: ResolvedRows, details: RowSummaries) -> tuple[Quarantined, ...]:
    refused = [*scanned.lost, *scanned.listed.values()]
    for one in resolved.flagged:
        for row, other in zip(one.rows[:MAX_LISTED].tolist(), one.others[:MAX_LISTED].tolist(), strict=True):
            shown = excerpt(one.describe_match(details[row], details[other]))
            origin = details[row].origin or Origin(line=0)
            refused.append(Quarantined(origin=origin, field=one.field, excerpt=shown, reason=one.reason))
    return tuple(sorted(refused, key=lambda one: (one.origin.source, one.origin.line)))


def _counts(scanned: ScannedRows, resolved: ResolvedRows) -> Counter[str]:
    counts = Counter(scanned.lost_reasons)
    numbers = np.bincount(scanned.ledger.reason, minlength=1)
    counts.update({reason: int(numbers[place]) for place, reason in enumerate(scanned.reasons) if place})
    counts.update({one.reason: len(one.rows) for one in resolved.flagged})
    return +counts


def _result(rule: DatasetRule, outcome: RuleOutcome, details: RowSummaries) -> RuleResult:
    detail = outcome.detail.format(*(details[row] for row in outcome.rows.tolist())) if not outcome.ok else ""
    return RuleResult(name=rule.name, severity=rule.severity, value=float(outcome.value), ok=outcome.ok, detail=detail)


def _apart_result(resolved: ResolvedRows) -> RuleResult:
    state, found = resolved.state, []
    if resolved.crowded:
        found.append(f"{resolved.crowded} prompts that are evaluated on are like many others: a template, and no leak")
    if resolved.num_apart > MANY_LEAKS * state.is_accepted.sum():
        found.append(f"{resolved.num_apart} training rows are like one of these and are held out too: {IF_DIFFERENT}")
    is_ok, detail = not found, "; ".join(found)
    return RuleResult(
        name="eval_prompts_are_apart", severity="warning", value=float(resolved.num_apart), ok=is_ok, detail=detail
    )


def _shared_errors(resolved: ResolvedRows, limits: GateLimits) -> list[str]:
    if limits.shared_words.action != "refuse" or not resolved.num_shared:
        return []
    return [f"training rows rejected: {resolved.num_shared}; each {limits.shared_words.reason}"]


def _has_too_many(counts: Counter[str], state: DatasetState, limits: GateLimits) -> bool:
    accepted, refused = int(state.is_accepted.sum()), _num_refused(counts)
    return not accepted or refused > limits.max_quarantined * (refused + accepted)


def _num_refused(counts: Counter[str]) -> int:
    return sum(count for reason, count in counts.items() if not reason.startswith(LEFT_OUT))


def _rate_errors(
    quarantine: Sequence[Quarantined], counts: Counter[str], state: DatasetState, limits: GateLimits
) -> list[str]:
    if not _has_too_many(counts, state, limits):
        return []
    refused, accepted = _num_refused(counts), int(state.is_accepted.sum())
    examples = ". ".join(str(one) for one in quarantine[:3])
    if not accepted:
        return [f"none of its {counts.total()} rows is left: {examples}" if counts else "it has no rows"]
    total = refused + accepted
    share = f"{refused} of {total} rows ({refused / total:.1%})"
    hint = f" ({IF_DIFFERENT})" if counts[NEAR] else ""
    return [f"{share} are quarantined, more than max_quarantined = {limits.max_quarantined:g} allows: {examples}{hint}"]


MAX_LISTED = 100_000  # rejected rows that are listed; all of them are counted


@dataclass(frozen=True, kw_only=True)
class ScannedRows:
    """All rows as numbers, and the rejected ones.

    ``listed``: the entries of rejected rows, by row of the ledger. ``lost``: lines that never became rows, with
    ``lost_reasons`` of all. ``reasons``: the texts of the ledger's reasons. ``fatal``: rows that reject the dataset.
    ``lines_read``: lines of the source; ``merged``: removed rows that were equal to another.
    """

    ledger: Ledger
    listed: Mapping[int, Quarantined]
    lost: Sequence[Quarantined]
    lost_reasons: Counter[str]
    reasons: Sequence[str]
    fatal: Sequence[str]
    lines_read: int
    merged: int


@dataclass(kw_only=True)
class _ScanStats:
    listed: dict[int, tuple[Quarantined, bool]] = field(default_factory=dict)
    lost: list[Quarantined] = field(default_factory=list)
    lost_reasons: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, int] = field(default_factory=lambda: {"": 0})
    rows: int = 0
    lines: int = 0


def scan_rows(stream: RowStream, contract: Contract, terms: RowCheckConfig, *, meter: TokenMeter) -> ScannedRows:
    """Scan each row once, a batch at a time.

    Raises:
        ContractError: the source cannot be read, or a column is missing or unknown: no row can be checked.
    """
    builder, notes = LedgerBuilder(), _ScanStats()
    for batch in stream.batches():
        checked = check_rows(batch, contract, terms, meter=meter, where=stream.source.name)
        reason = np.zeros(len(batch.rows), dtype=np.int32)
        for place, (entry, is_fatal) in checked.refused.items():
            reason[place] = notes.reasons.setdefault(entry.reason, len(notes.reasons))
            if is_fatal or len(notes.listed) < MAX_LISTED:
                notes.listed[notes.rows + place] = entry, is_fatal
        columns, digests = hash_rows(batch, contract, terms)
        builder.add({**columns, "reason": reason, "lengths": checked.lengths}, digests)
        notes.rows, notes.lines = notes.rows + len(batch.rows), notes.lines + batch.num_lines
        notes.lost_reasons.update(one.reason for one in batch.rejected)
        notes.lost += batch.rejected[: max(0, MAX_LISTED - len(notes.lost))]
    ledger, is_first = builder.finish()
    places = np.cumsum(is_first) - 1
    first = {int(places[row]): found for row, found in notes.listed.items() if is_first[row]}
    return ScannedRows(
        ledger=ledger,
        listed={row: entry for row, (entry, _) in first.items()},
        lost=notes.lost,
        lost_reasons=notes.lost_reasons,
        reasons=list(notes.reasons),
        fatal=[str(entry) for entry, is_fatal in first.values() if is_fatal],
        lines_read=notes.lines,
        merged=notes.rows - len(ledger),
    )


MAX_SKETCHED = 8_192  # rows of whole prompts: chance moves PSI and KS by less than 0.05, and 0.1 warns


class KeptRows:
    """Collector of kept rows in order, with their sides: digest, sketches and overlap; they go to ``sink``, if any."""

    def __init__(
        self, state: DatasetState, overlap: Overlap, *, meter: TokenMeter, group_column: str, sink: Sink | None
    ) -> None:
        self._state, self._overlap, self._meter, self._group_column = state, overlap, meter, group_column
        self._sink = sink
        self._written = [*state.contract.columns, *state.contract.carried]
        self._digest, self._train_digest = hashlib.sha256(), hashlib.sha256()
        self._is_sketched = sketched_rows(state)
        self._sketched: list[pd.DataFrame] = []

    def take(self, found: Found) -> None:
        """Add the next rows: a frame of contract columns, and those that travel with them."""
        state = self._state
        sides = state.split[found.places].tolist()
        none = dict.fromkeys(state.contract.carried, "")
        rows = [{**none, **row, "split": SPLITS[side]} for row, side in zip(found.rows, sides, strict=True)]
        lines = [self._spelled(row) + b"\n" for row in rows]
        self._digest.update(b"".join(lines))
        pairs = zip(lines, sides, strict=True)
        self._train_digest.update(b"".join([line for line, side in pairs if side == TRAIN]))
        train = (row for row, side in zip(rows, sides, strict=True) if side == TRAIN)
        self._overlap.see([texts_of(row, state.contract) for row in train])
        frame = pd.DataFrame({name: [row[name] for row in rows] for name in self._written})
        self._note(rows, frame, found.places)
        if self._sink and len(frame):
            self._sink(frame)

    def _spelled(self, row: dict[str, Any]) -> bytes:
        has_others = len(row) > len(self._written)
        return canonical_json({name: row[name] for name in self._written} if has_others else row)

    @property
    def digest(self) -> str:
        """Return the SHA-256 over the canonical JSON lines of the rows, independent of the file format."""
        return self._digest.hexdigest()

    @property
    def train_digest(self) -> str:
        """Return :attr:`digest` of the training rows alone."""
        return self._train_digest.hexdigest()

    def sketches(self) -> dict[str, Sketch]:
        return sketch(pd.concat(self._sketched, ignore_index=True)) if self._sketched else {}

    def overlap(self) -> RuleResult:
        """Return the fraction of evaluation prompts that share an n-gram with a training row."""
        touched, prompts, size = self._overlap.num_touched, self._overlap.num_prompts, self._overlap.size
        return RuleResult(
            name=f"eval_shares_no_{size}_words",
            severity="warning",
            value=touched / max(1, prompts),
            ok=not touched,
            detail=f"{touched} of {prompts} evaluation prompts share {size} words with training" if touched else "",
        )

    def _note(self, rows: list[dict[str, Any]], frame: pd.DataFrame, places: Rows) -> None:
        chosen = np.flatnonzero(self._is_sketched[places])
        if not len(chosen):
            return
        state, own = self._state, [rows[place] for place in chosen.tolist()]
        known, answers = state.ledger.lengths[places[chosen]], state.contract.answers
        lengths = completed_lengths(own, known, state.contract, self._meter)
        sketched = frame.drop(columns=[*answers, *state.contract.carried]).iloc[chosen]
        names = ["prompt_tokens", *(f"{name}_tokens" for name in answers)]
        sketched[names] = lengths.astype(int)
        sketched["prompt_hash"] = state.prompts[places[chosen]]
        if self._group_column:
            sketched[GROUP] = [self._group(row) for row in own]
        self._sketched.append(sketched)

    def _group(self, row: dict[str, Any]) -> str:
        if (value := group_of(row, self._group_column)) is not None:
            return str(value)
        raise ContractError(
            f"group_column = {self._group_column!r}: a row has no such value",
            fix=f"name a column that every row has: {', '.join(sorted(row))}, or one of the source of prompts",
        )


def group_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the document of a row, which a column of the contract or of the source names; None if neither has it."""
    return row[column] if column in row else json.loads(row.get("columns") or "{}").get(column)


def sketched_rows(state: DatasetState) -> Mask:
    """Return all kept rows, or those of a bounded number of prompts, selected by hash."""
    rows = np.flatnonzero(state.is_kept)
    if len(rows) > MAX_SKETCHED:
        order = state.ledger.order[state.prompts[rows]]
        values, sizes = np.unique(order, return_counts=True)
        last = max(1, int(np.searchsorted(np.cumsum(sizes), MAX_SKETCHED, side="right")))
        rows = rows[order <= values[last - 1]]
    mask = np.zeros(len(state.ledger), dtype=bool)
    mask[rows] = True
    return mask
