"""Servers of OpenAI's protocol: wrong requests, silent connections and streams."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from rlcore.openai_api import guard, server
from rlcore.openai_api import requests as wire
from rlcore.openai_api.guard import Admission, Guard, Limits
from rlcore.openai_api.replies import FunctionCall, Piece, Reply, TokenLogprob
from rlcore.openai_api.server import MAX_CONNECTIONS_OF_KEY, ServerThread
from tests.quick import within_seconds
from tests.rlcore.openai_api.hostile import (
    CHAT,
    HELLO,
    PLAIN,
    SAYS,
    chat,
    chunked,
    connected,
    messages,
    plain,
    refusal,
    request,
)
from tests.waiting import LONG

TOKEN = "a-key-of-the-tests"

DIGITS = "9" * 5000

WHOLE = json.dumps(HELLO).encode()

WRONG = (5, 1.5, True, [], {}, [[]], "x", DIGITS, "\U0001f600" * 300)

OFFER = wire.Offer(max_choices=16, max_stops=4, refused=wire.UNSUPPORTED)

HEADS: Mapping[str, tuple[int, bytes]] = {
    "no key": (401, request(key="")),
    "another key": (401, request(key="sk-guess")),
    "half of the key": (401, request(key=TOKEN[:-1])),
    "a key of 5,000 letters": (401, request(key="a" * 5000)),
    "a key beyond ASCII": (401, request(key="\xe9\xff")),
    "two keys": (400, request(CHAT, HELLO, "Authorization: Bearer other")),
    "basic": (401, request(CHAT, HELLO, "Authorization: Basic abc", key="")),
    "the key by another scheme": (401, request(CHAT, HELLO, f"Authorization: Basic {TOKEN}", key="")),
    "no key for a path that is not there": (401, request("/reset", key="")),
    "a length of 5,000 digits without a key": (400, request(key="", length=DIGITS)),
    "a length of 5,000 digits": (400, request(length=DIGITS)),
    "a length below 0": (400, request(length="-1")),
    "a length that is a word": (400, request(length="two")),
    "a length in Arabic digits": (400, request(length="\xb2\xb3")),
    "a length that never comes": (413, request(length="99999999999")),
    "two lengths": (400, request(CHAT, HELLO, "Content-Length: 3", length="2")),
    "a length and chunks": (400, request(CHAT, HELLO, "Transfer-Encoding: chunked")),
    "an unknown encoding": (400, request(CHAT, HELLO, "Transfer-Encoding: gzip", length="")),
    "chunks": (200, chunked(*(b"%x\r\n%s\r\n" % (len(each), each) for each in (WHOLE[:9], WHOLE[9:])), b"0\r\n\r\n")),
    "a chunk that is none": (400, chunked(b"zz\r\n{}\r\n")),
    "a chunk below 0": (400, chunked(b"-1\r\n")),
    "a chunk of 5,000 digits": (400, chunked(DIGITS.encode() + b"\r\n")),
    "another host": (403, request(host="evil.example")),
    "another host that ends like ours": (403, request(host="127.0.0.1.evil.example:80")),
    "our host in capitals": (200, request(host="LOCALHOST:8000")),
    "our host as IPv6": (200, request(host="[::1]:8000")),
    "no host": (400, request(host="")),
    "two hosts": (400, request(CHAT, HELLO, "Host: evil.example")),
    "a host of 5,000 letters": (403, request(host="a" * 5000)),
    "a host in brackets": (403, request(host="[::")),
    "headers without end": (400, b"POST / HTTP/1.1\r\nX: " + b"a" * 200_000),
    "a name beyond ASCII": (400, request(CHAT, HELLO, "X\xe9: 1")),
    "a header without a colon": (400, request(CHAT, HELLO, "nothing")),
    "a null byte": (400, request(CHAT, HELLO, "X: \x00")),
    "a folded header": (200, request(CHAT, HELLO, "X: a", " b")),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40 + b"\r\n\r\n"),
    "words": (400, b"hello\r\n\r\n"),
    "HTTP 9": (403, b"GET / HTTP/9.9\r\n\r\n"),
    "an upgrade": (200, request(CHAT, HELLO, "Connection: upgrade", "Upgrade: websocket")),
    "an expectation": (200, request(CHAT, HELLO, "Expect: 100-continue")),
}

BODIES: Mapping[str, tuple[int, bytes]] = {
    name: (400, request(CHAT, body))
    for name, body in {
        "nothing": b"",
        "half": b'{"a": ',
        "null": b"null",
        "a list": b"[1]",
        "a text": b'"x"',
        "no UTF-8": b'{"a": "\xff"}',
        "UTF-16": json.dumps({"a": 1}).encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + WHOLE,
        "a key twice": b'{"messages": [], "messages": []}',
        "NaN": b'{"a": NaN}',
        "infinity": b'{"a": 1e999}',
        "5,000 digits": b'{"a": ' + DIGITS.encode() + b"}",
        "levels": b"[" * 200_000,
        "levels of objects": b'{"a": ' * 50_000,
        "40 levels": b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
        "300,000 values": b'{"a": [' + b"0," * 300_000 + b"0]}",
        "half of a pair": rb'{"a": "\ud800"}',
        "half of a pair as a key": rb'{"\udc00": 1}',
    }.items()
} | {
    "too large": (413, request(CHAT, b'{"a": "' + b"x" * (5 << 20) + b'"}')),
    "too large in chunks": (413, chunked(*[b"10000\r\n" + b" " * 65536 + b"\r\n"] * 80, b"0\r\n\r\n")),
}  # fmt: skip

OF_CHAT: Mapping[str, tuple[Any, ...]] = {
    "model": (5, [], {}, True, None), "messages": (*WRONG, None), "n": (0, -1, 1.5, "2", [], [1], 10**400, 17, True),
    "max_tokens": (0, -1, 1.5, "2", [], True, 10**400), "max_completion_tokens": (0, True),
    "temperature": (-0.1, 2.1, "hot", [], True),
    "stop": ("", 5, [5], [1], [""], {}, ["x"] * 5, ["x"] * 10_000, "x" * 1001), "seed": (2**70, "7", 1.5),
    "stream": (5, "yes", [], {}),
    "stream_options": (0, [], {"include_usage": 1}, {"pings": True}, {"include_usage": True}), "user": (5,),
    "logprobs": (2, "yes"), "top_logprobs": (21, -1, "3", 3), "logit_bias": ({"50": 100},),
    "response_format": ({"type": "json_object"},), "modalities": (["text", "audio"],),
    "functions": ([{"name": "f"}],), "generation_config": ("{}",), "x" * 5000: (1,),
}  # fmt: skip

OF_MESSAGES = {
    "content": (5, 7, True, {}, [], [5], None, [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
    "role": (*WRONG, None, "root", ["user"]),
    "tool_calls": ([], [5]),
}

OF_PLAIN = {"prompt": (None, [], ["1", 2], [True], [1.5], ["1"] * 17, 5), "logprobs": (21, True), "echo": (True,)}

VALUES: Mapping[str, tuple[int, bytes]] = {
    **{f"{name:.20} {value!r:.20}": (400, chat(**{name: value})) for name, all_ in OF_CHAT.items() for value in all_},
    **{f"a message {value!r:.20}": (400, messages(value)) for value in WRONG},
    **{
        f"a message of {name} {value!r:.20}": (400, messages(SAYS | {name: value}))
        for name, all_ in OF_MESSAGES.items()
        for value in all_
    },
    **{
        f"plain {name} {value!r:.20}": (400, plain(**{name: value}))
        for name, all_ in OF_PLAIN.items()
        for value in all_
    },
    "10,000 messages": (400, messages(*[SAYS] * 10_000)),
    "a stream with unknown options": (400, chat(stream=True, stream_options={"pings": True})),
    "logprobs with too many tokens": (400, chat(logprobs=True, top_logprobs=21)),
    "texts in parts": (200, messages({"role": "developer", "content": [{"type": "text", "text": "3"}, "4"]}, SAYS)),
    "values without effect": (
        200,
        chat(stop=None, seed=None, logit_bias={}, response_format={"type": "text"}, user="me"),
    ),
    "a stream of all": (200, chat(stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=3)),
    "token ids": (200, plain(prompt=[[1, 2], [3]], logprobs=0)),
}

WORDS: Mapping[str, str] = {
    "a key twice": "duplicate key", "NaN": "Out of range float", "infinity": "Out of range float",
    "5,000 digits": "invalid JSON", "40 levels": "levels deep", "levels": "invalid JSON",
    "half of a pair": "surrogates not allowed", "no UTF-8": "utf-8", "a list": "must be a JSON object",
    "too large": "larger than 1048576 bytes", "a length and chunks": "exclude each other",
    "model None": "model is missing", "messages []": "messages is empty",
    "n 17": "n must be an integer from 1 to 16, not 17", "temperature 2.1": "a number from 0 to 2",
    "top_logprobs 3": "needs logprobs to be true", "generation_config '{}'": "generation_config is not supported",
    "a message of role 'root'": "messages[0].role is root, not one of the roles system, developer, user, assistant",
    "a message of content None": "messages[0].content is missing",
    "a message of tool_calls [5]": "messages[0].tool_calls is not supported",
}  # fmt: skip

HOSTILE = {**HEADS, **BODIES, **VALUES}


async def app(scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
    fields = wire.read_fields(wire.read_json(await Request(scope, receive).body()), OFFER)
    wire.options_of(fields, is_chat=scope["path"] != PLAIN)
    if scope["path"] == PLAIN:
        wire.completion_prompts(fields)
    else:
        for _, _, message in wire.chat_messages(fields, wire.SPOKEN):
            message.end()
    fields.end()
    await JSONResponse({})(scope, receive, send)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that soon stops to wait for the rest of a body that never comes."""
    monkeypatch.setattr(guard, "_DRAIN_SECONDS", 0.1)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ServerThread(Guard(app, Admission(allows=TOKEN.__eq__), Limits()))
    yield server.start()
    server.stop()


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 150 and WORDS.keys() <= HOSTILE.keys()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused(port: int, name: str, request: pytest.FixtureRequest) -> None:
    if name in ("a length that never comes", "a length and chunks"):
        request.getfixturevalue("impatient")
    status, sent = HOSTILE[name]
    found, message = refusal(port, sent, TOKEN)
    assert (found, WORDS.get(name, "") in message) == (status, True), message


