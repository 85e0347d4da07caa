from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.services import provision
from infra.services.deployments import all_deployments, write_deployments
from infra.services.layout import Layout, find_layout

ALL = len(all_deployments())


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = find_layout(tmp_path)
    made.root.mkdir()
    provision.stamp_path(made).write_text(provision._digest())
    write_deployments(provision._file(made))
    return made


def server(*, lost: int = 0, limit: int | None = 1) -> Callable[..., Any]:
    """A server that has all that it is asked for, but for ``lost`` of each kind."""

    def ask(_: Layout, __: str, path: str, question: Any = None) -> Any:
        if question is None:
            return {"concurrency_limit": limit}
        ((kind, wanted),) = question.items()
        assert path == f"api/{kind}/count"
        return max(0, len(wanted["name"]["any_"]) - lost)

    return ask


@pytest.mark.parametrize(
    ("answers", "lacking"),
    [
        (server(), []),
        (server(lost=1), [f"{ALL - 1} of {ALL} deployments", "2 of 3 automations"]),
        (server(lost=99), [f"0 of {ALL} deployments", "0 of 3 automations"]),
        (server(limit=None), ["no limit of the queue gpu"]),
        (server(limit=4), []),  # a person has raised it
        (lambda *_: None, [f"0 of {ALL} deployments", "0 of 3 automations", "no limit of the queue gpu"]),
    ],
)
def test_what_the_server_lacks_is_named_and_it_counts_as_not_told(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, answers: Callable[..., Any], lacking: list[str]
) -> None:
    monkeypatch.setattr(provision, "ask", answers)
    assert provision.missing(layout) == lacking
    assert provision.is_configured(layout) == (not lacking)
