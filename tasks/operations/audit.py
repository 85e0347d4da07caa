"""Audit log for people: its entries as a table; errors of the log, its signatures and the aliases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from rlcore.errors import ModelError, PromotionError, shown
from rlcore.tasks.promotion.approvers import OFF, verify
from rlcore.tasks.promotion.champion import (
    APPROVE,
    AWAIT,
    NOBODY,
    PROMOTE,
    REJECT,
    ROLLBACK,
    champion_before,
    changed_text,
    is_approved,
    is_move,
    moved_text,
    number_of,
)
from rlcore.tasks.store.audit_log import AuditEntry, audit_path, chain_errors, read_entries
from rlcore.tasks.store.locks import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.database import require_made
from rlcore.tasks.tracking.registry import ModelVersion, champions, download_model
from rlcore.tasks.tracking.runs import open_tracker

_FOUND_LATE = "find out who moved it, and compare and promote again"
_COMPLETES = "or a command was killed: the next rlcore promote, retrain or rollback completes it"
_REMOVE = "as MLflow's administrator, remove the alias champion"
_LONGEST = 80  # characters of a detail in the table
_HIDDEN = ("artifact", "signature", "allowed", "document", "sentence")  # details that a line has no room for


def audit_table(home: Home, subject: str = "") -> str:
    """Format the entries about a registered model or version, or all; the newest last.

    Raises:
        StorageError: nothing was run in this state directory, or a line is no entry.
    """
    require_made(home)
    found = [each for each in read_entries(home) if subject in ("", each.subject, each.model)]
    if not found:
        return f"no entries{subject and f' about {subject}'} in {audit_path(home)}\n"
    rows = [(str(each.number), each.time[:16], each.subject, each.action, _who(each), _what(each)) for each in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def audit_errors(home: Home) -> tuple[tuple[str, ...], int]:
    """Return the errors of the log, and its number of entries.

    Entries must form a chain; signatures must fit; promotions must have the approval that they need; and ``champion``
    must have been, at each entry and now, where the act before had put it.
    Raises:
        StorageError: nothing was run in this state directory.
    """
    require_made(home)
    tracker = open_tracker(home)
    if errors := chain_errors(home):
        return errors, 0
    entries = read_entries(home)
    registered = champions(tracker, {each.model for each in entries} | _names(home))
    found: list[str] = []
    for check in (_signature_errors(entries), _promotion_errors(entries), _alias_errors(entries, registered)):
        try:
            found += [*check]
        except (KeyError, ValueError, TypeError) as error:  # of a value that no entry of rlcore has
            found.append(f"{audit_path(home).name}: an entry lacks what rlcore writes ({error!r})")
    return tuple(dict.fromkeys(found)), len(entries)


def file_errors(home: Home) -> tuple[str, ...]:
    """Return the champions whose files in MLflow are not those of the artifact that was promoted; all are read."""
    found = list[str]()
    for name, version in champions(open_tracker(home)).items():
        with scratch_folder(home.work) as folder:
            try:
                download_model(f"models:/{name}/{version.version}", folder)
            except ModelError as error:
                found.append(f"{name}: version {version.version} is champion; {error.what}")
    return tuple(found)


def _who(entry: AuditEntry) -> str:
    actor = entry.actor
    local = f"{actor.get('user', '?')}@{actor.get('host', '?')}"
    who = actor.get("principal") or (f"{actor['flow_run']} ({local})" if "flow_run" in actor else local)
    return shown(who, max_chars=_LONGEST)


def _what(entry: AuditEntry) -> str:
    details = {name: value for name, value in entry.details.items() if name not in _HIDDEN}
    if "document" in entry.details:
        details["reason"] = json.loads(entry.details["document"])["reason"]
    if "verdict" in details:
        details["verdict"] = details["verdict"][:12]
    shortened = {name: shown(value, max_chars=_LONGEST) for name, value in details.items() if value not in ("", [])}
    return ", ".join(f"{name} {value}" for name, value in shortened.items())


def _signature_errors(entries: Sequence[AuditEntry]) -> Iterator[str]:
    for each in entries:
        if each.action not in (APPROVE, REJECT):
            continue
        document = each.details["document"]
        try:
            signer = verify(
                document, each.details["signature"], each.details["allowed"], at=datetime.fromisoformat(each.time)
            )
        except PromotionError as error:
            yield f"entry {each.number}: {error.what}"
            continue
        stated = json.loads(document)
        if signer.principal != each.actor.get("principal"):
            yield f"entry {each.number}: signed by {signer.principal}, not by {each.actor.get('principal')}"
        if (stated["version"], stated["decision"]) != (each.subject, each.action):
            yield f"entry {each.number}: the document is about {stated['version']}: {stated['decision']}"


def _promotion_errors(entries: Sequence[AuditEntry]) -> Iterator[str]:
    """Yield promotions without the approval or the file that they need.

    A rollback to a version that no entry made champion before is such a promotion.
    """
    ruled: AuditEntry | None = None
    made = set[tuple[str, str, str]]()
    for place, each in enumerate(entries):
        rules = each.details.get("rules", "")
        if each.action == PROMOTE and not rules and ruled:
            yield f"entry {each.number}: {each.subject} was promoted without the approvers of entry {ruled.number}"
        is_needed = each.action == PROMOTE and rules not in ("", OFF)
        if is_needed and not is_approved(entries[:place], each.subject, each.details):
            yield f"entry {each.number}: {each.subject} was promoted without an approval"
        if is_move(each):
            now = (each.model, str(each.details["to"]), str(each.details["artifact"]))
            if each.action == ROLLBACK and now not in made:
                yield f"entry {each.number}: a rollback to version {now[1]} of {now[0]}, which no entry promoted"
            made.add(now)
        ruled = each if rules else ruled


def _names(home: Home) -> set[str]:
    # Whoever made such a model in MLflow before can remove the tags by which it is known.
    return {f"{path.name}-{path.parent.name}" for path in home.cache.glob("*/*") if path.is_dir()}


def _alias_errors(entries: Sequence[AuditEntry], registered: Mapping[str, ModelVersion]) -> Iterator[str]:
    last: dict[str, AuditEntry] = {}
    seen: dict[str, str] = {}
    for each in entries:
        if not is_move(each) and each.action != AWAIT:
            continue
        name, found = each.model, champion_before(each)
        if found != seen.get(name, NOBODY):
            yield f"entry {each.number}, {moved_text(name, found, last.get(name))} before; {_FOUND_LATE}"
        seen[name] = each.details["to"] if is_move(each) else found
        if is_move(each):
            last[name] = each
    for name in sorted(registered.keys() | last.keys()):
        version, move = registered.get(name), last.get(name)
        present = number_of(version)
        if present != seen.get(name, NOBODY):
            is_killed = move is not None and present in (champion_before(move), NOBODY)
            fix = _COMPLETES if is_killed else f"give version {seen[name]} the alias champion" if move else _REMOVE
            yield f"{moved_text(name, present, move)}; {fix}"
        elif version and move and (what := changed_text(version, move)):
            yield f"{what}; restore MLflow's database"
