"""Requests of a browser on this machine to our servers for a page that somebody else has written."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from tests.waiting import LONG

EVIL = "http://evil.example"
_PATHS = {  # of a question that reads the database, by what the server is
    "prefect": "/api/flow_runs/filter",
    "mlflow": "/api/2.0/mlflow/experiments/search",
}
# By server: the status of each request, and whether the answer lets the foreign page read it.
REFUSALS: Mapping[str, Mapping[str, tuple[int, bool]]] = {
    "prefect": {
        "a form": (401, False),
        "a script": (401, False),
        "a script that knows the password": (200, False),
        "its question first": (400, False),
        "its own name for this machine": (400, False),
        "its own name, with the password": (400, False),
        "a wrong password": (401, False),
        "the user": (200, False),
    },
    "mlflow": {
        "a form": (403, False),
        "a script": (403, False),
        "a script that knows the password": (403, False),
        "its question first": (400, False),
        "its own name for this machine": (403, False),
        "its own name, with the password": (403, False),
        "a wrong password": (401, False),
        "the user": (200, False),
    },
}


def refusals(port: int, let_in: Mapping[str, str]) -> dict[str, tuple[int, bool]]:
    """The status of each request by what sends it, and whether a foreign page may read the answer.

    ``let_in``: the header of a request that knows the password.
    """
    path = _PATHS["prefect" if _ask(port, "GET", "/api/health", {})[0] == 200 else "mlflow"]
    question = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    rebound, json = {"Host": f"evil.example:{port}"}, {"Content-Type": "application/json"}
    requests: dict[str, tuple[str, dict[str, str]]] = {
        "a form": ("POST", {"Origin": EVIL}),  # without a content type: no question is asked first
        "a script": ("POST", {"Origin": EVIL, "Content-Type": "text/plain"}),
        "a script that knows the password": ("POST", {"Origin": EVIL, **json, **let_in}),
        "its question first": ("OPTIONS", {"Origin": EVIL, **question}),
        "its own name for this machine": ("POST", {**rebound, **json}),
        "its own name, with the password": ("POST", {**rebound, **json, **let_in}),
        "a wrong password": ("POST", {**json, "Authorization": "Basic cmxjb3JlOndyb25n"}),
        "the user": ("POST", {**json, **let_in}),
    }
    return {name: _ask(port, method, path, headers) for name, (method, headers) in requests.items()}


def _ask(port: int, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bool]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    try:
        connection.request(method, path, b'{"max_results": 1}' if method == "POST" else None, dict(headers))
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.getheader("Access-Control-Allow-Origin") in ("*", EVIL)
    finally:
        connection.close()
