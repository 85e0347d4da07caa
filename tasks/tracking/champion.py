"""Champion of a registered model: each move of an alias, recorded in the audit log.

The aliases: ``champion`` (served), ``previous`` (target of a rollback), ``challenger`` (last version that was not
promoted), ``candidate`` (version that awaits an approval; at most one). MLflow cannot move an alias conditionally, so
all moves are made under a lock in the state directory. State directories that share a server share no lock.

An act is recorded first, then applied, then announced by the caller, then mirrored as the tag ``audit.<number>`` of its
version. The tag ends the act: a call that is repeated after a kill finds the entry without the tag, and completes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.errors import PromotionError
from rlcore.tasks.store.audit_log import AuditEntry, entries_about, record_action
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.errors import none_if_missing
from rlcore.tasks.tracking.mlflow_model import CLEANED
from rlcore.tasks.tracking.registry import (
    CANDIDATE,
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    ModelVersion,
    find_number,
    find_version,
    last_champion,
    read_tags,
    registry_lock,
    remove_tag,
    set_alias,
    set_tags,
    tags_of_versions,
)
from rlcore.tasks.tracking.runs import Tracker

Actor = Mapping[str, str]
PROMOTE, REFUSE, REJECT, AWAIT, ROLLBACK = "promote", "refuse", "reject", "await", "rollback"  # actions of entries
AWAITS, VERDICT = "awaits", "verdict_artifact"  # tags of a version: digests of the verdict
NOBODY = "none"  # the champion before the first promotion
_PROMOTED_OVER, _ROLLED_BACK, _MIRROR = "promoted_over", "rolled_back", "audit."  # tags of a version
_APPROVALS = "approvals"  # tag of a registered model: approvals that a promotion needs
_MAX_TAG = 5000  # characters of a tag in MLflow


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
        sentence = self.sentence[:_MAX_TAG]
        return {"verdict": sentence, VERDICT: self.verdict, "judged_over": number_of(self.over)}

    def details(self, version: ModelVersion) -> dict[str, Any]:
        """Return the details of an audit entry about ``version``."""
        return {"artifact": version.sha256, "champion": number_of(self.over), "verdict": self.verdict}


def subject_of(version: ModelVersion) -> str:
    """Return the subject of a version's audit entries."""
    return f"{version.name}/{version.version}"


def number_of(version: ModelVersion | None) -> str:
    """Return a version's number as tags and entries have it."""
    return str(version.version) if version else NOBODY


def find_champion(home: Home, tracker: Tracker, name: str) -> ModelVersion | None:
    """Return the champion, or None; complete a promotion that was killed between its two steps."""
    with registry_lock(home):
        champion = find_version(tracker, name, CHAMPION)
        if champion is not None and last_champion(tracker, name) != str(champion.version):
            _crown(tracker, champion)
    return champion


def promote(
    home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds, *, actor: Actor
) -> AuditEntry | None:
    """Make a version the champion and return the act's entry; None if it is champion already.

    Raises:
        PromotionError: the champion is no longer the one of the verdict, the version was rolled back before, or the
            model needs more approvals.
    """
    with registry_lock(home):
        if find_version(tracker, version.name, CHAMPION) == version:
            _finish_promotion(tracker, version)  # of a call that was killed before its end
            return unfinished(home, tracker, version, PROMOTE)
        require_promotable(tracker, version, grounds)
        missing = approvals_needed(tracker, version.name) - len(grounds.approvals)
        if missing > 0:
            raise PromotionError(
                f"version {version.version} lacks {missing} approval(s), which a preset of this model has asked for",
                where=f"registered model {version.name}",
                fix=f"keep [promotion] approval = 'person', or delete the model's tag {_APPROVALS} in MLflow",
            )
        details = grounds.details(version) | {"to": str(version.version), "approvals": list(grounds.approvals)}
        entry = record_action(home, PROMOTE, subject_of(version), details, actor=actor)
        set_tags(tracker, version, grounds.tags | {_PROMOTED_OVER: number_of(grounds.over)})
        if grounds.over is not None:
            set_alias(tracker, grounds.over, PREVIOUS)
        _remove_candidate(tracker, version.name)
        _finish_promotion(tracker, version)
    return entry


