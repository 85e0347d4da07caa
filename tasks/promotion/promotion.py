"""Decisions of the gate and of people, applied to the registry.

A version that passed the gate becomes champion, or if ``promotion.toml`` of the state directory names approvers, awaits
a signed decision. The state is in the audit log: an entry ``await`` is a request, later entries of the version are the
decisions on it. A decision is a line of JSON with version, artifact, verdict, champion, digest of the request,
decision, reason and time, signed by an ssh key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from statistics import mean
from typing import Any

from rlcore.data_contracts.gate.strict_json import parse_object
from rlcore.errors import PromotionError, shown
from rlcore.evaluation.paired_tests import paired_difference
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.kinds.compare.step import greedy_answers
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.settings import PromotionConfig
from rlcore.tasks.promotion import champion
from rlcore.tasks.promotion.approvers import FILE, read_approvers, verify
from rlcore.tasks.promotion.champion import (
    APPROVE,
    AWAIT,
    JUDGED,
    NOBODY,
    PROMOTE,
    REJECT,
    ROLLBACK,
    Grounds,
    open_request,
    subject_of,
)
from rlcore.tasks.promotion.kind import model_name
from rlcore.tasks.run.events import AWAITS, PROMOTED, REFUSED, ROLLED_BACK, tell_act
from rlcore.tasks.run.leases import leased
from rlcore.tasks.run.prefect_bridge import current_flow_run, report_markdown
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.audit_log import AuditEntry, chain_errors, local_actor, read_entries, record_action
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.model_card import refresh_cards
from rlcore.tasks.tracking.registry import ModelVersion, find_by_sha256, find_number, read_tags, registry_lock
from rlcore.tasks.tracking.runs import Tracker, open_tracker

_WORKER = "PREFECT__WORKER_NAME"  # set by Prefect's worker for its runs
_SKEW = timedelta(minutes=5)  # difference of two machines' clocks
_BY_FORM = """Without this state directory, write decision (approve or reject), reason and time into this line:
```
{line}```
Sign its file, and enter both in the form of the deployment `approve` or `reject`:
```bash
ssh-keygen -Y sign -n rlcore -f ~/.ssh/id_ed25519 FILE
```"""


def _registered_name(config: RunConfig) -> str:
    return model_name(config.name, config.section("promotion", PromotionConfig))


def current_champion(home: Home, config: RunConfig) -> ModelVersion | None:
    """Return the champion that the challenger is compared with, or None before the first promotion.

    Raises:
        PromotionError: as for :func:`rlcore.tasks.promotion.champion.find_champion`.
    """
    return champion.find_champion(home, open_tracker(home), _registered_name(config))


def doubt_first_champion(home: Home, config: RunConfig, refs: Mapping[str, ArtifactRef], base: ArtifactRef) -> str:
    """Return a warning about a first champion that is not shown to be better than its base; empty if it is.

    ``base``: the evaluation of the base on the same problems.
    """
    store, challenger = ArtifactStore(home.root), config.section("promotion", PromotionConfig).challenger
    new, old = (greedy_answers(store.path(ref))["correct"].tolist() for ref in (refs[f"evaluate_{challenger}"], base))
    if not new or not read_json(store.path(refs["promote"]) / "verdict.json")["verdict"]["promote"]:
        return ""
    level = config.evaluation.confidence
    gain = paired_difference(new, old, confidence=level).difference
    if gain.low > 0.0:
        return ""
    return (
        f"first champion of {_registered_name(config)}: no earlier one to beat, and its accuracy {mean(new):.3f} is "
        f"not shown to be above its base's {mean(old):.3f} (difference {gain.mean:+.3f}, {format_level(level)} "
        f"interval [{gain.low:+.3f}, {gain.high:+.3f}], n = {gain.n})"
    )


def apply_decision(home: Home, config: RunConfig, refs: Mapping[str, ArtifactRef], *, over: ModelVersion | None) -> str:
    """Apply the decision to the registry and return a sentence about it. A repeated call changes nothing.

    A version that passed awaits a person, if ``promotion.toml`` names approvers; else it becomes champion.
    Raises:
        PromotionError: the champion has changed since the comparison, the version was rolled back, or
            ``promotion.toml`` cannot be used.
    """
    promotion = config.section("promotion", PromotionConfig)
    name, tracker = _registered_name(config), open_tracker(home)
    version = find_by_sha256(tracker, name, refs[promotion.challenger].sha256)
    if version is None:
        raise PromotionError("the challenger is no longer in the registry", where=f"registered model {name}")
    decision = read_json(ArtifactStore(home.root).path(refs["promote"]) / "verdict.json")["verdict"]
    if decision["look"] == 0:
        return f"{name}: {decision['sentence']}"
    grounds = Grounds(over=over, verdict=refs["promote"].sha256, sentence=decision["sentence"])
    with leased(home, config.name):
        try:
            if decision["promote"] and read_approvers(home).are_needed:
                text = _ask_person(home, tracker, version, grounds)
            else:
                text = _conclude(home, tracker, version, grounds, is_better=decision["promote"])
        except PromotionError as error:
            failed = replace(grounds, sentence=f"Not promoted: {error.what}.")
            _conclude(home, tracker, version, failed, is_better=False)
            raise
        finally:
            refresh_cards(home, tracker, [version])
    return f"{name} version {version.version}: {text}"


def _conclude(home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds, *, is_better: bool) -> str:
    if is_better:
        entry = champion.promote(home, tracker, version, grounds, actor=current_actor())
    else:
        entry = champion.refuse(home, tracker, version, grounds, actor=current_actor())
    if entry is not None:
        tell_act(home, PROMOTED if is_better else REFUSED, entry, grounds.sentence)
    return grounds.sentence


def take_down(home: Home, name: str, *, version: int, reason: str) -> str:
    """Roll back the champion ``version`` of a registered model; return a sentence with the new champion.

    Raises:
        PromotionError: the version is not the champion, or there is no previous one.
    """
    tracker = open_tracker(home)
    with leased(home, name):
        again, entry = champion.roll_back(home, tracker, name, version=version, reason=reason, actor=current_actor())
        outcome = f"{name}: version {version} is rolled back, version {again.version} is champion again"
        tell_act(home, ROLLED_BACK, entry, f"{reason}; version {again.version} is champion again")
        if taken_down := find_number(tracker, name, str(version)):
            refresh_cards(home, tracker, [taken_down])
    return outcome


def current_actor() -> dict[str, str]:
    """Return who acts, for the audit log: user and host, with the flow run and its worker if there are some."""
    run, worker = current_flow_run(), os.environ.get(_WORKER, "")
    return (
        local_actor()
        | ({"flow_run": run.name, "flow_run_id": run.flow_run_id} if run else {})
        | ({"worker": worker} if run and worker else {})
    )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Newest request about a version, whether it is still open, and the decisions on it."""

    request: AuditEntry
    is_open: bool
    approval: AuditEntry | None
    rejection: AuditEntry | None
    promotion: AuditEntry | None

    @property
    def until(self) -> datetime:
        """End of the request."""
        return datetime.fromisoformat(self.request.details["until"])

    def is_about(self, details: Mapping[str, Any]) -> bool:
        """Return True if the request has these details."""
        return all(self.request.details.get(name) == value for name, value in details.items())


