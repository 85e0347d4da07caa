"""Champion of a registered model: each move of an alias, recorded in the audit log.

The aliases: ``champion``, ``previous``, ``challenger``, and ``candidate`` (awaits an approval; at most one). MLflow
cannot move an alias conditionally, so all moves are made under a lock in the state directory. State directories that
share a server share no lock.

The audit log decides which version is champion: a move is recorded first, then applied, with the alias last. The next
command completes a move of one that was killed, and refuses if the alias was moved by somebody else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import PromotionError
from rlcore.tasks.promotion.approvers import FILE, read_approvers
from rlcore.tasks.store.audit_log import AuditEntry, read_entries, record_action
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.mlflow_model import CLEANED
from rlcore.tasks.tracking.registry import (
    CANDIDATE,
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    ModelVersion,
    as_tag,
    find_number,
    find_version,
    read_tags,
    registry_lock,
    remove_tag,
    set_alias,
    set_tags,
)
from rlcore.tasks.tracking.runs import Tracker

logger = logging.getLogger(__name__)
Actor = Mapping[str, str]
PROMOTE, REFUSE, ROLLBACK = "promote", "refuse", "rollback"  # actions of entries
AWAIT, APPROVE, REJECT = "await", "approve", "reject"
JUDGED = ("artifact", "verdict", "champion")  # details of a request that decisions and promotions repeat
NOBODY = "none"  # the champion before the first promotion
_VERDICT, _AWAITS = "verdict", "awaits"  # tags of a version, as the two below
_PROMOTED_OVER, _ROLLED_BACK = "promoted_over", "rolled_back"


@dataclass(frozen=True, kw_only=True)
class Grounds:
    """Grounds of an act: the verdict of the comparison with ``over``, the champion, or None before the first.

    ``verdict``: digest of its artifact. ``approvals``: numbers of the audit entries that approve it.
    """

    over: ModelVersion | None
    verdict: str
    sentence: str
    approvals: tuple[int, ...] = ()

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the version that was compared."""
        return {_VERDICT: self.sentence}

    def details(self, version: ModelVersion) -> dict[str, Any]:
        """Return the details of an audit entry about ``version``."""
        return {"artifact": version.sha256, "champion": number_of(self.over), "verdict": self.verdict}


def subject_of(version: ModelVersion) -> str:
    """Return the subject of a version's entries."""
    return f"{version.name}/{version.version}"


def number_of(version: ModelVersion | None) -> str:
    """Return a version's number as tags and entries have it."""
    return str(version.version) if version else NOBODY


def last_move(home: Home, name: str) -> AuditEntry | None:
    """Return the newest entry that moved the champion of a registered model."""
    return next((each for each in reversed(read_entries(home)) if is_move(each) and each.model == name), None)


def is_move(entry: AuditEntry) -> bool:
    """Return True if an entry moved the champion."""
    return entry.action in (PROMOTE, ROLLBACK)


def open_request(entries: Sequence[AuditEntry], name: str) -> list[AuditEntry]:
    """Return the request that the candidate of a registered model awaits, and the decisions on it; empty if none.

    A later request, move of the champion or refusal of the candidate makes a request void.
    """
    found: list[AuditEntry] = []
    for each in (entry for entry in entries if entry.model == name):
        is_candidate = bool(found) and each.subject == found[0].subject
        if each.action == AWAIT:
            found = [each]
        elif is_move(each) or (is_candidate and each.action == REFUSE):
            found = []
        elif is_candidate and each.action in (APPROVE, REJECT):
            found.append(each)
    return found


def is_approved(entries: Sequence[AuditEntry], subject: str, details: Mapping[str, Any]) -> bool:
    """Return True if a promotion after these entries, with these details, has the approval of its open request."""
    found = open_request(entries, subject.rpartition("/")[0])
    if not found or found[0].subject != subject or any(each.action == REJECT for each in found):
        return False
    request, *approvals = found
    given = [json.loads(each.details["document"]) for each in approvals if each.number in details["approvals"]]
    is_same = all(request.details.get(name) == details[name] for name in (*JUDGED, "rules"))
    return is_same and any(each.get("request") == request.digest for each in given)


def champion_before(entry: AuditEntry) -> str:
    """Return the number of the version that was champion before a move, or at a request."""
    return entry.subject.rpartition("/")[2] if entry.action == ROLLBACK else str(entry.details["champion"])


def find_champion(home: Home, tracker: Tracker, name: str) -> ModelVersion | None:
    """Return the champion, or None; complete a move by a command that was killed.

    Raises:
        PromotionError: the alias was moved outside of rlcore, or the champion was deleted in MLflow.
    """
    with registry_lock(home):
        return _complete(home, tracker, name)


