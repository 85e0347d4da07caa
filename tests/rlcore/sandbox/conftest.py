"""One set of boxes for all tests; without bubblewrap they are skipped, and say why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from rlcore.errors import SandboxError
from rlcore.sandbox.pool import SandboxPool


@pytest.fixture(scope="session")
def sandbox() -> Iterator[SandboxPool]:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed and could not be (see `make sandbox`)")
    with SandboxPool(num_workers=2) as pool:
        try:
            pool.run("pass")
        except SandboxError as error:
            pytest.skip(f"this machine cannot isolate programs: {error}")
        yield pool
