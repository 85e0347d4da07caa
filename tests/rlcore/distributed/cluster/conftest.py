"""A cluster that is none, and the micro model of the loop's tests."""

from __future__ import annotations

import pytest

from tests.rlcore.distributed.cluster.fake_ray import FakeRay
from tests.rlcore.loop.conftest import make_components, start

__all__ = ["make_components", "start"]  # fixtures


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return FakeRay().install(monkeypatch)