def _find_standing(home: Home, subject: str) -> Standing | None:
    """Return the newest request about a version such as ``tiny-grpo/4``; None if there was none."""
    every = read_entries(home)
    entries = [each for each in every if each.subject == subject]
    requests = [place for place, each in enumerate(entries) if each.action == AWAIT]
    if not requests:
        return None
    request, *later = entries[requests[-1] :]
    first = {each.action: each for each in reversed(later)}
    return Standing(
        request=request,
        is_open=open_request(every, subject.rpartition("/")[0])[:1] == [request],
        approval=first.get(APPROVE),
        rejection=first.get(REJECT),
        promotion=None if ROLLBACK in first else first.get(PROMOTE),  # one that stands
    )


def _ask_person(home: Home, tracker: Tracker, version: ModelVersion, grounds: Grounds) -> str:
    """Let a version that passed the gate await its approval; return a sentence. A repeated call changes nothing.

    A request that has ended is made again; what was decided on this verdict is applied.
    """
    subject, now, rules = subject_of(version), datetime.now(UTC), read_approvers(home)
    standing = _find_standing(home, subject)
    known = standing if standing and standing.is_about(grounds.details(version)) else None
    is_same = known is not None and known.is_about({"rules": rules.sha256}) and (known.is_open or known.promotion)
    if known and (known.rejection or (known.approval and is_same)):
        return _apply(home, tracker, version, known)
    is_open = known is not None and is_same and now <= known.until
    until = (
        known.request.details["until"]
        if known and is_open
        else (now + timedelta(days=rules.days)).isoformat(timespec="milliseconds")
    )
    request = {"rules": rules.sha256, "until": until}
    entry = champion.await_approval(home, tracker, version, grounds, request=request, actor=current_actor())
    text = f"{grounds.sentence} It awaits an approval until {until}: rlcore approve {subject} --reason …"
    tell_act(home, AWAITS, entry, text)
    report_markdown("how to decide", _BY_FORM.format(line=statement(home, subject, APPROVE, "…")))
    return text


