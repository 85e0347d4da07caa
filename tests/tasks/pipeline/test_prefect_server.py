"""What a browser that shows a foreign page would send to the server's own application; nothing listens."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping

import httpx
import pytest
from prefect.settings import (
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    PREFECT_UI_ENABLED,
    temporary_settings,
)

from rlcore.tasks.pipeline.prefect_server import HOSTS, guarded
from rlcore.tasks.pipeline.server_access import prefect_variables

PORT, PASSWORD = 4200, "p" * 32
OWN, FOREIGN = f"http://127.0.0.1:{PORT}", "http://evil.example"
LET_IN = {"Authorization": f"Basic {base64.b64encode(f'rlcore:{PASSWORD}'.encode()).decode()}"}
NOTHING_LISTENS = 404  # the path after the checks: no database is asked


def answers(requests: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> dict[str, httpx.Response]:
    """What the guarded application answers to each request: method, path, headers."""
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


@pytest.fixture(scope="module")
def answered() -> dict[str, httpx.Response]:
    flows, missing = "/api/flow_runs/", "/api/no-such-path"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    return answers(
        {
            "a post without content type": ("POST", flows, {}),
            "a post of a foreign page": ("POST", flows, {"Origin": FOREIGN, "Content-Type": "text/plain"}),
            "a wrong password": ("POST", flows, {"Authorization": "Basic cmxjb3JlOng="}),
            "a foreign host": ("GET", "/api/health", {"Host": "evil.example"}),
            "a foreign host with the port": ("POST", flows, {"Host": f"evil.example:{PORT}", **LET_IN}),
            "the question of a foreign page": ("OPTIONS", flows, {"Origin": FOREIGN, **ask}),
            "the question of its own page": ("OPTIONS", flows, {"Origin": OWN, **ask}),
            "health": ("GET", "/api/health", {}),
            "with the password": ("GET", missing, LET_IN),
            "with the password by its other name": ("GET", missing, {"Host": f"localhost:{PORT}", **LET_IN}),
        }
    )


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("a post without content type", 401),
        ("a post of a foreign page", 401),
        ("a wrong password", 401),
        ("a foreign host", 400),
        ("a foreign host with the port", 400),
        ("the question of a foreign page", 400),
        ("the question of its own page", 200),
        ("health", 200),
        ("with the password", NOTHING_LISTENS),
        ("with the password by its other name", NOTHING_LISTENS),
    ],
)
def test_the_status_that_a_browser_sees(answered: dict[str, httpx.Response], request_: str, status: int) -> None:
    assert answered[request_].status_code == status


def test_no_foreign_page_may_read_an_answer(answered: dict[str, httpx.Response]) -> None:
    allowed = {name: each.headers.get("access-control-allow-origin") for name, each in answered.items()}
    assert {name: origin for name, origin in allowed.items() if origin} == {"the question of its own page": OWN}


def test_the_names_by_which_it_is_reached_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS, "prefect, other.example")
    asked = {name: ("GET", "/api/health", {"Host": f"{name}:4200"}) for name in ("prefect", "other.example", "x")}
    assert [each.status_code for each in answers(asked).values()] == [200, 200, 400]
