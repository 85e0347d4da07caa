"""The gate of a server of ours, asked as ASGI asks it; a real server is asked by test_vllm.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlcore.sampling.vllm.worker.gate import TOKEN, Gate

KNOWN = b"Bearer planted-token"


def answered(kind: str, *headers: tuple[bytes, bytes]) -> tuple[bool, list[dict[str, Any]]]:
    """Return True if the application behind the gate was reached, and what was sent to the client."""
    reached, sent = [], list[dict[str, Any]]()

    async def app(*_: Any) -> None:
        reached.append(True)

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(Gate(app)({"type": kind, "path": "/collective_rpc", "headers": list(headers)}, receive, send))
    return bool(reached), sent


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "planted-token")


def test_the_trainer_and_the_servers_own_start_are_let_through() -> None:
    assert answered("http", (b"host", b"x"), (b"authorization", KNOWN)) == (True, [])
    assert answered("websocket", (b"authorization", KNOWN)) == (True, [])
    assert answered("lifespan") == (True, [])


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"Bearer other", b"planted-token", KNOWN + b"x"])
def test_anybody_else_is_refused(header: bytes) -> None:
    reached, sent = answered("http", (b"authorization", header))
    assert (reached, sent[0]["status"]) == (False, 401)
    assert answered("websocket", (b"authorization", header)) == (False, [{"type": "websocket.close", "code": 1008}])
    assert answered("http")[0] is False


def test_without_a_token_no_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    with pytest.raises(KeyError):
        answered("http")
