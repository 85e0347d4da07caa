"""Hostile requests to the gateway: each is refused with a status of its own, and no episode is touched by it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlcore.agents.gateway import Gateway
from rlcore.agents.session import Session
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.rlcore.agents.gateways import RandomSampler, chat, message_of, running, user

CHAT, RESPONSES, REWARD, MODELS = "/v1/chat/completions", "/v1/responses", "/v1/reward", "/v1/models"
HELLO = b'{"messages": [{"role": "user", "content": "1"}]}'
KEY = "@KEY@"  # of the session that sends
DIGITS = "9" * 5000
DEEP = b"[" * 100_000


def sent(
    path: str = CHAT,
    body: Any = HELLO,
    *lines: str,
    method: str = "POST",
    host: str = "127.0.0.1",
    key: str = KEY,
    length: str | None = None,
) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"Host: {host}", *([f"Authorization: Bearer {key}"] if key else []), *lines]
    size = [] if length == "" else [f"Content-Length: {length or len(data)}"]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *head, *size, "", ""]).encode("latin-1") + data


def messages(*found: Any, **more: Any) -> bytes:
    return sent(CHAT, {"messages": list(found), **more})


def called(**function: Any) -> bytes:
    return messages(SAYS, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]})


def items(*found: Any, **more: Any) -> bytes:
    return sent(RESPONSES, {"input": list(found), **more})


def chunked(*pieces: bytes) -> bytes:
    return sent(CHAT, b"".join(pieces), "Transfer-Encoding: chunked", length="")


PART = {"role": "user", "content": [{"type": "text", "text": "1"}]}
HEADS: Mapping[str, tuple[int, bytes]] = {
    "no key": (401, sent(key="")),
    "another key": (401, sent(key="sk-guess")),
    "a key of 5,000 letters": (401, sent(key="a" * 5000)),
    "a key beyond ASCII": (401, sent(key="\xe9\xff")),
    "two keys": (400, sent(CHAT, HELLO, "Authorization: Bearer other")),
    "basic": (401, sent(CHAT, HELLO, "Authorization: Basic abc", key="")),
    "a length of 5,000 digits without a key": (400, sent(key="", length=DIGITS)),
    "a length of 5,000 digits": (400, sent(length=DIGITS)),
    "a length below 0": (400, sent(length="-1")),
    "a length that is a word": (400, sent(length="two")),
    "a length in Arabic digits": (400, sent(length="\xb2\xb3")),
    "a length that never comes": (413, sent(length="99999999999")),
    "two lengths": (400, sent(CHAT, HELLO, "Content-Length: 2")),
    "a length and chunks": (400, sent(CHAT, HELLO, "Transfer-Encoding: chunked")),
    "an unknown encoding": (400, sent(CHAT, HELLO, "Transfer-Encoding: gzip", length="")),
    "a chunk that is none": (400, chunked(b"zz\r\n{}\r\n")),
    "a chunk below 0": (400, chunked(b"-1\r\n")),
    "a chunk of 5,000 digits": (400, chunked(DIGITS.encode() + b"\r\n")),
    "another host": (403, sent(host="evil.example")),
    "no host": (400, sent().replace(b"Host: 127.0.0.1\r\n", b"")),
    "two hosts": (400, sent(CHAT, HELLO, "Host: evil.example")),
    "a host of 5,000 letters": (403, sent(host="a" * 5000)),
    "a host in brackets": (403, sent(host="[::")),
    "headers without end": (400, b"POST / HTTP/1.1\r\nX: " + b"a" * 200_000),
    "a name beyond ASCII": (400, sent(CHAT, HELLO, "X\xe9: 1")),
    "a header without a colon": (400, sent(CHAT, HELLO, "nothing")),
    "a null byte": (400, sent(CHAT, HELLO, "X: \x00")),
    "a folded header": (200, sent(CHAT, HELLO, "X: a", " b")),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40 + b"\r\n\r\n"),
    "words": (400, b"hello\r\n\r\n"),
    "HTTP 9": (403, b"GET / HTTP/9.9\r\n\r\n"),
    "no path": (404, sent("/")),
    "a path with dots": (404, sent("/v1/../etc/passwd", method="GET")),
    "a path of 5,000 letters": (404, sent("/" + "a" * 5000, method="GET")),
    "a path in percent": (404, sent("/%ff%00%0d%0a", method="GET")),
    "a path in half of percent": (404, sent("/%", method="GET")),
    "another method": (404, sent(method="PATCH")),
    "a method of 500 letters": (404, sent(method="A" * 500)),
    "CONNECT": (404, sent("example:443", method="CONNECT")),
    "an upgrade": (200, sent(CHAT, HELLO, "Connection: upgrade", "Upgrade: websocket")),
    "an expectation": (200, sent(CHAT, HELLO, "Expect: 100-continue")),
    **{
        f"a retry count of {name}": (200, sent(CHAT, HELLO, f"x-stainless-retry-count: {value}"))
        for name, value in {
            "5,000 digits": DIGITS,
            "-1": "-1",
            "a word": "x",
            "a superscript": "\xb2",
            "0": "0",
        }.items()
    },
}
BODIES: Mapping[str, tuple[int, bytes]] = {
    **{
        f"{name} to {path}": (400, sent(path, body))
        for path in (CHAT, RESPONSES, REWARD)
        for name, body in {
            "nothing": b"",
            "half": b'{"a": ',
            "null": b"null",
            "a list": b"[1]",
            "a text": b'"x"',
            "no UTF-8": b'{"a": "\xff"}',
            "UTF-16": json.dumps({"a": 1}).encode("utf-16"),
            "a byte order mark": b"\xef\xbb\xbf" + HELLO,
            "a key twice": b'{"messages": [], "messages": []}',
            "NaN": b'{"a": NaN}',
            "infinity": b'{"a": 1e999}',
            "5,000 digits": b'{"a": ' + DIGITS.encode() + b"}",
            "levels": DEEP,
            "levels of objects": b'{"a": ' * 50_000,
            "40 levels": b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
            "300,000 values": b'{"a": [' + b"0," * 300_000 + b"0]}",
            "half of a pair": rb'{"a": "\ud800"}',
            "half of a pair as a key": rb'{"\udc00": 1}',
        }.items()
    },
    "too large": (413, sent(CHAT, b'{"a": "' + b"x" * (5 << 20) + b'"}')),
    "too large in chunks": (413, chunked(*[b"10000\r\n" + b" " * 65536 + b"\r\n"] * 80, b"0\r\n\r\n")),
}
SAYS = user("1")
WRONG = (5, 1.5, True, [], {}, [[]], "x", DIGITS, "\U0001f600" * 300)
VALUES: Mapping[str, tuple[int, bytes]] = {
    **{f"previous_response_id {value!r:.20}": (400, items(PART, previous_response_id=value)) for value in WRONG},
    **{f"item_reference {value!r:.20}": (400, items({"type": "item_reference", "id": value})) for value in WRONG},
    **{
        f"reasoning {name} {value!r:.20}": (400, items({"type": "reasoning", name: value}, PART))
        for name in ("content", "summary")
        for value in (5, True, "x", [5], [[]], [{"text": 5}])
    },
    **{f"messages {value!r:.20}": (400, sent(CHAT, {"messages": value})) for value in (*WRONG, None)},
    **{f"a message {value!r:.20}": (400, messages(value)) for value in WRONG},
    **{f"a role {value!r:.20}": (400, messages({"role": value, "content": "1"})) for value in (*WRONG, None)},
    **{f"text {value!r:.20}": (400, messages({"role": "user", "content": value})) for value in (5, True, {}, [5])},
    **{f"tools {value!r:.20}": (400, messages(SAYS, tools=value)) for value in (5, True, {}, [5], "x", [{}])},
    **{f"a name {value!r:.20}": (400, called(name=value, arguments="{}")) for value in (5, True, [], {}, None)},
    **{
        f"arguments {value!r:.20}": (400, called(name="f", arguments=value))
        for value in (5, True, [], "x", "[1]", '{"a": NaN}', '{"a": 1e999}', "[" * 5000, '{"a": ' + DIGITS + "}")
    },
    **{f"n {value!r:.20}": (400, messages(SAYS, n=value)) for value in (0, -1, 1.5, "2", [], 10**400, 129, True)},
    **{f"max_tokens {value!r:.20}": (400, messages(SAYS, max_tokens=value)) for value in (0, -1, 1.5, "2", [], True)},
    **{f"stop {value!r:.20}": (400, messages(SAYS, stop=value)) for value in ("", 5, [5], [""], {}, ["x"] * 10_000)},
    **{f"stream {value!r:.20}": (400, messages(SAYS, stream=value)) for value in (5, "yes", [], {})},
    **{f"model {value!r:.20}": (400, messages(SAYS, model=value)) for value in (5, [], {}, True)},
    **{f"tool_choice {value!r:.20}": (400, messages(SAYS, tool_choice=value)) for value in (5, [], {}, "x")},
    **{f"reward {value!r:.20}": (400, sent(REWARD, {"reward": value})) for value in (True, "1", [], {}, None, 10**400)},
    "more text than fits": (400, messages(user("x" * (3 << 20)))),
    "10,000 messages": (400, messages(*[user("1")] * 10_000)),
}  # fmt: skip
HOSTILE = {**HEADS, **BODIES, **VALUES}


@pytest.fixture(scope="module")
def opened(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> Iterator[tuple[Gateway, Session, Session]]:
    with running(RandomSampler(tokenizer), tokenizer) as gateway:
        attacker, honest = (gateway.open(prompts[0], place=0, sample=sample) for sample in (0, 1))
        yield gateway, attacker, honest
        assert message_of(chat(gateway, honest, user("1")))
        record = gateway.close(honest)
        assert (len(record.calls), record.refused, record.error) == (1, (), "")
        assert gateway.close(attacker).error == ""


def exchanged(gateway: Gateway, request: bytes) -> bytes:
    """Reply of the gateway to the bytes of a request."""
    port = urlsplit(gateway.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:

        def send() -> None:
            with suppress(OSError):  # it was refused before it was whole
                connection.sendall(request)

        threading.Thread(target=send, daemon=True).start()
        found = b""
        while not (b"\r\n\r\n" in found and found.endswith(b"}")):
            piece = connection.recv(65536)
            if not piece:
                break
            found += piece
        return found.partition(b"100 Continue\r\n\r\n")[2] or found


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 200


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused(opened: tuple[Gateway, Session, Session], name: str) -> None:
    gateway, attacker, _ = opened
    status, request = HOSTILE[name]
    reply = exchanged(gateway, request.replace(KEY.encode(), attacker.key.encode()))
    head, _, body = reply.partition(b"\r\n\r\n")
    assert (int(head.split()[1]), b"internal" in body) == (status, False), reply[:500]
    if status != 200:
        assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
        assert len(body) < 2000
