"""Tests that are collected only in the environment of infra/install_peers.sh; what was found is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

_ARE_INSTALLED = all(find_spec(name) is not None for name in ("trl", "verl", "openrlhf"))
collect_ignore_glob = [] if _ARE_INSTALLED else ["test_*.py"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Behaviour of a peer with a suspected defect. ``reproduced``: the installed version still has it."""

    defect: str
    peer: str
    theirs: str
    ours: str
    reproduced: bool


Record = Callable[..., None]
_FINDINGS: list[Finding] = []


@pytest.fixture
def record() -> Record:
    """Note what a peer did. A peer that has mended a defect changes the table, and breaks no test."""

    def note(defect: str, peer: str, *, theirs: str, ours: str, reproduced: bool) -> None:
        name = f"{peer} {version(peer)}"
        _FINDINGS.append(Finding(defect=defect, peer=name, theirs=theirs, ours=ours, reproduced=reproduced))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of docs/peers.md, as measured by this run."""
    if _FINDINGS:
        terminalreporter.section("defects looked for in the peers")
        terminalreporter.line("| defect | peer | peer's value | rlcore's value | |")
        terminalreporter.line("|---|---|---|---|---|")
    for finding in _FINDINGS:
        verdict = "reproduced" if finding.reproduced else "not reproduced"
        cells = (finding.defect, finding.peer, finding.theirs, finding.ours, verdict)
        terminalreporter.line(f"| {' | '.join(cells)} |")
