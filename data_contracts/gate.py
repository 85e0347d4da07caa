"""The gate between any source and training: every row is accepted or quarantined, and both are counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from data_contracts import preference_pairs, prompts
from data_contracts.budget import TokenMeter, measure
from data_contracts.contract import WHOLE_FRAME, Contract, RowComplaint, complaints
from data_contracts.errors import ContractError
from data_contracts.records import Origin, Quarantined, canonical_json, excerpt
from data_contracts.report import GateReport, RuleResult
from data_contracts.rules import DatasetRule, dataset_rules
from data_contracts.sketches import sketch
from data_contracts.splits import select
from data_contracts.text import prompt_hash

__all__ = ["Candidates", "GateLimits", "GateReport", "GateResult", "check"]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Rows in contract columns on their way in; ``origins`` has one entry per row of ``frame``.

    ``rejected``: lines that never became rows. ``lines_read`` and ``merged`` go to the report.
    """

    source: str
    frame: pd.DataFrame
    origins: Sequence[Origin]
    rejected: Sequence[Quarantined] = ()
    lines_read: int = 0
    merged: int = 0


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """How much is kept, and when a dataset is refused.

    ``max_tokens``: budget of one row. ``max_quarantined``: largest share of quarantined rows. ``forbidden_prompts``:
    hashes of prompts that may not be trained on. ``seed``: which training prompts are kept when there are more.
    """

    num_train: int
    num_eval: int
    max_tokens: int
    max_quarantined: float
    forbidden_prompts: frozenset[str] = frozenset()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """``kept``: the rows for training and evaluation, in contract columns. It may be used if ``report.passed``."""

    kept: pd.DataFrame
    quarantine: tuple[Quarantined, ...]
    report: GateReport


def check(candidates: Candidates, contract: Contract, limits: GateLimits, *, meter: TokenMeter) -> GateResult:
    """Row rules, token budget, selection, dataset rules, digest.

    A dataset that fails is returned as well, so that its quarantine and report can be written before
    :meth:`GateReport.require_passed` refuses it.

    Raises:
        ContractError: a column is missing or unknown: no row can be judged.
    """
    clean, quarantine, fatal = _screen(candidates, contract, meter, limits.max_tokens)
    kept = select(
        clean, clean["prompt_hash"].tolist(), num_train=limits.num_train, num_eval=limits.num_eval, seed=limits.seed
    )
    rules = dataset_rules(
        contract, num_train=limits.num_train, num_eval=limits.num_eval, forbidden=limits.forbidden_prompts
    )
    results = tuple(_apply(rule, clean if rule.rows == "accepted" else kept) for rule in rules) if len(kept) else ()
    faults = [*fatal, *_rate_fault(quarantine, len(clean), limits.max_quarantined)]
    faults += [f"{one.name}: {one.value:g}, {one.detail}" for one in results if one.severity == "error" and not one.ok]
    rows = kept[list(contract.columns)]
    report = GateReport(
        contract=contract.name,
        source=candidates.source,
        lines_read=candidates.lines_read,
        merged=candidates.merged,
        rows_read=len(candidates.frame) + len(candidates.rejected),
        accepted=len(clean),
        quarantined=len(quarantine),
        num_train=int((rows["split"] == "train").sum()),
        num_eval=int((rows["split"] == "eval").sum()),
        digest=digest_rows(rows),
        reasons=dict(Counter(one.reason for one in quarantine).most_common()),
        rules=results,
        sketches=sketch(kept),
        faults=tuple(faults),
    )
    return GateResult(kept=rows, quarantine=quarantine, report=report)


def digest_rows(frame: pd.DataFrame) -> str:
    """SHA-256 over the canonical JSON of each row, one a line, in order; it does not depend on the file format."""
    digest = hashlib.sha256()
    names = list(frame.columns)
    for values in zip(*(frame[name].tolist() for name in names), strict=True):
        digest.update(canonical_json(dict(zip(names, values, strict=True))) + b"\n")
    return digest.hexdigest()


