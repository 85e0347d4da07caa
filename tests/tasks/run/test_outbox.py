"""Messages for the team: kept until each channel has taken them, in order, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.tasks.run.outbox import addresses, deliver, put
from rlcore.tasks.store.settings import Home
from tests.waiting import LONG

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
    thread = Thread(target=server.serve_forever)
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


def test_messages_wait_for_a_webhook_that_is_away_and_are_delivered_in_order_and_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_an_address_of_another_kind_is_refused_and_not_shown(
    variable: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert addresses() == {}
    monkeypatch.setenv(variable, f"{scheme}example.org/secret")
    assert list(addresses().values()) == [f"{scheme}example.org/secret"]
    monkeypatch.setenv(variable, "hooks.example.org/secret")
    with pytest.raises(ConfigError, match="does not begin with") as caught:
        addresses()
    assert (caught.value.where, "secret" in str(caught.value)) == (variable, False)