def pieces() -> list[Piece]:
    call = FunctionCall(name="f", arguments="{}", call_id="c")
    logprobs = (TokenLogprob("é", -0.5, (("é", -0.5), ("b", -1.0))),)
    return [
        Piece(index=0, text="é\u2028", num_tokens=1, logprobs=logprobs),
        Piece(index=1, text="b", num_tokens=2, finish="length"),
        Piece(index=0, text="c", num_tokens=3, finish="tool_calls", thought="Hm.", calls=(call,)),
    ]


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_streamed_chat_is_the_whole_one_in_parts(include_usage: bool) -> None:
    options = wire.Options(model="m", top_logprobs=2, include_usage=include_usage)
    reply = Reply(options=options, is_chat=True, num_prompt_tokens=4)
    whole, events = reply.whole(pieces()), [*reply.opening(2), *(e for p in pieces() for e in reply.events(p))]
    events += reply.closing(6)
    assert "".join(events).isascii() and events[-1] == "data: [DONE]\n\n"
    chunks = [json.loads(each.removeprefix("data: ")) for each in events[:-1]]
    assert [chunk.get("usage", 0) for chunk in chunks][-2:] == ([None, whole["usage"]] if include_usage else [0, 0])
    assert whole["usage"]["total_tokens"] == 10 and whole["id"] == chunks[0]["id"]
    for choice in whole["choices"]:
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        deltas, message = [each["delta"] for each in own], choice["message"]
        assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[-1]["delta"] == {}
        assert "".join(each.get("content", "") for each in deltas) == message["content"]
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == [choice["finish_reason"]]
        thoughts = [each["reasoning_content"] for each in deltas if "reasoning_content" in each]
        assert thoughts == [message[name] for name in ("reasoning_content",) if name in message]
        calls = [
            {key: call[key] for key in ("id", "type", "function")}
            for each in deltas
            for call in each.get("tool_calls", ())
        ]
        assert calls == message.get("tool_calls", [])
        parts = [each["logprobs"]["content"] for each in own if each["logprobs"]]
        assert [entry for part in parts for entry in part] == choice["logprobs"]["content"]


