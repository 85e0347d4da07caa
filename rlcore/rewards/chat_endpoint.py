"""One request to a server with the OpenAI protocol, by the standard library, with a deadline and retries."""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_RETRIED_STATUS = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
_MAX_REPLY_BYTES = 1 << 20
_JITTER = secrets.SystemRandom()  # it moves times alone, and no seeded generator
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0


class EndpointError(Exception):
    """The server gave no usable reply; the text says why, and never holds the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The text of the first choice, and the tokens that the server counted; 0 where it does not say."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _TransientError(EndpointError):
    """What the next try may mend."""


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """``base_url`` up to the version (``http://127.0.0.1:8000/v1``). ``timeout_seconds`` bounds each try as a whole.

    Redirects and proxies are not followed: the key goes to this host alone. An echo of it is blotted out.
    """

    base_url: str
    key: str = field(repr=False)
    timeout_seconds: float
    retries: int

    def complete(self, body: Mapping[str, Any]) -> Reply:
        """The server's reply.

        Raises:
            EndpointError: refused, too slow, or no chat completion, after all retries.
        """
        for attempt in range(self.retries + 1):
            try:
                return self._try(body)
            except _TransientError as error:
                if attempt == self.retries:
                    tries = f"{attempt + 1} tries: " if attempt else ""
                    raise EndpointError(f"{tries}{error}") from error
                # Half of the wait is random, or requests that failed together would come back together.
                wait = min(_FIRST_WAIT_SECONDS * 2**attempt, _LONGEST_WAIT_SECONDS)
                time.sleep(wait * _JITTER.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def _try(self, body: Mapping[str, Any]) -> Reply:
        try:
            status, content = self._post(json.dumps(body).encode())
        except (OSError, http.client.HTTPException) as error:
            text = str(error).replace(self.key, "***") if self.key else str(error)  # it may quote what the server said
            raise _TransientError(f"the endpoint cannot be reached: {type(error).__name__}: {text}") from None
        if status in _RETRIED_STATUS:
            raise _TransientError(f"the endpoint answered with status {status}")
        if status != 200:
            raise EndpointError(f"the endpoint refused with status {status}: {content[:200]!r}")
        return _reply(content)

    def _post(self, body: bytes) -> tuple[int, bytes]:
        url = urllib.parse.urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        with closing(kind(url.hostname or "", url.port, timeout=self.timeout_seconds)) as connection:
            connection.connect()
            with _cut_off(connection.sock, self.timeout_seconds):
                connection.request("POST", f"{url.path.rstrip('/')}/chat/completions", body, headers)
                response = connection.getresponse()
                content = response.read(_MAX_REPLY_BYTES + 1)
        if len(content) > _MAX_REPLY_BYTES:
            raise EndpointError("the reply is larger than 1 MiB")
        return response.status, content.replace(self.key.encode(), b"***") if self.key else content


@contextmanager
def _cut_off(connected: socket.socket, seconds: float) -> Iterator[None]:
    """End the connection after ``seconds``: its own timeout would let a server drip a byte at a time for ever."""
    expired = threading.Event()

    def cut() -> None:
        expired.set()
        with suppress(OSError):  # it has just ended by itself
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if expired.is_set():
            raise TimeoutError(f"no whole reply within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise TimeoutError(f"no whole reply within {seconds:g} s")


def _reply(content: bytes) -> Reply:
    try:
        whole = json.loads(content)
        text = whole["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise EndpointError(f"the reply is no chat completion: {content[:120]!r}") from error
    if not isinstance(text, str):
        raise EndpointError("the reply has no text")
    used = whole.get("usage")
    prompt, completion = (_count(used, name) for name in ("prompt_tokens", "completion_tokens"))
    return Reply(text=text, prompt_tokens=prompt, completion_tokens=completion)


def _count(used: Any, name: str) -> int:
    value = used.get(name) if isinstance(used, dict) else None
    return value if isinstance(value, int) and value >= 0 else 0
