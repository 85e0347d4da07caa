"""The home of a run that nobody killed, which killed ones are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.chain import TOY
from tests.flows.conftest import ROOT, environment
from tests.flows.warm import run_warm


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed") / "home"
    done = run_warm([], environment(home), ROOT, call=TOY)
    assert done.returncode == 0, done.stderr
    return home
