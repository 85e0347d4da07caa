from __future__ import annotations

import pytest

from rlcore.tasks.run.stages import PipelineRun
from rlcore.tasks.store.settings import Home
from tests.tasks.run.toy_stages import calls, open_run


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    calls.clear()


@pytest.fixture
def run(tracked_home: Home) -> PipelineRun:
    return open_run(tracked_home)
