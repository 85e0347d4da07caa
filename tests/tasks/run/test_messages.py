"""Events of a run and messages for the team: each is sent once, in order, to every channel."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlcore.errors import ConfigError
from rlcore.tasks.run import events
from rlcore.tasks.run.events import addresses, deliver, emit_findings, emit_snapshot, put
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_json
from tests.waiting import LONG

AUTOMATIONS = Path(__file__).parents[3] / "infra" / "automations.yaml"


def our_triggers() -> list[dict[str, Any]]:
    """Triggers on events of rlcore; the others react to Prefect's own."""
    triggers = [each["trigger"] for each in yaml.safe_load(AUTOMATIONS.read_text(encoding="utf-8"))]
    return [each for each in triggers if any(name.startswith("rlcore.") for name in each["expect"])]


def test_every_automation_has_an_event() -> None:
    names = {value for value in vars(events).values() if isinstance(value, str) and value.startswith("rlcore.")}
    assert {name for trigger in our_triggers() for name in trigger["expect"]} <= names


def test_every_label_that_an_automation_matches_is_one_that_an_event_has() -> None:
    tree = ast.parse(Path(events.__file__).read_text(encoding="utf-8"))
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    labels = {key.value for key in keys if isinstance(key, ast.Constant)}
    assert {label for trigger in our_triggers() for label in trigger["match"]} <= labels


def snapshot(folder: Path) -> None:
    ref = ArtifactRef(kind="dataset", uri="", sha256="abc", bytes=1, rows=5, contract="preference_pairs/v2")
    config: Any = SimpleNamespace(name="toy", retrain=None)
    emit_snapshot(config, "prepare_preferences", ref)


def stopped(folder: Path) -> None:
    write_json({"findings": [], "stopped": {"text": "stopped after iteration 3"}}, folder / "health.json")
    emit_findings("toy", "grpo", folder)


def drifted(folder: Path) -> None:
    columns = [{"column": "tokens", "level": "warn"}, {"column": "turns", "level": "calm"}]
    write_json([{"name": "prompts", "columns": columns}], folder / "drift.json")
    emit_findings("toy", "drift", folder)


@pytest.mark.parametrize(
    ("happens", "line"),
    [
        (snapshot, "prepare_preferences of toy: rlcore.snapshot.made 5 rows for training and held out (preference_pai"),
        (stopped, "grpo of toy: rlcore.health.stopped stopped after iteration 3"),
        (drifted, "drift of toy: rlcore.drift accepted, but these columns have moved: prompts: tokens"),
    ],
)
def test_inline_an_event_is_one_line_in_the_log(
    happens: Callable[[Path], None], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    happens(tmp_path)
    (words,) = [record.getMessage() for record in caplog.records]
    assert words.startswith(line)


def test_what_is_as_it_should_be_is_no_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    emit_findings("toy", "sft", tmp_path)
    write_json({"findings": [], "stopped": None}, tmp_path / "health.json")
    write_json([{"name": "prompts", "columns": [{"column": "turns", "level": "calm"}]}], tmp_path / "drift.json")
    emit_findings("toy", "grpo", tmp_path)
    assert caplog.records == []


TODAY = datetime.now(UTC)


@contextmanager
def hook(*, answers: int = 200, port: int = 0) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """A webhook: its port, and what was posted."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", port), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port, got
    finally:
        server.shutdown()
        server.server_close()
        thread.join(LONG)


def note(home: Home, text: str, *, minute: int = 0, days: int = 0) -> None:
    time = TODAY + timedelta(minutes=minute, days=-days)
    put(home, key=text, event="rlcore.test", about="toy", text=text, run="r", url="http://here", time=time.isoformat())


def texts(got: list[dict[str, Any]]) -> list[str]:
    return [each["text"] for each in got]


def test_messages_wait_for_a_webhook_and_arrive_in_order_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with hook(answers=503) as (port, away):
        monkeypatch.setenv("RLCORE_WEBHOOK_URL", f"http://127.0.0.1:{port}/secret")
        note(home, "second", minute=-1)
        note(home, "first", minute=-2)
        assert list(deliver(home)) == ["webhook did not take a message, which waits: it answers 503"]
    (line,) = deliver(home)  # nobody listens
    assert line.endswith("ConnectError")
    note(home, "third")
    with hook(port=port) as (_, got):
        for _ in range(2):
            assert list(deliver(home)) == []
            note(home, "first", minute=-2)  # of a command that is repeated
        assert texts(got) == ["toy: first", "toy: second", "toy: third"]
    assert len(away) == 1  # the second waited behind the first
    assert got[0] == {"id": "first", "event": "rlcore.test", "text": "toy: first", "run": "r", "url": "http://here"}


def test_a_channel_that_is_away_keeps_no_other_from_a_message(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    note(home, "one")
    with hook() as (slack, posted), hook(answers=500) as (web, _):
        monkeypatch.setenv("RLCORE_SLACK_URL", f"http://127.0.0.1:{slack}")
        monkeypatch.setenv("RLCORE_WEBHOOK_URL", f"http://127.0.0.1:{web}")
        for _ in range(2):
            assert len(list(deliver(home))) == 1
        assert posted == [{"text": "toy: one http://here"}]
    with hook(port=web) as (_, got):
        assert list(deliver(home)) == []
        assert texts(got) == ["toy: one"]


def test_without_an_address_and_after_a_month_nothing_is_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    note(home, "nobody")
    note(home, "old", days=31)
    assert list(deliver(home)) == []
    with hook() as (port, got):
        monkeypatch.setenv("RLCORE_WEBHOOK_URL", f"http://127.0.0.1:{port}")
        assert list(deliver(home)) == []
        assert got == []


@pytest.mark.parametrize(
    ("variable", "scheme"),
    [("RLCORE_WEBHOOK_URL", "https://"), ("RLCORE_SLACK_URL", "https://"), ("RLCORE_MAIL_URL", "mailtos://")],
)
def test_a_wrong_address_is_refused_and_not_shown(variable: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses() == {}
    monkeypatch.setenv(variable, f"{scheme}example.org/secret")
    assert list(addresses().values()) == [f"{scheme}example.org/secret"]
    monkeypatch.setenv(variable, "hooks.example.org/secret")
    with pytest.raises(ConfigError, match="does not begin with") as caught:
        addresses()
    assert (caught.value.where, "secret" in str(caught.value)) == (variable, False)
