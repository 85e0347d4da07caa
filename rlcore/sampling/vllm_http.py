"""Requests to a vLLM server on a private network, by the standard library alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlcore.errors import ConfigError


class EngineUnreachableError(ConnectionError):
    """No answer: the server is gone, hangs, or broke off."""


def address_of(url: str) -> tuple[str, int]:
    """Host and port of ``http://host:port``.

    Raises:
        ConfigError: another scheme, or no port.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise ConfigError(f"the engine's address {url!r} is not http://host:port", where="engine.urls")
    return parts.hostname, parts.port


def call(address: tuple[str, int], path: str, payload: Mapping[str, Any] | None, *, seconds: float) -> tuple[int, Any]:
    """POST ``payload`` as JSON (None: GET); returns the HTTP status and the JSON of the answer, or its text.

    The connection is closed on the way out, upon which the server drops a request that still runs.

    Raises:
        EngineUnreachableError: no whole answer within ``seconds`` of silence.
    """
    connection = http.client.HTTPConnection(*address, timeout=seconds)
    try:
        if payload is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(payload), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        return response.status, _parsed(body)
    except (OSError, http.client.HTTPException) as error:
        raise EngineUnreachableError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", errors="replace")
