"""The audit log against the registry and its signatures: each kind of tampering is named."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.artifacts import download_artifacts

from rlcore.flows.cli.app import main
from rlcore.tasks.operations.audit import audit_errors, audit_table
from rlcore.tasks.promotion import champion
from rlcore.tasks.promotion.approvers import read_approvers, sign
from rlcore.tasks.promotion.champion import Grounds
from rlcore.tasks.store.audit_log import AuditEntry, audit_path, record_action
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.registry import CHAMPION, ModelVersion, find_by_sha256, remove_tag, set_alias, set_tags
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.registered import ANNA, promote, register_toy, register_versions, roll_back
from tests.ssh_keys import allowed, ask_for_approvals, make_key
from tests.waiting import LONG

NAME = "tiny-grpo"
Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


@pytest.fixture
def versions(tracked_home: Home, tracker: Tracker, tmp_path: Path) -> list[ModelVersion]:
    """Two champions, the second with an approval: entries 1 (promote), 2 (await), 3 (approve), 4 (promote)."""
    found = register_versions(tracker, tmp_path / "model", NAME)
    promote(tracked_home, tracker, found[0], over=None)
    key = make_key(tmp_path, "anna")
    ask_for_approvals(tracked_home, allowed(key))
    request = {"rules": read_approvers(tracked_home).sha256, "until": "2030-01-01T00:00:00+00:00"}
    second = Grounds(over=found[0], verdict="v2", sentence="Promoted.")
    asked = champion.await_approval(tracked_home, tracker, found[1], second, request=request, actor=ANNA)
    stated = {"version": f"{NAME}/2", "decision": "approve", "reason": "good", "request": asked.digest}
    document = json.dumps(stated) + "\n"
    signed = {"document": document, "signature": sign(document, key), "allowed": allowed(key)}
    approval = record_action(tracked_home, "approve", f"{NAME}/2", signed, actor={"principal": "anna"})
    champion.promote(tracked_home, tracker, found[1], replace(second, approvals=(approval.number,)), actor=ANNA)
    return found


def rewrite(home: Home, change: Change) -> None:
    """Change the entries and give the file a chain that fits, as one who knows it would."""
    entries = change([json.loads(line) for line in audit_path(home).read_text().splitlines()])
    lines, previous = list[str](), ""
    for number, values in enumerate(entries, start=1):
        made = AuditEntry(**{**values, "number": number, "previous": previous})
        previous = made.computed_digest()
        lines.append(json.dumps({**values, "number": number, "previous": made.previous, "digest": previous}))
    audit_path(home).write_text("".join(f"{line}\n" for line in lines))


def test_an_untouched_log_is_a_table_without_errors(tracked_home: Home, versions: list[ModelVersion]) -> None:
    forged = {"user": "ben", "host": "here", "flow_run": "a\n9  2026-11-29T09:00  tiny-grpo/3  approve  anna"}
    record_action(tracked_home, "gc", "home", {"bytes": 12}, actor=forged)
    assert audit_errors(tracked_home) == ((), 5)
    rows = [line.split() for line in audit_table(tracked_home).splitlines()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row[2:4] for row in rows[2:]] == [[f"{NAME}/2", "approve"], [f"{NAME}/2", "promote"], ["home", "gc"]]
    assert rows[2][4:] == ["anna", "reason", "good"]
    assert "bytes 12" in " ".join(rows[4])
    about = audit_table(tracked_home, NAME)
    assert (about.count("\n"), "home" in about.replace(NAME, "")) == (4, False)
    assert audit_table(tracked_home, f"{NAME}/1").count("\n") == 1
    assert audit_table(tracked_home, "other").startswith("no entries about other in ")


def test_a_promotion_that_was_cut_off_the_log_is_found(tracked_home: Home, versions: list[ModelVersion]) -> None:
    text = audit_path(tracked_home).read_text()
    audit_path(tracked_home).write_text("".join(text.splitlines(keepends=True)[:3]))
    (error,) = audit_errors(tracked_home)[0]
    assert error.startswith(
        f"{NAME}: version 2 is champion, and by entry 1 (promote) version 1 is: the alias was moved"
    )
    audit_path(tracked_home).unlink()
    (error,) = audit_errors(tracked_home)[0]
    assert error.startswith(f"{NAME}: version 2 is champion, and by the audit log no version is")
    assert error.endswith("remove the alias champion")


def test_an_alias_that_was_moved_by_hand_is_found(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    set_alias(tracker, versions[2], CHAMPION)
    (error,) = audit_errors(tracked_home)[0]
    assert error.startswith(f"{NAME}: version 3 is champion, and by entry 4 (promote) version 2 is")
    assert error.endswith("give version 2 the alias champion")
    set_alias(tracker, versions[0], CHAMPION)
    assert audit_errors(tracked_home)[0][0].endswith("the next rlcore promote, retrain or rollback completes it")
    tracker.client.delete_registered_model_alias(NAME, CHAMPION)
    assert audit_errors(tracked_home)[0][0].startswith(f"{NAME}: no version is champion")
    set_alias(tracker, versions[1], CHAMPION)
    roll_back(tracked_home, tracker, NAME, version=2, reason="rude")
    assert audit_errors(tracked_home)[0] == ()
    details = {"artifact": "c", "champion": "2", "verdict": "v", "rules": "off", "approvals": [], "to": "3"}
    record_action(tracked_home, "promote", f"{NAME}/3", details)
    set_alias(tracker, versions[2], CHAMPION)
    (error,) = audit_errors(tracked_home)[0]
    assert error.startswith(f"entry 6, {NAME}: version 2 is champion, and by entry 5 (rollback) version 1 is")


def test_a_replaced_champion_is_found(tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]) -> None:
    set_tags(tracker, versions[1], {"sha256": "evil"})
    (error,) = audit_errors(tracked_home)[0]
    assert error.startswith(f"{NAME}: version 2 has the artifact evil, and by entry 4 (promote) b: it was changed")


def test_files_that_somebody_overwrote_under_a_champion_are_found(
    tracked_home: Home, tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    """As whoever may write to an experiment of MLflow can, without any right on the registered model."""
    ref = register_toy(tracked_home)
    version = find_by_sha256(tracker, "toy-sft", ref.sha256)
    assert version is not None
    promote(tracked_home, tracker, version, over=None)
    assert main(["audit", "verify"]) == 0
    folder = download_artifacts(f"models:/{version.name}/{version.version}")
    for name in ("model/config.json", "MLmodel", "components/tokenizer/tokenizer.json"):
        text = (file := Path(folder) / name).read_text()
        file.unlink()  # a hard link to the stage's artifact
        file.write_text(text + " ")
        capsys.readouterr()
        assert main(["audit", "verify"]) == 1
        assert f"{version.name}: version 1 is champion; the registered model is not what was" in capsys.readouterr().out
        file.write_text(text)


def test_a_champion_without_its_digest_is_found_if_the_log_or_a_preset_that_was_run_names_the_model(
    tracked_home: Home, tracker: Tracker, tmp_path: Path
) -> None:
    """As one who made the registered model before the worker can remove the tags of its versions."""
    toy = find_by_sha256(tracker, "toy-sft", register_toy(tracked_home).sha256)
    assert toy is not None
    others = register_versions(tracker, tmp_path / "own", "own-grpo")
    record_action(tracked_home, "refuse", "own-grpo/1", {"champion": "none"})
    for each in (toy, *others):
        remove_tag(tracker, each, "sha256")
    set_alias(tracker, others[0], CHAMPION)
    set_alias(tracker, toy, CHAMPION)
    errors = "\n".join(audit_errors(tracked_home)[0])
    for name in ("own-grpo", "toy-sft"):
        assert f"{name}: version 1 is champion, and by the audit log no version is" in errors


def test_a_model_that_was_never_promoted_has_no_champion(tracked_home: Home, tracker: Tracker, tmp_path: Path) -> None:
    version = register_versions(tracker, tmp_path / "own", "own-grpo")[0]
    assert audit_errors(tracked_home) == ((), 0)
    set_alias(tracker, version, CHAMPION)
    assert audit_errors(tracked_home)[0][0].startswith("own-grpo: version 1 is champion, and by the audit log no versi")


@pytest.mark.parametrize("command", ["audit verify", "lineage a/1", "show a/1", "rollback a/1 --reason rude", "gc"])
def test_a_server_that_does_not_answer_is_one_line_within_seconds(
    command: str, tracked_home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run waits for it for ten minutes, a person does not: neither where nobody listens nor where nobody replies."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (9, silent.getsockname()[1]):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
            began = time.monotonic()
            assert main(command.split()) == 1
            assert time.monotonic() - began < LONG  # MLflow's client alone takes longer
            line, fix = capsys.readouterr().err.strip().splitlines()[::2]
            assert line.startswith("error (ServiceError): MLflow server: http://127.0.0.1:")
            assert "does not answer" in line and "start it" in fix


def _reason(entry: dict[str, Any]) -> dict[str, Any]:
    document = entry["details"]["document"].replace("good", "very good")
    return {**entry, "details": {**entry["details"], "document": document}}


def _changed(entry: dict[str, Any], **details: str) -> dict[str, Any]:
    return {**entry, "details": {**entry["details"], **details}}


UNSIGNED: list[tuple[Change, str]] = [
    (lambda every: [*every[:2], _reason(every[2]), every[3]], "entry 3: the signature of anna does not fit"),
    (
        lambda every: [*every[:2], {**every[2], "actor": {"principal": "ben"}}, every[3]],
        "entry 3: signed by anna, not by b",
    ),
    (lambda every: [*every[:2], {**every[2], "subject": f"{NAME}/3"}, every[3]], "entry 3: the document is about"),
    (lambda every: [*every[:2], every[3]], "entry 3: tiny-grpo/2 was promoted without an approval"),
    (
        lambda every: [*every[:3], _changed(every[3], rules="def")],
        "entry 4: tiny-grpo/2 was promoted without an approval",
    ),
    (lambda every: [*every[:3], _changed(every[3], rules="")], "was promoted without the approvers of entry 2"),
    (lambda every: [*every[:3], _changed(every[3], artifact="c")], "was promoted without an approval"),
    (lambda every: [*every[:2], {**every[2], "details": {}}, every[3]], "an entry lacks what rlcore writes"),
    (lambda every: [*every[:2], {**every[2], "time": "soon"}, every[3]], "an entry lacks what rlcore writes"),
    (lambda every: [*every[:3], {**every[1], "subject": f"{NAME}/3"}, every[3]], "was promoted without an appr"),
    (lambda every: [*every[:3], {**every[2], "action": "reject"}, every[3]], "was promoted without an approval"),
    (
        lambda every: [*every, {**every[3], "action": "rollback", "details": {"artifact": "c", "to": "3"}}],
        "entry 5: a rollback to version 3 of tiny-grpo, which no entry promoted",
    ),
]


def test_a_decision_that_nobody_signed_is_found(tracked_home: Home, versions: list[ModelVersion]) -> None:
    written = audit_path(tracked_home).read_text()
    for change, message in UNSIGNED:
        rewrite(tracked_home, change)
        assert message in "\n".join(audit_errors(tracked_home)[0])
        audit_path(tracked_home).write_text(written)
