"""Client of a server with the OpenAI protocol: a connection pool, a timeout per attempt, and retries."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_RETRIED_STATUS = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
_REFUSED_STATUS = frozenset((400, 422))
_MAX_REPLY_BYTES = 1 << 20
_JITTER = secrets.SystemRandom()  # changes only waiting times, so it needs no seed
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _LONGEST_ASKED_SECONDS = 0.5, 30.0, 300.0
_LIMIT, _OLD_LIMIT = "max_completion_tokens", "max_tokens"
_OPTIONAL = ("temperature", "seed")


class EndpointError(Exception):
    """No usable reply from the server. The text has the reason, and never the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Text of the first choice, and the tokens that the server counted, 0 if unknown."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _TransientError(EndpointError):
    """Error that a retry may resolve. ``seconds`` is the wait that the server requested."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.seconds = seconds


class ChatEndpoint:
    """Client of ``base_url``, which ends with the version (``http://127.0.0.1:8000/v1``).

    ``timeout_seconds`` bounds each attempt. Proxies come from the environment (``HTTPS_PROXY``, ``NO_PROXY``).
    Redirects are not followed, so the key goes only to this server. The key is removed from replies. Thread-safe.
    """

    def __init__(self, *, base_url: str, key: str, timeout_seconds: float, retries: int) -> None:
        self._url, self._key = f"{base_url.rstrip('/')}/chat/completions", key
        self._seconds, self._retries = timeout_seconds, retries
        self._lock, self._limit = threading.Lock(), _LIMIT
        self._refused: frozenset[str] = frozenset()
        self._kept: tuple[httpx.AsyncClient, asyncio.AbstractEventLoop] | None = None

    def complete(self, body: Mapping[str, Any]) -> Reply:
        """Return the server's reply. A server without ``max_completion_tokens`` is sent ``max_tokens``.

        A server that rejects ``temperature`` or ``seed`` (reasoning models) is asked without them.

        Raises:
            EndpointError: The request was refused, too slow, or got no chat completion, after all retries.
        """
        for attempt in range(self._retries + 1):
            try:
                return self._try(body)
            except _TransientError as error:
                if attempt == self._retries:
                    tries = f"{attempt + 1} tries: " if attempt else ""
                    raise EndpointError(f"{tries}{error}") from error
                # Half of the wait is random, so that requests that failed together do not retry together.
                wait = min(_FIRST_WAIT_SECONDS * 2**attempt, _LONGEST_WAIT_SECONDS) * _JITTER.uniform(0.5, 1.0)
                time.sleep(wait + min(error.seconds, _LONGEST_ASKED_SECONDS))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        with self._lock:
            if self._kept is not None:
                self._end()
                self._kept = None

    def _try(self, body: Mapping[str, Any]) -> Reply:
        sent = {self._limit if name == _LIMIT else name: value for name, value in body.items()}
        sent = {name: value for name, value in sent.items() if name not in self._refused}
        try:
            status, headers, content = self._post(json.dumps(sent).encode())
        except TimeoutError:
            raise _TransientError(
                f"the endpoint is unreachable: no complete reply within {self._seconds:g} s"
            ) from None
        except (OSError, httpx.HTTPError) as error:
            text = self._redact(f"{_name(error)}: {error}")  # may quote the server
            raise _TransientError(f"the endpoint is unreachable: {text}") from None
        if status in _RETRIED_STATUS:
            raise _TransientError(f"the endpoint answered with status {status}", _retry_after(headers))
        if status in _REFUSED_STATUS and _LIMIT in sent and _LIMIT.encode() in content:
            self._limit = _OLD_LIMIT
            return self._try(body)
        unknown = next((name for name in _OPTIONAL if name in sent and name.encode() in content), "")
        if status in _REFUSED_STATUS and unknown:
            self._refused = self._refused | {unknown}
            return self._try(body)
        if status != 200:
            raise EndpointError(f"the endpoint refused with status {status}: {content[:200]!r}")
        return _reply(content)

    def _post(self, body: bytes) -> tuple[int, httpx.Headers, bytes]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        client, loop = self._client()
        request = asyncio.wait_for(_answer(client, self._url, body, headers), self._seconds)
        status, received, content = asyncio.run_coroutine_threadsafe(request, loop).result()
        return status, received, self._redact(content.decode("utf-8", "replace")).encode()

    def _client(self) -> tuple[httpx.AsyncClient, asyncio.AbstractEventLoop]:
        """Return the client and its event loop, in which a timeout bounds a whole request."""
        with self._lock:
            if self._kept is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="judge", daemon=True)
                thread.start()
                # The number of connections is not limited here, because the caller bounds concurrent requests.
                client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_keepalive_connections=64))
                client.headers.clear()  # no compressed replies, which could exceed the size limit when unpacked
                self._kept = client, loop
                self._end = weakref.finalize(self, _end, client, loop, thread)
            return self._kept

    def _redact(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


async def _answer(
    client: httpx.AsyncClient, url: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, httpx.Headers, bytes]:
    async with client.stream("POST", url, content=body, headers=headers) as response:
        parts, size = [], 0
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > _MAX_REPLY_BYTES:
                raise EndpointError("the reply is larger than 1 MiB")
        return response.status_code, response.headers, b"".join(parts)


def _end(client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(client.aclose(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _name(error: BaseException) -> str:
    name, cause = type(error).__name__, error.__cause__ or error.__context__
    while cause is not None:
        name = type(cause).__name__ if isinstance(cause, OSError) else name
        cause = cause.__cause__ or cause.__context__
    return name


def _retry_after(headers: httpx.Headers) -> float:
    received = headers.get("retry-after", "").strip()
    return float(received) if re.fullmatch(r"[0-9]{1,8}(?:\.[0-9]{1,6})?", received) else 0.0


def _reply(content: bytes) -> Reply:
    try:
        whole = json.loads(content)
        text = whole["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise EndpointError(f"the reply is not a chat completion: {content[:120]!r}") from error
    if not isinstance(text, str):
        raise EndpointError("the reply has no text")
    used = whole.get("usage")
    prompt, completion = (_count(used, name) for name in ("prompt_tokens", "completion_tokens"))
    return Reply(text=text, prompt_tokens=prompt, completion_tokens=completion)


def _count(used: Any, name: str) -> int:
    value = used.get(name) if isinstance(used, dict) else None
    return value if isinstance(value, int) and value >= 0 else 0