def statement(home: Home, subject: str, decision: str, reason: str) -> str:
    """Return the document that a person signs to decide.

    Raises:
        PromotionError: the version awaits no decision.
    """
    fields = _expected(_require_standing(home, subject), subject, decision)
    fields |= {"reason": reason, "time": _text(datetime.now(UTC))}
    return json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n"


def apply_signature(home: Home, subject: str, *, decision: str, document: str, signature: str) -> str:
    """Record a signed decision on a version such as ``tiny-grpo/4`` and apply it; return a sentence.

    A repeated call changes nothing.
    Raises:
        PromotionError: nothing awaits it, it is signed by nobody of the approvers or for another version, verdict or
            decision, the request is void or has ended, or a person has rejected the version.
    """
    tracker, (name, _, number) = open_tracker(home), subject.rpartition("/")
    with leased(home, name or subject):
        _require_standing(home, subject)
        if errors := chain_errors(home):
            raise PromotionError(f"the audit log has errors: {errors[0]}", where=subject, fix="see rlcore audit verify")
        version = find_number(tracker, name, number)
        if version is None:
            raise PromotionError(f"there is no version {subject}", where="the model registry")
        _record_decision(home, version, decision, document.strip() + "\n", signature)
        outcome = _apply(home, tracker, version, _require_standing(home, subject))
        refresh_cards(home, tracker, [version])
    return outcome


def _record_decision(home: Home, version: ModelVersion, decision: str, document: str, signature: str) -> None:
    subject = subject_of(version)
    with registry_lock(home):  # one decision per request
        standing = _require_standing(home, subject)
        time = _require_stated(document, standing, subject, decision)
        allowed = _require_same_rules(home, standing, subject)
        signer = verify(document, signature, allowed)
        decided = [each for each in (standing.approval, standing.rejection) if each]
        if not any((each.action, each.actor.get("principal")) == (decision, signer.principal) for each in decided):
            _require_open(standing, version, decision, time)
            details = {"document": document, "signature": signature, "allowed": allowed}
            actor = {"principal": signer.principal, "key": signer.key} | current_actor()
            record_action(home, decision, subject, details, actor=actor)


def _apply(home: Home, tracker: Tracker, version: ModelVersion, standing: Standing) -> str:
    details, subject = standing.request.details, subject_of(version)
    over = None if details["champion"] == NOBODY else find_number(tracker, version.name, details["champion"])
    if standing.rejection is not None:
        text = f"Rejected by {_who(standing.rejection)}: {_reason(standing.rejection)}"
        grounds = Grounds(over=over, verdict=details["verdict"], sentence=text)
        champion.refuse(home, tracker, version, grounds, actor=standing.rejection.actor, rejection=standing.rejection)
        tell_act(home, REFUSED, standing.rejection, text)
        return f"{text} It stays rejected until there is a new verdict."
    assert standing.approval is not None  # or there is nothing to apply
    entry, text = standing.promotion, f"approved by {_who(standing.approval)}"
    if entry is None:
        sentence = read_tags(tracker, version).get("verdict", "")
        grounds = Grounds(
            over=over, verdict=details["verdict"], sentence=sentence, approvals=(standing.approval.number,)
        )
        entry = champion.promote(home, tracker, version, grounds, actor=current_actor())
    else:
        champion.find_champion(home, tracker, version.name)  # completes it
    if entry is not None:
        tell_act(home, PROMOTED, entry, f"{text}: {_reason(standing.approval)}")
    return f"{subject} was {text} and promoted"


