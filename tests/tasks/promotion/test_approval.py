"""Approval by people with real keys: every way to become champion, and every way that is none."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import ConfigError, PromotionError
from rlcore.flows.cli.app import main
from rlcore.flows.presets import open_preset
from rlcore.tasks.operations.audit import audit_errors
from rlcore.tasks.promotion import promotion
from rlcore.tasks.promotion.approvers import sign
from rlcore.tasks.promotion.promotion import apply_decision, apply_signature, current_actor, statement
from rlcore.tasks.run.prefect_bridge import FlowRun
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.audit_log import AuditEntry, audit_path, read_entries, record_action
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, write_json
from rlcore.tasks.tracking.registry import (
    CANDIDATE,
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    ModelVersion,
    find_version,
    read_tags,
    remove_tag,
    set_tags,
)
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.registered import Killed, dying, kills_until_done, promote, register_versions, roll_back
from tests.ssh_keys import allowed, ask_for_approvals, make_key
from tests.tasks.homes import copy_home, new_home

NAME = "tiny-grpo"


@dataclass
class Office:
    """Three versions of which the first is champion, people with keys, and the events so far."""

    home: Home
    tracker: Tracker
    versions: list[ModelVersion]
    folder: Path
    keys: dict[str, Path]

    def allow(self, *who: str, days: int = 7) -> None:
        """Let these people approve."""
        ask_for_approvals(self.home, *(allowed(self.keys[name]) for name in who), days=days)

    def judged(self, number: int, over: int | None = 1, *, sentence: str = "Promoted: better.") -> str:
        """Apply the verdict "better" on a version, from a comparison with another one."""
        config = open_preset("tiny", ["promotion.challenger=grpo"])
        store, verdict = ArtifactStore(self.home.root), self.folder / "verdict"
        verdict.mkdir()
        document = {"promote": True, "look": 1, "sentence": sentence}
        write_json({"verdict": document, "of": number, "over": over}, verdict / "verdict.json")
        ref = store.commit(verdict, kind="verdict")
        model = ArtifactRef(kind="policy", uri="", sha256=self.versions[number - 1].sha256, bytes=0)
        champion = self.versions[over - 1] if over else None
        return apply_decision(self.home, config, {"grpo": model, "promote": ref}, over=champion)

    def signed(self, who: str, decision: str = "approve", number: int = 2, **changes: Any) -> tuple[str, str]:
        """A document, with some of its fields changed, and its signature."""
        document = statement(self.home, f"{NAME}/{number}", decision, "read fifty answers")
        if changes:
            document = json.dumps({**json.loads(document), **changes}) + "\n"
        return document, sign(document, self.keys[who])

    def decide(self, who: str, decision: str = "approve", number: int = 2) -> str:
        return self.hand_in(decision, number, *self.signed(who, decision, number))

    def hand_in(self, decision: str, number: int, document: str, signature: str) -> str:
        return apply_signature(self.home, f"{NAME}/{number}", decision=decision, document=document, signature=signature)

    @property
    def events(self) -> list[tuple[str, int]]:
        """Messages to the team, with the number of the version."""
        known = [read_json(path) for path in sorted((self.home.root / "outbox").glob("*.json"))]
        return [(each["event"].rpartition(".")[2], int(each["text"].partition(":")[0][-1])) for each in known]

    @property
    def aliases(self) -> dict[str, int]:
        found = {
            alias: find_version(self.tracker, NAME, alias) for alias in (CHAMPION, CHALLENGER, PREVIOUS, CANDIDATE)
        }
        return {alias: version.version for alias, version in found.items() if version}

    @property
    def actions(self) -> list[tuple[str, str]]:
        """Actions since the first champion, with the number of the version."""
        return [(each.action, each.subject.rpartition("/")[2]) for each in read_entries(self.home)[1:]]

    def tag(self, number: int, name: str) -> str:
        return read_tags(self.tracker, self.versions[number - 1]).get(name, "")


Made = tuple[Home, list[ModelVersion], dict[str, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, _empty_mlflow_database: Path) -> Made:
    folder = tmp_path_factory.mktemp("office")
    keys = {name: make_key(folder, name) for name in ("anna", "ben", "eve")}
    with new_home(folder, _empty_mlflow_database) as home:
        versions = register_versions(open_tracker(home), folder / "model", NAME)
        promote(home, open_tracker(home), versions[0], over=None)
        ask_for_approvals(home, *(allowed(keys[name]) for name in ("anna", "ben")))
        return home, versions, keys


@pytest.fixture
def office(tracked_home: Home, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    copy_home(made[0], tracked_home)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # whose worker would deliver
    return Office(tracked_home, open_tracker(tracked_home), made[1], tmp_path, made[2])


BEFORE = {CHAMPION: 1}
WAITING = {CHAMPION: 1, CANDIDATE: 2}
PROMOTED = {CHAMPION: 2, PREVIOUS: 1}


def test_a_version_that_passed_awaits_a_person_and_is_champion_when_one_has_signed(office: Office) -> None:
    text = office.judged(2)
    assert "It awaits an approval until " in text and f"rlcore approve {NAME}/2 --reason" in text
    assert office.aliases == WAITING
    assert office.tag(2, "awaits") == read_entries(office.home)[-1].details["verdict"] != ""
    assert office.judged(2) == text  # and nothing else
    assert (office.actions, office.events) == ([("await", "2")], [("awaits", 2)])
    for _ in range(2):  # repeated without effect
        assert office.decide("anna") == f"{NAME}/2 was approved by anna and promoted"
        assert office.aliases == PROMOTED
        assert office.actions == [("await", "2"), ("approve", "2"), ("promote", "2")]
    assert office.events == [("awaits", 2), ("promoted", 2)]
    approve, promoted = read_entries(office.home)[-2:]
    assert (approve.actor["principal"], promoted.details["approvals"]) == ("anna", [approve.number])
    rules = hashlib.sha256((office.home.root / "promotion.toml").read_bytes()).hexdigest()
    assert [each.details["rules"] for each in read_entries(office.home) if each.action != "approve"] == [
        "",
        rules,
        rules,
    ]
    stated = json.loads(approve.details["document"])
    assert (stated["version"], stated["champion"], stated["artifact"]) == (f"{NAME}/2", "1", "b")
    assert datetime.fromisoformat(stated["time"]).tzinfo == UTC
    assert (stated["verdict"], stated["reason"]) == (promoted.details["verdict"], "read fifty answers")
    assert office.tag(2, "awaits") == ""
    assert audit_errors(office.home) == ((), 4)


def test_a_version_that_was_rolled_back_needs_another_approval(office: Office) -> None:
    office.judged(2)
    document, signature = office.signed("anna")
    office.hand_in("approve", 2, document, signature)
    roll_back(office.home, office.tracker, NAME, version=2, reason="rude")
    for removed, message in (("", "has been rolled back"), ("rolled_back", "lacks an approval")):
        remove_tag(office.tracker, office.versions[1], removed)
        with pytest.raises(PromotionError, match=message):
            office.hand_in("approve", 2, document, signature)
    assert "It awaits an approval until " in office.judged(2)
    assert office.aliases == WAITING
    office.decide("ben")
    assert office.aliases[CHAMPION] == 2


def test_a_rejection_is_final_until_there_is_a_new_verdict(office: Office) -> None:
    office.judged(2)
    for _ in range(2):
        assert office.decide("ben", "reject").startswith("Rejected by ben: read fifty answers")
        assert office.aliases == {CHAMPION: 1, CHALLENGER: 2}
    assert office.tag(2, "verdict") == "Rejected by ben: read fifty answers"
    with pytest.raises(PromotionError, match="ben has rejected tiny-grpo/2: read fifty answers"):
        office.decide("anna")
    assert "stays rejected" in office.judged(2)
    assert office.aliases == {CHAMPION: 1, CHALLENGER: 2}
    assert office.actions == [("await", "2"), ("reject", "2")]
    assert office.events == [("awaits", 2), ("refused", 2)]
    office.judged(2, sentence="Promoted: better, on fresh prompts.")
    assert office.aliases == WAITING
    office.decide("anna")
    assert office.aliases == PROMOTED
    assert audit_errors(office.home)[0] == ()


def test_a_first_champion_awaits_a_person_too(office: Office) -> None:
    office.tracker.client.delete_registered_model_alias(NAME, CHAMPION)
    audit_path(office.home).unlink()
    office.judged(2, None)
    assert office.aliases == {CANDIDATE: 2}
    office.decide("anna")
    assert office.aliases == {CHAMPION: 2}


def _other_candidate(office: Office) -> None:
    office.judged(3)


def _other_champion(office: Office) -> None:
    office.judged(3)
    office.decide("ben", number=3)


def _taken_down(office: Office) -> None:
    _other_champion(office)
    office.judged(2, 3)
    roll_back(office.home, office.tracker, NAME, version=3, reason="rude")


def _other_approvers(office: Office) -> None:
    office.allow("anna", "eve")


@pytest.mark.parametrize(
    "change",
    [_other_candidate, _other_champion, _taken_down, _other_approvers],
    ids=["another candidate", "another champion", "the champion rolled back", "other approvers"],
)
def test_a_change_of_champion_or_candidate_voids_a_request(office: Office, change: Callable[[Office], None]) -> None:
    office.judged(2)
    change(office)
    before = office.aliases
    with pytest.raises(PromotionError, match="the request is void"):
        office.decide("anna")
    assert office.aliases == before
    assert before.get(CHAMPION) != 2


def _another_log(office: Office) -> None:
    audit_path(office.home).unlink()
    office.judged(2)  # equal presets give equal artifacts and verdicts


def _another_artifact(office: Office) -> None:
    set_tags(office.tracker, office.versions[1], {"sha256": "evil"})


def _another_verdict(office: Office) -> None:
    office.judged(2, sentence="Promoted: better, on fresh prompts.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_log, "the signed request is "),
        (_another_artifact, "the request is void: in MLflow the version has the artifact evil now"),
        (_another_verdict, "the signed verdict is "),
    ],
)
def test_a_signature_holds_for_one_request(office: Office, change: Callable[[Office], None], message: str) -> None:
    office.judged(2)
    document, signature = office.signed("anna")
    change(office)
    with pytest.raises(PromotionError, match=message):
        office.hand_in("approve", 2, document, signature)
    assert office.aliases == WAITING


def _another_champion_and_back(office: Office) -> None:
    _other_champion(office)
    roll_back(office.home, office.tracker, NAME, version=3, reason="rude")


@pytest.mark.parametrize("change", [_other_candidate, _another_champion_and_back])
def test_a_killed_approval_of_a_void_request_promotes_nothing(office: Office, change: Callable[[Office], None]) -> None:
    office.judged(2)
    document, signature = office.signed("anna")
    with pytest.MonkeyPatch.context() as killed, pytest.raises(Killed):
        killed.setattr(promotion, "_apply", _killed)
        office.hand_in("approve", 2, document, signature)
    change(office)
    with pytest.raises(PromotionError, match="lacks an approval"):
        office.hand_in("approve", 2, document, signature)
    assert "It awaits an approval until " in office.judged(2)
    assert office.aliases[CHAMPION] == 1
    office.decide("ben")
    assert office.aliases[CHAMPION] == 2
    assert audit_errors(office.home)[0] == ()


def _killed(*_: object) -> str:
    raise Killed


def test_a_decision_is_checked_and_recorded_under_a_lock(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    free = list[bool]()

    def record(*args: Any, **options: Any) -> AuditEntry:
        with file_lock(office.home.root / "registry.lock", wait=False) as is_free:
            free.append(is_free)
        return record_action(*args, **options)

    office.judged(2)
    monkeypatch.setattr(promotion, "record_action", record)
    office.decide("anna")
    assert free == [False]


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("eve", "approve", {}, "of no key among the approvers"),
    ("anna", "reject", {}, "the signed decision is 'reject', and 'approve' is to be decided"),
    ("anna", "approve", {"version": f"{NAME}/3"}, "the signed version is 'tiny-grpo/3'"),
    ("anna", "approve", {"champion": "3"}, "the signed champion is '3', and '1' is to be decided"),
    ("anna", "approve", {"artifact": "c"}, "the signed artifact is 'c'"),
    ("anna", "approve", {"reason": " "}, "lacks a reason"),
    ("anna", "approve", {"time": "2026-11-26T06:00:00"}, "a time with its zone"),
    ("anna", "approve", {"time": "soon"}, "not a decision on a version"),
    ("anna", "approve", {"time": "2020-01-01T00:00:00+00:00"}, "signed at 2020-01-01"),
    ("anna", "approve", {"time": "2999-01-01T00:00:00+00:00"}, "signed at 2999-01-01"),
    ("anna", "approve", {"more": 1}, "the document lacks a reason or a time"),
    ("anna", "approve", {"reason": float("nan")}, "not a decision on a version"),
    ("anna", "approve", {"reason": ["good"]}, "not a decision on a version"),
    ("anna", "approve", {"reason": "\ud800"}, "not a decision on a version"),
    ("anna", "approve", {"version": "tiny\u2010grpo/2"}, "the signed version is "),
]


def test_what_is_signed_by_nobody_or_for_something_else_changes_nothing(office: Office) -> None:
    office.judged(2)
    for who, decision, changes, message in REFUSED:
        document, signature = office.signed(who, decision, **changes)
        with pytest.raises(PromotionError, match=message):
            office.hand_in("approve", 2, document, signature)
        assert (office.aliases, office.actions) == (WAITING, [("await", "2")]), changes


def test_a_document_that_was_changed_after_it_was_signed_is_refused(office: Office) -> None:
    office.judged(2)
    document, signature = office.signed("anna")
    with pytest.raises(PromotionError, match="does not fit the document"):
        office.hand_in("approve", 2, document.replace("fifty", "all"), signature)
    twice = document.replace("{", '{"decision":"reject",', 1)  # a person may read the first, a parser takes the last
    for text in ("[]", "[" * 100_000, twice):
        with pytest.raises(PromotionError, match="not a decision on a version"):
            office.hand_in("approve", 2, text, sign(text + "\n", office.keys["anna"]))
    office.hand_in("approve", 2, f"  {document}\n", signature.replace("\n", " "))  # as a form may hand it in
    assert office.aliases == PROMOTED


def test_a_reason_in_bytes_that_are_no_text_is_refused(office: Office, capsys: pytest.CaptureFixture[str]) -> None:
    office.judged(2)
    command = ["approve", f"{NAME}/2", "--reason", "nein \udcff", "--key", str(office.keys["anna"])]
    assert main(command) == 2
    assert "error (usage): not UTF-8: \\udcff" in capsys.readouterr().err
    assert office.aliases == WAITING


def test_a_request_expires_and_the_next_promotion_renews_it(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=4)

    office.allow("anna", days=3)
    office.judged(2)
    monkeypatch.setattr(promotion, "datetime", Later)
    with pytest.raises(PromotionError, match="the request ended at ") as caught:
        office.decide("anna")
    assert "run rlcore promote again" in caught.value.fix
    office.judged(2)
    assert office.actions == [("await", "2"), ("await", "2")]
    assert office.aliases == WAITING


def test_a_decision_is_not_taken_back(office: Office) -> None:
    office.judged(2)
    office.decide("anna")
    with pytest.raises(PromotionError, match="has its approval, by anna: too late to reject"):
        office.decide("ben", "reject")
    office.judged(3, 2)
    office.decide("ben", "reject", 3)
    with pytest.raises(PromotionError, match="ben has rejected"):
        office.decide("anna", number=3)


def test_a_preset_or_override_decides_nothing_about_approvals() -> None:
    for override in ("approval=none", "approvers=people", "approval_days=1", "four_eyes=true"):
        with pytest.raises(ConfigError, match=rf"promotion\.{override.partition('=')[0]}"):
            open_preset("tiny", ["promotion.challenger=grpo", f"promotion.{override}"])


def _lines(office: Office, text: str) -> None:
    (office.home.root / "promotion.toml").write_text(text)


def _linked(office: Office) -> None:
    path = office.home.root / "promotion.toml"
    path.rename(office.folder / "elsewhere")
    path.symlink_to(office.folder / "elsewhere")


UNUSABLE: list[tuple[Callable[[Office], object], str]] = [
    (lambda office: (office.home.root / "promotion.toml").chmod(0o620), "others than its owner can write it"),
    (lambda office: (office.home.root / "promotion.toml").chmod(0o602), "others than its owner can write it"),
    (lambda office: (office.home.root / "promotion.toml").chmod(0o1602), "others than its owner can write it"),
    (lambda office: office.home.root.chmod(0o770), "others than its owner can write it"),
    (lambda office: os.chown(office.home.root / "promotion.toml", 12345, -1), "does not belong to the account"),
    (_linked, "cannot read it"),
    (lambda office: _lines(office, "approvers = ["), "promotion.toml names who approves promotions"),
    (lambda office: _lines(office, "days = 3"), "approvers"),
    (lambda office: _lines(office, "approvers = ['anna AAAA']"), "is not name, key type and key"),
    (lambda office: _lines(office, "approvers = []\nfour_eyes = true"), "four_eyes"),
    (lambda office: _lines(office, "approvers = []\ndays = 999999999"), "must be between 1 and 3650"),
    (lambda office: (office.home.root / "promotion.toml").unlink(), "promotion.toml is missing"),
]


def test_a_file_of_approvers_that_others_can_change_or_that_has_errors_lets_nobody_promote(office: Office) -> None:
    office.judged(2)
    for change, message in UNUSABLE:
        if "does not belong" in message and os.geteuid():
            continue  # only root can give a file away
        change(office)
        for attempt in (lambda: office.judged(3), lambda: office.decide("anna")):
            with pytest.raises(PromotionError, match=r"promotion\.toml"):
                attempt()
        with pytest.raises(PromotionError, match=message):
            promote(office.home, office.tracker, office.versions[1], over=office.versions[0])
        assert office.aliases[CHAMPION] == 1
        (office.home.root / "promotion.toml").unlink(missing_ok=True)
        office.home.root.chmod(0o700)
        office.allow("anna", "ben")


def test_where_nothing_awaits_nothing_is_approved(office: Office) -> None:
    with pytest.raises(PromotionError, match="tiny-grpo/2 awaits no approval in this state directory"):
        statement(office.home, f"{NAME}/2", "approve", "good")
    with pytest.raises(PromotionError, match="awaits no approval"):
        office.hand_in("approve", 7, "{}", "")
    assert office.aliases == BEFORE


def test_a_log_that_was_edited_decides_nothing(office: Office) -> None:
    office.judged(2)
    document, signature = office.signed("anna")
    path = audit_path(office.home)
    path.write_text(path.read_text().replace('"until": "2', '"until": "3'))
    with pytest.raises(PromotionError, match=r"the audit log has errors: .*line 2: the entry was changed"):
        office.hand_in("approve", 2, document, signature)
    assert office.aliases == WAITING


@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_a_decision_that_is_killed_anywhere_and_repeated_is_made_once(office: Office, decision: str) -> None:
    office.judged(2)
    assert kills_until_done(lambda: office.decide("anna", decision)) >= 3
    office.decide("anna", decision)
    if decision == "approve":
        assert office.aliases == PROMOTED
        assert office.actions == [("await", "2"), ("approve", "2"), ("promote", "2")]
    else:
        assert office.aliases == {CHAMPION: 1, CHALLENGER: 2}
        assert office.actions == [("await", "2"), ("reject", "2")]
    assert {*office.events} == {("awaits", 2), ("promoted" if decision == "approve" else "refused", 2)}
    assert audit_errors(office.home)[0] == ()


def test_a_promotion_that_was_killed_after_its_approval_is_completed_by_the_next_run_too(office: Office) -> None:
    office.judged(2)
    with pytest.MonkeyPatch.context() as killed, pytest.raises(Killed):
        dying(killed, 0)
        office.decide("anna")
    assert office.aliases == WAITING
    assert "was approved by anna and promoted" in office.judged(2)
    assert office.aliases == PROMOTED
    assert promotion.current_champion(office.home, open_preset("tiny", ["promotion.challenger=grpo"])) is not None


def test_an_actor_is_the_user_and_the_flow_run_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(current_actor()) == {"user", "host"}
    assert current_actor()["user"] == getpass.getuser()
    monkeypatch.setenv("PREFECT__WORKER_NAME", "gpu-1")
    assert "worker" not in current_actor()
    run = FlowRun(flow_run_id="123", name="promote tiny", attempt=1, url="")
    monkeypatch.setattr(promotion, "current_flow_run", lambda: run)
    found = current_actor()
    assert (found["flow_run"], found["flow_run_id"], found["worker"]) == ("promote tiny", "123", "gpu-1")
