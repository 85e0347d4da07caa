from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping

import httpx
import pytest
from prefect.settings import (
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    PREFECT_UI_ENABLED,
    temporary_settings,
)

from rlcore.tasks.operations.prefect_server import HOSTS, guarded
from rlcore.tasks.operations.server_access import prefect_variables

PORT, PASSWORD = 4200, "p" * 32
OWN, FOREIGN = f"http://127.0.0.1:{PORT}", "http://evil.example"
LET_IN = {"Authorization": f"Basic {base64.b64encode(f'rlcore:{PASSWORD}'.encode()).decode()}"}
NOTHING_LISTENS = 404  # the path after the checks: no database is asked


def answers(requests: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> dict[str, httpx.Response]:
    """Return the guarded application's answer to each request: method, path, headers."""
    told = prefect_variables(PORT, PASSWORD)
    settings = {
        PREFECT_SERVER_API_AUTH_STRING: told["PREFECT_SERVER_API_AUTH_STRING"],
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS: told["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"],
        PREFECT_UI_ENABLED: False,
    }

    async def ask() -> dict[str, httpx.Response]:
        with temporary_settings(settings):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded()), base_url=OWN) as client:
                return {
                    name: await client.request(method, path, headers=dict(headers), content=b"{}")
                    for name, (method, path, headers) in requests.items()
                }

    return asyncio.run(ask())


FLOWS, MISSING = "/api/flow_runs/", "/api/no-such-path"
QUESTION = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
REQUESTS: dict[str, tuple[int, tuple[str, str, Mapping[str, str]]]] = {
    "a post without content type": (401, ("POST", FLOWS, {})),
    "a post of a foreign page": (401, ("POST", FLOWS, {"Origin": FOREIGN, "Content-Type": "text/plain"})),
    "a wrong password": (401, ("POST", FLOWS, {"Authorization": "Basic cmxjb3JlOng="})),
    "a foreign host": (400, ("GET", "/api/health", {"Host": "evil.example"})),
    "a foreign host with the port": (400, ("POST", FLOWS, {"Host": f"evil.example:{PORT}", **LET_IN})),
    "the question of a foreign page": (400, ("OPTIONS", FLOWS, {"Origin": FOREIGN, **QUESTION})),
    "the question of its own page": (200, ("OPTIONS", FLOWS, {"Origin": OWN, **QUESTION})),
    "health": (200, ("GET", "/api/health", {})),
    "with the password": (NOTHING_LISTENS, ("GET", MISSING, LET_IN)),
    "by its other name": (NOTHING_LISTENS, ("GET", MISSING, {"Host": f"localhost:{PORT}", **LET_IN})),
}


def test_a_browser_sees_the_status_and_no_foreign_page_may_read_an_answer(
    record_property: Callable[[str, object], None],
) -> None:
    hostile = sum(status in (400, 401) for status, _ in REQUESTS.values())
    record_property("hostile", hostile)
    record_property("sound", len(REQUESTS) - hostile)
    found = answers({name: request for name, (_, request) in REQUESTS.items()})
    assert {name: each.status_code for name, each in found.items()} == {
        name: status for name, (status, _) in REQUESTS.items()
    }
    allowed = {name: each.headers.get("access-control-allow-origin") for name, each in found.items()}
    assert {name: origin for name, origin in allowed.items() if origin} == {"the question of its own page": OWN}


def test_the_names_by_which_it_is_reached_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS, "prefect, other.example")
    asked = {name: ("GET", "/api/health", {"Host": f"{name}:4200"}) for name in ("prefect", "other.example", "x")}
    assert [each.status_code for each in answers(asked).values()] == [200, 200, 400]