def promote(
    home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds, *, actor: Actor
) -> AuditEntry | None:
    """Make a version the champion and return the act's entry, also if it is champion already.

    Raises:
        PromotionError: the champion is no longer the one of the verdict, the version was rolled back before, it lacks
            an approval, or as for :func:`find_champion`.
    """
    with registry_lock(home):
        if _complete(home, tracker, version.name) == version:
            return last_move(home, version.name)
        _require_promotable(home, tracker, version, grounds)
        details = grounds.details(version) | {
            "to": str(version.version),
            "approvals": list(grounds.approvals),
            "rules": read_approvers(home).sha256,
            "sentence": grounds.sentence,
        }
        _require_approved(home, version, details)
        entry = record_action(home, PROMOTE, subject_of(version), details, actor=actor)
        _apply_move(home, tracker, entry, version)
    return entry


def await_approval(
    home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds, *, request: Mapping[str, Any], actor: Actor
) -> AuditEntry:
    """Make a version the candidate, which takes the place of an earlier one; return the entry of the ``request``.

    Raises:
        PromotionError: as for :func:`promote`.
    """
    with registry_lock(home):
        _require_promotable(home, tracker, version, grounds)
        details = grounds.details(version) | dict(request)
        known = open_request(read_entries(home), version.name)[:1]
        is_known = [(each.subject, each.details) for each in known] == [(subject_of(version), details)]
        entry = known[0] if is_known else record_action(home, AWAIT, subject_of(version), details, actor=actor)
        _remove_candidate(tracker, version.name, unless=version)
        set_tags(tracker, version, grounds.tags | {_AWAITS: grounds.verdict})
        set_alias(tracker, version, CANDIDATE)
        _remove_alias(tracker, version.name, CHALLENGER, of=version)
    return entry


def refuse(
    home: Home,
    tracker: Tracker,
    version: ModelVersion,
    grounds: Grounds,
    *,
    actor: Actor,
    rejection: AuditEntry | None = None,
) -> AuditEntry:
    """Leave the champion unchanged and make the version the challenger. ``rejection``: the entry of a person's."""
    with registry_lock(home):
        details = grounds.details(version) | {"reason": grounds.sentence}
        entry = rejection or record_action(home, REFUSE, subject_of(version), details, actor=actor)
        set_tags(tracker, version, grounds.tags)
        set_alias(tracker, version, CHALLENGER)
        if find_version(tracker, version.name, CANDIDATE) == version:
            _remove_candidate(tracker, version.name)
    return entry


def roll_back(
    home: Home, tracker: Tracker, name: str, *, version: int, reason: str, actor: Actor
) -> tuple[ModelVersion, AuditEntry]:
    """Roll back version ``version``; return the previous champion, which is champion again, and the act's entry.

    ``previous`` then names the one before. A repeated call does not roll back a second version.
    Raises:
        PromotionError: the version is not the champion, there is no previous one, or as for :func:`find_champion`.
    """
    where, subject = f"registered model {name}", f"{name}/{version}"
    with registry_lock(home):
        champion = _complete(home, tracker, name)
        if champion is None:
            raise PromotionError("there is no champion, so nothing to roll back", where=where, fix="see rlcore ui")
        if champion.version != version:
            done = [each for each in read_entries(home) if (each.subject, each.action) == (subject, ROLLBACK)]
            if not done:
                what = f"version {version} is not the champion, {_words(champion)} is"
                raise PromotionError(what, where=where, fix=f"name the version to take down: {champion.version}")
            return champion, done[-1]
        before = _move_before(home, name, str(version))
        previous = _made_champion(tracker, before) if before else None
        if previous is None or CLEANED in read_tags(tracker, previous):
            what = f"version {version} is the first champion: there is none before it"
            raise PromotionError(what, where=where, fix="promote another version first")
        details = {"artifact": previous.sha256, "to": str(previous.version), "reason": as_tag(reason)}
        entry = record_action(home, ROLLBACK, subject, details, actor=actor)
        _apply_move(home, tracker, entry, previous)
    return previous, entry


def _require_promotable(home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds) -> None:
    """Refuse a version that was compared with an earlier champion, or was rolled back before. The lock is held."""
    champion, where = _complete(home, tracker, version.name), f"registered model {version.name}"
    if champion != grounds.over:
        raise PromotionError(
            f"version {version.version} was compared with {_words(grounds.over)}, but {_words(champion)} is champion "
            "now",
            where=where,
            fix="run the flow promote again: it compares with the present champion",
        )
    if _ROLLED_BACK in read_tags(tracker, version):
        raise PromotionError(
            f"version {version.version} was champion before and has been rolled back",
            where=where,
            fix=f"train another, or delete the version's tag {_ROLLED_BACK} when the reason is gone",
        )


def moved_text(name: str, found: str, last: AuditEntry | None) -> str:
    """Return what is wrong if version ``found`` is champion in MLflow, and another one by the last move in the log."""
    present, expected = (f"version {each}" if each != NOBODY else "no version" for each in (found, _to(last)))
    by = f"by entry {last.number} ({last.action})" if last else "by the audit log"
    return f"{name}: {present} is champion, and {by} {expected} is: the alias was moved outside of rlcore"