def _require_standing(home: Home, subject: str) -> Standing:
    standing = _find_standing(home, subject)
    if standing is None:
        raise PromotionError(
            f"{subject} awaits no approval in this state directory",
            where=str(home.root),
            fix=f"rlcore promote PRESET asks for one, if {FILE} there names approvers",
        )
    return standing


def _expected(standing: Standing, subject: str, decision: str) -> dict[str, str]:
    """Return the fields of a decision; the request's digest stands for one time and state directory."""
    judged = {name: standing.request.details[name] for name in JUDGED}
    return {"version": subject, **judged, "decision": decision, "request": standing.request.digest}


def _require_stated(document: str, standing: Standing, subject: str, decision: str) -> datetime:
    """Return the time of a document, which must be about this version, request and decision."""
    expected = _expected(standing, subject, decision)
    try:
        fields = parse_object(document.encode())
        stated = {name: fields[name] for name in expected}
        time = datetime.fromisoformat(fields["time"])
        is_whole = set(fields) == {*expected, "reason", "time"} and fields["reason"].strip() and time.tzinfo
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PromotionError(f"not a decision on a version: {shown(document)}", where=subject) from error
    if wrong := [name for name in expected if stated[name] != expected[name]]:
        name = wrong[0]
        raise PromotionError(
            f"the signed {name} is {shown(stated[name])!r}, and {expected[name]!r} is to be decided", where=subject
        )
    if not is_whole:
        raise PromotionError(f"the document lacks a reason or a time with its zone: {shown(document)}", where=subject)
    return time


def _require_open(standing: Standing, version: ModelVersion, decision: str, time: datetime) -> None:
    again, subject = "run rlcore promote again: it compares with the present champion", subject_of(version)
    if standing.rejection is not None:
        raise PromotionError(
            f"{_who(standing.rejection)} has rejected {subject}: {_reason(standing.rejection)}",
            where=subject,
            fix="a rejection is final until there is a new verdict",
        )
    if standing.approval is not None:
        raise PromotionError(
            f"{subject} has its approval, by {_who(standing.approval)}: too late to {decision}",
            where=subject,
            fix="rlcore rollback takes a champion down",
        )
    now, begun = datetime.now(UTC), datetime.fromisoformat(standing.request.time)
    if now > standing.until:
        raise PromotionError(f"the request ended at {standing.until.isoformat()}", where=subject, fix=again)
    if not standing.is_open:
        what = "the request is void: there was another request, verdict or champion since"
        raise PromotionError(what, where=subject, fix=again)
    if version.sha256 != standing.request.details["artifact"]:
        what = f"the request is void: in MLflow the version has the artifact {version.sha256[:12] or NOBODY} now"
        raise PromotionError(what, where=subject, fix=again)
    if not begun - _SKEW <= time <= now + _SKEW:
        what = f"signed at {time.isoformat()}, and the request is of {standing.request.time}"
        raise PromotionError(what, where=subject, fix="sign it now")


def _require_same_rules(home: Home, standing: Standing, subject: str) -> str:
    """Return the lines of allowed signers; refuse a request that was made under another ``promotion.toml``."""
    rules = read_approvers(home)
    if rules.sha256 != standing.request.details.get("rules"):
        what = f"the request is void: {FILE} has changed since"
        raise PromotionError(what, where=subject, fix="run rlcore promote again")
    return rules.lines


def _who(entry: AuditEntry) -> str:
    return str(entry.actor["principal"])


def _reason(entry: AuditEntry) -> str:
    return str(json.loads(entry.details["document"])["reason"])


def _text(time: datetime) -> str:
    return time.isoformat(timespec="seconds")