def await_approval(
    home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds, *, request: Mapping[str, Any], actor: Actor
) -> AuditEntry:
    """Make a version the candidate, which takes the place of an earlier one; return the entry of the ``request``.

    From now on each promotion of the model needs as many approvals, whatever preset asks for it.
    Raises:
        PromotionError: as for :func:`promote`.
    """
    with registry_lock(home):
        require_promotable(tracker, version, grounds)
        details = grounds.details(version) | dict(request)
        known = [each for each in entries_about(home, subject_of(version)) if each.action == AWAIT]
        is_known = bool(known) and known[-1].details == details
        entry = known[-1] if is_known else record_action(home, AWAIT, subject_of(version), details, actor=actor)
        needed = max(request["needed"], approvals_needed(tracker, version.name))
        tracker.client.set_registered_model_tag(version.name, _APPROVALS, str(needed))
        _remove_candidate(tracker, version.name, unless=version)
        set_tags(tracker, version, grounds.tags | {AWAITS: grounds.verdict})
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
) -> tuple[ModelVersion, AuditEntry | None]:
    """Roll back version ``version``; return the previous champion, which is champion again, and the act's entry.

    ``previous`` then names the one before, so that rollbacks can be repeated. If the version was rolled back already,
    nothing changes: a repeated call does not roll back a second version, and an act that was completed has no entry.
    Raises:
        PromotionError: the version is not the champion, or there is no previous one.
    """
    where = f"registered model {name}"
    with registry_lock(home):
        champion, previous = find_version(tracker, name, CHAMPION), find_version(tracker, name, PREVIOUS)
        if champion is None:
            raise PromotionError("there is no champion, so nothing to roll back", where=where, fix="see rlcore ui")
        down = find_number(tracker, name, str(version))
        if champion != down:
            if down is None or _ROLLED_BACK not in read_tags(tracker, down):
                what = f"version {version} is not the champion, {_words(champion)} is"
                raise PromotionError(what, where=where, fix=f"name the version to take down: {champion.version}")
            _finish_roll_back(tracker, champion)
            return champion, unfinished(home, tracker, down, ROLLBACK)
        if previous is None or previous == champion:
            what = f"version {version} is the first champion: there is none before it"
            raise PromotionError(what, where=where, fix="promote another version first")
        details = {"artifact": previous.sha256, "to": str(previous.version), "reason": reason}
        entry = record_action(home, ROLLBACK, subject_of(down), details, actor=actor)
        set_tags(tracker, down, {_ROLLED_BACK: reason})
        _remove_candidate(tracker, name)  # it was compared with the champion that goes
        _finish_roll_back(tracker, previous)
    return previous, entry


def require_promotable(tracker: Tracker, version: ModelVersion, grounds: Grounds) -> None:
    """Refuse a version that was compared with an earlier champion, or was rolled back before.

    Raises:
        PromotionError: it was.
    """
    champion, where = find_version(tracker, version.name, CHAMPION), f"registered model {version.name}"
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


def approvals_needed(tracker: Tracker, name: str) -> int:
    """Return the number of approvals that presets of a model have asked for."""
    model = none_if_missing(tracker.client.get_registered_model, name)
    return int(model.tags.get(_APPROVALS, 0)) if model else 0


def unfinished(home: Home, tracker: Tracker, version: ModelVersion, action: str) -> AuditEntry | None:
    """Return the newest entry of an action on a version, if the act was not completed."""
    entry = next((each for each in reversed(entries_about(home, subject_of(version))) if each.action == action), None)
    return None if entry is None or is_mirrored(tracker, version, entry) else entry


def is_mirrored(tracker: Tracker, version: ModelVersion, entry: AuditEntry) -> bool:
    """Return True if the act of an entry was completed."""
    return read_tags(tracker, version).get(f"{_MIRROR}{entry.number}") == entry.digest


def mirror(tracker: Tracker, version: ModelVersion, entry: AuditEntry) -> None:
    """Complete an act: note its entry at the version."""
    set_tags(tracker, version, {f"{_MIRROR}{entry.number}": entry.digest})


def mirrored_entries(tracker: Tracker) -> dict[tuple[str, int], str]:
    """Return the digests of entries that versions have, by subject and number."""
    return {
        (subject, int(tag.removeprefix(_MIRROR))): digest
        for subject, tags in tags_of_versions(tracker)
        for tag, digest in tags.items()
        if tag.startswith(_MIRROR) and tag.removeprefix(_MIRROR).isdecimal()
    }


def _finish_promotion(tracker: Tracker, version: ModelVersion) -> None:
    """Make a version the champion, and the challenger no longer."""
    _crown(tracker, version)
    _remove_alias(tracker, version.name, CHALLENGER, of=version)


def _finish_roll_back(tracker: Tracker, champion: ModelVersion) -> None:
    """Make a version the champion again, and point ``previous`` at the one before."""
    _crown(tracker, champion)
    over = find_number(tracker, champion.name, read_tags(tracker, champion).get(_PROMOTED_OVER, NOBODY))
    if over is None or CLEANED in read_tags(tracker, over):
        _remove_alias(tracker, champion.name, PREVIOUS)
    else:
        set_alias(tracker, over, PREVIOUS)


def _crown(tracker: Tracker, version: ModelVersion) -> None:
    """Make a version the champion, and record at the model that it has one, so that a lost alias is noticed."""
    set_alias(tracker, version, CHAMPION)
    tracker.client.set_registered_model_tag(version.name, CHAMPION, str(version.version))


def _remove_candidate(tracker: Tracker, name: str, *, unless: ModelVersion | None = None) -> None:
    """End the wait of the candidate."""
    candidate = find_version(tracker, name, CANDIDATE)
    if candidate is not None and candidate != unless:
        remove_tag(tracker, candidate, AWAITS)
        tracker.client.delete_registered_model_alias(name, CANDIDATE)


def _remove_alias(tracker: Tracker, name: str, alias: str, *, of: ModelVersion | None = None) -> None:
    """Remove an alias, or only if it points at ``of``."""
    holder = find_version(tracker, name, alias)
    if holder is not None and of in (None, holder):
        tracker.client.delete_registered_model_alias(name, alias)


def _words(version: ModelVersion | None) -> str:
    return f"version {version.version}" if version else "no version"