def changed_text(version: ModelVersion, move: AuditEntry) -> str:
    """Return what is wrong if the version that a move made champion has another artifact now; empty if nothing is."""
    artifact = str(move.details["artifact"])
    if version.sha256 == artifact:
        return ""
    return (
        f"{version.name}: version {version.version} has the artifact {version.sha256[:12] or NOBODY}, and by entry "
        f"{move.number} ({move.action}) {artifact[:12]}: it was changed or registered again outside of rlcore"
    )


def _to(move: AuditEntry | None) -> str:
    return str(move.details["to"]) if move else NOBODY


def _move_before(home: Home, name: str, number: str) -> AuditEntry | None:
    """Return the move that made the champion before version ``number``; the log decides, not the alias ``previous``."""
    moves = [each for each in reversed(read_entries(home)) if is_move(each) and each.model == name]
    over = next((champion_before(each) for each in moves if each.action == PROMOTE and _to(each) == number), NOBODY)
    return next((each for each in moves if _to(each) == over), None)


def _made_champion(tracker: Tracker, move: AuditEntry) -> ModelVersion | None:
    """Return the version that a move made champion, or None if MLflow lacks it; refuse another one of its number."""
    version = find_number(tracker, move.model, _to(move))
    if version and (what := changed_text(version, move)):
        fix = "restore MLflow's database, or give the preset another name"
        raise PromotionError(what, where=f"registered model {version.name}", fix=fix)
    return version


def _require_approved(home: Home, version: ModelVersion, details: Mapping[str, Any]) -> None:
    rules, where = read_approvers(home), f"registered model {version.name}"
    if not rules.sha256 and (earlier := [each for each in read_entries(home) if each.details.get("rules")]):
        raise PromotionError(
            f"{FILE} is missing, and entry {earlier[-1].number} of the audit log was made under one",
            where=str(home.root / FILE),
            fix="restore it; if nobody has to approve any more, let it say approvers = []",
        )
    if rules.are_needed and not is_approved(read_entries(home), subject_of(version), details):
        raise PromotionError(
            f"version {version.version} lacks an approval, which {FILE} of the state directory asks for",
            where=where,
            fix="run rlcore promote again: it asks for one",
        )


def _complete(home: Home, tracker: Tracker, name: str) -> ModelVersion | None:
    """Return the champion; apply the last move if its command was killed. The lock is held."""
    present, last = find_version(tracker, name, CHAMPION), last_move(home, name)
    if last is None:
        return present
    where = f"registered model {name}"
    if number_of(present) not in (_to(last), champion_before(last), NOBODY):
        fix = f"as MLflow's administrator, give version {_to(last)} the alias {CHAMPION}; see rlcore audit verify"
        raise PromotionError(moved_text(name, number_of(present), last), where=where, fix=fix)
    version = _made_champion(tracker, last)
    if version is None:
        what = f"by entry {last.number} of the audit log version {_to(last)} is champion, and MLflow lacks this version"
        raise PromotionError(what, where=where, fix="restore MLflow's database, or give the preset another name")
    if version != present:
        logger.warning("%s: entry %d (%s) was not applied to the end; it is now", name, last.number, last.action)
        _apply_move(home, tracker, last, version)
    return version


def _apply_move(home: Home, tracker: Tracker, entry: AuditEntry, version: ModelVersion) -> None:
    name, details = version.name, entry.details
    _remove_candidate(tracker, name)  # it was compared with the champion that goes
    if entry.action == PROMOTE:
        set_tags(tracker, version, {_VERDICT: details.get("sentence", ""), _PROMOTED_OVER: details["champion"]})
        _remove_alias(tracker, name, CHALLENGER, of=version)
    elif down := find_number(tracker, name, champion_before(entry)):
        set_tags(tracker, down, {_ROLLED_BACK: details["reason"]})
    previous = find_number(tracker, name, _to(_move_before(home, name, str(version.version))))
    if previous is None or CLEANED in read_tags(tracker, previous):
        _remove_alias(tracker, name, PREVIOUS)
    else:
        set_alias(tracker, previous, PREVIOUS)
    set_alias(tracker, version, CHAMPION)


def _remove_candidate(tracker: Tracker, name: str, *, unless: ModelVersion | None = None) -> None:
    candidate = find_version(tracker, name, CANDIDATE)
    if candidate is not None and candidate != unless:
        remove_tag(tracker, candidate, _AWAITS)
        tracker.client.delete_registered_model_alias(name, CANDIDATE)


def _remove_alias(tracker: Tracker, name: str, alias: str, *, of: ModelVersion | None = None) -> None:
    holder = find_version(tracker, name, alias)
    if holder is not None and of in (None, holder):
        tracker.client.delete_registered_model_alias(name, alias)


def _words(version: ModelVersion | None) -> str:
    return f"version {version.version}" if version else "no version"
