from __future__ import annotations

import re
import typing
from functools import partial
from typing import Any

import pytest

from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import EpisodeConfig
from rlcore.environments.table import TOOLS
from tests.architecture.source_files import ROOT

ROW = re.compile(r"^\| .+ \| `(.+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = {name: cells for name, *cells in ROW.findall((ROOT / "docs/algorithms.md").read_text(encoding="utf-8"))}


def bound(function: Any) -> tuple[str, list[float]]:
    """The name of a function, and the constants that are bound to it."""
    if not isinstance(function, partial):
        return function.__name__, []
    return function.func.__name__, list(function.keywords.values())


def written(cell: str) -> tuple[str, list[float]]:
    """The same as the page has it: ``ppo_clip(.2, .28)``. Of a length the page says where a run takes it from."""
    name, _, constants = cell.rstrip(")").replace("max_new_tokens", "1024").partition("(")
    return name, [float(constant) for constant in constants.split(", ") if constant]


def test_the_page_has_every_algorithm() -> None:
    assert set(ROWS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_says_of_an_algorithm_what_its_row_says(name: str) -> None:
    row, (_, ratio, surrogate, weighting) = ALGORITHMS[name], ROWS[name]
    assert written(f"{ratio}_ratio") == bound(row.ratio)
    assert written(surrogate) == bound(row.surrogate)
    assert written(weighting) == bound(row.weighting)


def test_every_tool_can_be_named_in_a_preset_and_has_its_code_counted() -> None:
    (named,) = (each for each in typing.get_args(typing.get_type_hints(EpisodeConfig)["tools"]) if each is not ...)
    assert set(typing.get_args(named)) == set(TOOLS)
