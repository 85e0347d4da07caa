"""One set of boxes for all tests; without bubblewrap they are skipped, and say why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.base import DEFAULT_LIMITS
from rlcore.sandbox.pool import SandboxPool
from tests.waiting import LONG


@cache
def missing_isolation() -> str:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed and could not be (see `infra/install_programs.sh`)"
    try:
        with SandboxPool(num_workers=1) as pool:
            pool.run("pass")
    except SandboxError as error:
        return f"this machine cannot isolate programs: {error}"
    return ""


def require_bubblewrap() -> None:
    if missing_isolation():
        pytest.skip(missing_isolation())


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    """By default, programs have processor time as elsewhere, and any time that a busy machine makes of it."""
    before = DEFAULT_LIMITS.wall_seconds
    object.__setattr__(DEFAULT_LIMITS, "wall_seconds", LONG)
    yield
    object.__setattr__(DEFAULT_LIMITS, "wall_seconds", before)


@pytest.fixture(scope="session")
def sandbox() -> Iterator[SandboxPool]:
    require_bubblewrap()
    with SandboxPool(num_workers=2) as pool:
        yield pool
