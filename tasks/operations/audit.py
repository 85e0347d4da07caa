"""Audit log for people: its entries as a table; errors of the log, its signatures and the aliases; missing entries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import zip_longest

from rlcore.errors import PromotionError, RlcoreError, shown
from rlcore.tasks.operations.backup_target import BackupTarget, last_backup
from rlcore.tasks.pipeline.approval import APPROVE
from rlcore.tasks.store.audit_log import AuditEntry, audit_path, chain_errors, read_entries
from rlcore.tasks.store.scratch import scratch_folder
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.signatures import verify
from rlcore.tasks.tracking.champion import AWAIT, NOBODY, PROMOTE, REJECT, ROLLBACK, mirrored_entries, number_of
from rlcore.tasks.tracking.database import require_made
from rlcore.tasks.tracking.registry import CHAMPION, find_version
from rlcore.tasks.tracking.runs import Tracker, open_tracker

_LONGEST = 80  # characters of a detail in the table
_HIDDEN = ("artifact", "signature", "allowed", "document")  # details that a line has no room for


def audit_table(home: Home, subject: str = "") -> str:
    """Format the entries about a registered model or version, or all; the newest last.

    Raises:
        StorageError: nothing was run in this state directory, or a line is no entry.
    """
    require_made(home)
    found = [each for each in read_entries(home) if subject in ("", each.subject, each.subject.rpartition("/")[0])]
    if not found:
        return f"no entries{subject and f' about {subject}'} in {audit_path(home)}\n"
    rows = [(str(each.number), each.time[:16], each.subject, each.action, _who(each), _what(each)) for each in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def audit_errors(home: Home) -> tuple[tuple[str, ...], int]:
    """Return the errors of the log, and its number of entries.

    Entries must form a chain and be those that the registry has; signatures must fit; promotions must have the
    approvals that they name; and ``champion`` must be where the last act put it.
    Raises:
        StorageError: nothing was run in this state directory.
    """
    require_made(home)
    tracker = open_tracker(home)
    if errors := chain_errors(home, mirrored_entries(tracker)):
        return errors, 0
    entries = read_entries(home)
    found = [*_signature_errors(entries), *_promotion_errors(entries), *_alias_errors(entries, tracker)]
    return tuple(found), len(entries)


def backup_errors(home: Home) -> tuple[tuple[str, ...], str]:
    """Return the errors of the log against the newest backup, and up to where a cut end would be found.

    The registry has the entries about versions alone: those about the state directory are also in its backups.
    """
    last = last_backup(home)
    if last is None:
        return (), "without a backup, missing entries about the home at its end are not noticed"
    name = last.get("name", "of before")  # by an earlier release
    try:
        known = _entries_of(home, BackupTarget(last["target"]), name)
    except RlcoreError as error:
        return (), f"it was not compared with the backup {name}: {error.what}"
    entries = read_entries(home)
    wrong = [each.number for each, found in zip_longest(known, entries[: len(known)]) if each != found]
    if wrong:
        return (f"{audit_path(home).name}: entry {wrong[0]} of the backup {name} is missing, or is another",), ""
    return (), f"none of the {len(known)} in the backup {name} is missing"


def _entries_of(home: Home, target: BackupTarget, name: str) -> tuple[AuditEntry, ...]:
    """Return the entries that a backup has."""
    with scratch_folder(home.work) as folder:
        copy = audit_path(Home(folder))
        for each in target.read(name).files:
            if each.path == copy.name:
                target.get(each.sha256, copy)
        return read_entries(Home(folder))


def _who(entry: AuditEntry) -> str:
    actor = entry.actor
    local = f"{actor.get('user', '?')}@{actor.get('host', '?')}"
    return actor.get("principal") or (f"{actor['flow_run']} ({local})" if "flow_run" in actor else local)


def _what(entry: AuditEntry) -> str:
    details = {name: value for name, value in entry.details.items() if name not in _HIDDEN}
    if "document" in entry.details:
        details["reason"] = json.loads(entry.details["document"])["reason"]
    if "verdict" in details:
        details["verdict"] = details["verdict"][:12]
    shortened = {name: shown(value, max_chars=_LONGEST) for name, value in details.items() if value not in ("", [])}
    return ", ".join(f"{name} {value}" for name, value in shortened.items())


def _signature_errors(entries: Sequence[AuditEntry]) -> Iterator[str]:
    """Yield decisions whose signature does not fit, at the time of the entry, or that state something else."""
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
    """Yield promotions without the approvals that the newest request about the version had asked for."""
    requests: dict[str, AuditEntry] = {}
    signed: dict[int, AuditEntry] = {}
    for each in entries:
        if each.action == AWAIT:
            requests[each.subject] = each
        elif each.action == APPROVE:
            signed[each.number] = each
        elif each.action == PROMOTE and (request := requests.get(each.subject)):
            named = [signed[number] for number in each.details["approvals"] if number in signed]
            own = [one for one in named if one.subject == each.subject and one.number > request.number]
            if request.details["verdict"] == each.details["verdict"] and len(own) < request.details["needed"]:
                yield f"entry {each.number}: {each.subject} was promoted with {len(own)} approvals"


def _alias_errors(entries: Sequence[AuditEntry], tracker: Tracker) -> Iterator[str]:
    """Yield models whose champion is another than the one of their last promotion or rollback."""
    moves: Mapping[str, AuditEntry] = {
        each.subject.rpartition("/")[0]: each for each in entries if each.action in (PROMOTE, ROLLBACK)
    }
    for name, last in moves.items():
        present, expected = number_of(find_version(tracker, name, CHAMPION)), last.details["to"]
        if present != expected:
            words = "no version" if present == NOBODY else f"version {present}"
            yield (
                f"{name}: {words} is champion, and by entry {last.number} ({last.action}) it is version {expected}: "
                "the alias was moved outside of rlcore, or a command was killed and has to be repeated"
            )