def _screen(
    candidates: Candidates, contract: Contract, meter: TokenMeter, max_tokens: int
) -> tuple[pd.DataFrame, tuple[Quarantined, ...], list[str]]:
    """The rows that pass every row rule, with their token counts and prompt hash; the others; the fatal faults."""
    frame, origins = candidates.frame.reset_index(drop=True), list(candidates.origins)
    refused = list(candidates.rejected)
    broken = complaints(frame, contract) if len(frame) else []
    _require_columns(broken, candidates.source)
    refused += _quarantine(broken, origins)
    frame, origins = _without(frame, origins, broken)
    measured = measure(frame, contract, meter, max_tokens=max_tokens)
    over = list(measured.complaints)
    refused += _quarantine(over, origins)
    fatal = [str(_quarantine([one], origins)[0]) for one in over if one.is_fatal]
    hashes = pd.Series([prompt_hash(messages) for messages in frame["messages"]], dtype=str, name="prompt_hash")
    clean, origins = _without(pd.concat([frame, measured.lengths, hashes], axis=1), origins, over)
    opposed = _contradictions(clean, contract)
    refused += _quarantine(opposed, origins)
    clean, _ = _without(clean, origins, opposed)
    return clean, tuple(sorted(refused, key=lambda one: one.origin.line)), fatal


def _contradictions(clean: pd.DataFrame, contract: Contract) -> list[RowComplaint]:
    """Rows of which another row says the opposite; tests of code do not contradict each other by being different."""
    if contract is preference_pairs.CONTRACT:
        return [*preference_pairs.conflicts(clean), *preference_pairs.mixed_sets(clean)]
    return prompts.conflicts(clean) if contract is prompts.CONTRACT else []


def _require_columns(broken: Sequence[RowComplaint], source: str) -> None:
    whole = [f"{one.value}: {one.reason}" for one in broken if one.row == WHOLE_FRAME]
    if whole:
        raise ContractError(f"the columns are not those of the contract: {'; '.join(whole[:3])}", where=source)


def _quarantine(broken: Sequence[RowComplaint], origins: Sequence[Origin]) -> list[Quarantined]:
    """One entry per row: its first field and value, and all its reasons."""
    by_row: dict[int, list[RowComplaint]] = {}
    for one in broken:
        by_row.setdefault(one.row, []).append(one)
    return [
        Quarantined(
            origin=origins[row],
            field=found[0].field,
            excerpt=excerpt(found[0].value),
            reason="; ".join(dict.fromkeys(one.reason for one in found)),
        )
        for row, found in by_row.items()
    ]


def _without(
    frame: pd.DataFrame, origins: Sequence[Origin], broken: Sequence[RowComplaint]
) -> tuple[pd.DataFrame, list[Origin]]:
    rows = {one.row for one in broken}
    left = [place for place in range(len(frame)) if place not in rows]
    return frame.iloc[left].reset_index(drop=True), [origins[place] for place in left]


def _apply(rule: DatasetRule, frame: pd.DataFrame) -> RuleResult:
    outcome = rule.check(frame)
    detail = "" if outcome.ok else outcome.detail
    return RuleResult(name=rule.name, severity=rule.severity, value=float(outcome.value), ok=outcome.ok, detail=detail)


def _rate_fault(quarantine: Sequence[Quarantined], accepted: int, max_quarantined: float) -> list[str]:
    total = len(quarantine) + accepted
    if total == 0:
        return ["it has no rows"]
    examples = ". ".join(str(one) for one in quarantine[:3])
    if accepted == 0:
        return [f"none of its {total} rows is left: {examples}"]
    if len(quarantine) > max_quarantined * total:
        share = f"{len(quarantine)} of {total} rows ({len(quarantine) / total:.1%})"
        return [f"{share} are quarantined, more than {max_quarantined:.1%}: {examples}"]
    return []