@pytest.mark.parametrize("count", [0, 1, 3, 60_000])
def test_a_token_of_a_text_completion_has_its_place_in_the_text(count: int) -> None:
    reply = Reply(options=wire.Options(model="m", top_logprobs=0), is_chat=False, num_prompt_tokens=1)
    logprobs = tuple(TokenLogprob("ab", -0.5) for _ in range(count))
    piece = Piece(index=0, text="ab" * count, num_tokens=count, logprobs=logprobs, finish="stop")
    with within_seconds():
        whole = reply.whole([piece])["choices"][0]
        (streamed,) = (json.loads(each.removeprefix("data: "))["choices"][0] for each in reply.events(piece, offset=10))
    assert whole["logprobs"]["text_offset"] == list(range(0, 2 * count, 2))
    assert streamed["logprobs"]["text_offset"] == list(range(10, 10 + 2 * count, 2))


KEYS = ("one", "other")


async def echo(scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
    body = await Request(scope, receive).body()
    await JSONResponse({"size": len(body)})(scope, receive, send)


@contextmanager
def serving(path: Path | None = None, **limits: Any) -> Iterator[int]:
    running = ServerThread(Guard(echo, Admission(allows=KEYS.__contains__), Limits(**limits)))
    port = running.start(path)
    try:
        yield port
    finally:
        running.stop()


def head(key: str = KEYS[0], length: int = 0, host: str = "localhost", more: str = "") -> bytes:
    lines = [f"Host: {host}", f"Authorization: Bearer {key}", f"Content-Length: {length}", *filter(None, [more])]
    return ("POST / HTTP/1.1\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


def status(connection: socket.socket, sent: bytes) -> int:
    """Status of the reply to a request; 0 if the connection was closed instead."""
    found = b""
    try:
        connection.sendall(sent)
        while not found.endswith(b"}"):  # the end of each reply
            found += (piece := connection.recv(65536))
            if not piece:
                return 0
    except ConnectionError:
        return 0
    return int(found.split()[1])


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(server, "max_connections", lambda: 48)
    return 48


def test_silent_connections_leave_room_for_honest_ones(few: int) -> None:
    with serving() as port, ExitStack() as open_ones:
        flood = [open_ones.enter_context(connected(port)) for _ in range(3 * few)]
        for each in flood[-few:]:
            each.sendall(b"POST / HT")
        with connected(port) as honest:
            assert status(honest, head()) == 200
            assert is_closed(flood[0])
            for _ in range(few):
                open_ones.enter_context(connected(port))
            assert status(honest, head()) == 200  # it keeps its connection


def test_a_burst_of_connections_holds_few_files(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    burst, files, made = 400, [], server.Connection.connection_made
    is_held, is_over = threading.Event(), threading.Event()

    async def hold(scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
        is_held.set()
        is_over.wait(LONG)  # all others wait to be accepted
        await echo(scope, receive, send)

    def counted(self: server.Connection, transport: Any) -> None:
        files.append(len(list(Path("/proc/self/fd").iterdir())))
        made(self, transport)

    monkeypatch.setattr(server.Connection, "connection_made", counted)
    running = ServerThread(Guard(hold, Admission(allows=KEYS.__contains__), Limits()))
    port = running.start()
    with ExitStack() as open_ones:
        open_ones.enter_context(connected(port)).sendall(head())
        assert is_held.wait(LONG)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(burst):
            open_ones.enter_context(connected(port))
        is_over.set()
        with connected(port) as honest:
            assert status(honest, head()) == 200
        running.stop()
    assert len(files) > burst and max(files) - before - burst <= few + 256


def test_a_key_has_a_limited_number_of_connections_and_another_key_is_served(few: int) -> None:
    with serving() as port, ExitStack() as open_ones:
        found = [status(open_ones.enter_context(connected(port)), head()) for _ in range(MAX_CONNECTIONS_OF_KEY + 5)]
        assert found == [200] * MAX_CONNECTIONS_OF_KEY + [429] * 5
        assert [status(open_ones.enter_context(connected(port)), head("other")) for _ in range(20)] == [200] * 20


def test_requests_without_a_key_hold_no_place(few: int) -> None:
    with serving() as port, ExitStack() as open_ones:
        for _ in range(2 * few):
            assert status(open_ones.enter_context(connected(port)), head("guess")) == 401
        assert status(open_ones.enter_context(connected(port)), head()) == 200


def test_the_limit_on_connections_leaves_files_for_the_rest_of_the_process() -> None:
    assert 64 <= server.max_connections() <= max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


@pytest.mark.parametrize("before", [b"", b"POST / HT", head() + b"POST / HT", head(length=2000) + b"x" * 500])
def test_a_connection_that_stays_silent_within_a_request_is_closed(
    before: bytes, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SILENT_SECONDS", 0.2)
    with serving(body_bytes=100) as port, connected(port) as connection:
        connection.sendall(before)
        while connection.recv(65536):
            pass


@pytest.mark.parametrize("is_last", [False, True])
def test_a_body_that_is_too_large_is_read_so_that_its_sender_reads_the_refusal(is_last: bool) -> None:
    more = "Connection: close" if is_last else ""
    with serving(body_bytes=1 << 20) as port, connected(port) as connection:
        assert status(connection, head(length=4 << 20, more=more) + b"x" * (4 << 20)) == 413
        assert is_last or status(connection, head()) == 200


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with serving(body_seconds=0.3) as port, connected(port) as connection:
        assert status(connection, head(length=100) + b'{"model":') == 408


@pytest.mark.parametrize("length", [10**12, 2 * 10**6])
def test_a_body_that_never_comes_is_refused_by_its_length(length: int, impatient: None) -> None:
    with serving(body_bytes=1 << 20) as port, connected(port) as connection:
        assert status(connection, head(length=length)) == 413


def test_the_server_answers_at_a_unix_socket_too(tmp_path: Path) -> None:
    path = tmp_path / "door"
    with serving(path) as port:
        for address in (port, str(path)):
            with connected(address) as connection:
                assert status(connection, head(length=3) + b"abc") == 200
                assert status(connection, head(host="evil.example")) == 403


def test_the_end_of_the_server_closes_every_connection() -> None:
    with ExitStack() as open_ones:
        with serving() as port:
            waiting = [open_ones.enter_context(connected(port)) for _ in range(3)]
            assert status(waiting[0], head()) == 200
            waiting[1].sendall(head(length=100) + b"x")
        assert all(map(is_closed, waiting))
        with pytest.raises(ConnectionRefusedError):
            connected(port)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_client_that_never_reads_its_reply_holds_no_connection(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_UNREAD_SECONDS", 0.2)
    ended, lost = threading.Event(), server.Connection.connection_lost

    async def talk(scope: guard.Scope, receive: guard.Receive, send: guard.Send) -> None:
        await JSONResponse({"text": "x" * (32 << 20)})(scope, receive, send)

    def note(self: server.Connection, error: Exception | None) -> None:
        lost(self, error)
        ended.set()

    monkeypatch.setattr(server.Connection, "connection_lost", note)
    running = ServerThread(Guard(talk, Admission(allows=KEYS.__contains__), Limits()))
    with connected(running.start()) as connection:
        connection.sendall(head(more="Connection: close" * is_last))
        assert ended.wait(LONG)
        running.stop()
