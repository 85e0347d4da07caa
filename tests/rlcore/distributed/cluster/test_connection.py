from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rlcore.distributed.cluster.ray_cluster import connected
from tests.rlcore.distributed.cluster.fake_ray import FakeRay
from tests.rlcore.distributed.cluster.placed import placement


@pytest.fixture
def joining(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Ray, which puts a handler of its own in place when it is joined."""
    plain, before = ray.init, signal.getsignal(signal.SIGTERM)

    def leave(*_: object) -> None:
        raise SystemExit(1)

    def init(**settings: object) -> None:
        signal.signal(signal.SIGTERM, leave)
        plain(**settings)

    monkeypatch.setattr(ray, "init", init)
    yield ray
    signal.signal(signal.SIGTERM, before)


def test_a_run_that_ends_itself_at_sigterm_still_does(joining: FakeRay) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    with connected(joining, placement(), [{"CPU": 1.0}]):
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]


def test_where_nothing_is_set_ray_ends_its_processes(joining: FakeRay) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with connected(joining, placement(), [{"CPU": 1.0}]), pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
