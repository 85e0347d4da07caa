"""An update reaches every server by one file."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from rlcore.errors import SamplingError
from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl, in_background
from rlcore.sampling.vllm.server_sync import WeightSync, publish
from rlcore.sampling.vllm.weights import Weights
from tests.rlcore.sampling.vllm.specs import make_spec
from tests.waiting import LONG

ADDRESS = Address("127.0.0.1", 1)


class Control(EngineControl):
    """Says yes; ``refuses`` names a route that it does not, ``dies`` one after which it does not answer at all."""

    def __init__(self) -> None:
        super().__init__(ADDRESS, log_tail=str)
        self.asked: list[tuple[str, Any]] = []
        self.refuses = self.dies = ""
        self.is_dead = False

    def ask(self, path: str, payload: Mapping[str, Any] | None, *, seconds: float = 0.0) -> Any:
        route = path.partition("?")[0]
        self.asked.append((route, payload))
        self.is_dead = self.is_dead or route == self.dies
        if route == self.refuses or self.is_dead:
            raise SamplingError(f"the engine refused {path}")
        return {"success": True, "results": [{"tensors": 20}]}


class Server:
    """Keeps what a fresh process would be given."""

    def __init__(self, model: Path) -> None:
        self.control: EngineControl = Control()
        self.served, self.policy_version = Weights(path=model), 0
        self.asleep: tuple[str, ...] = ()
        self.restarted_from: list[Path] = []

    def is_alive(self) -> bool:
        return not self.control.is_dead  # type: ignore[attr-defined]

    def start(self) -> None:
        self.control = Control()
        self.restarted_from.append(self.served.path)


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path) -> tuple[WeightSync, list[Server]]:
    """A sync of two servers."""
    servers = [Server(checkpoint), Server(checkpoint)]
    return WeightSync(servers, make_spec(checkpoint, tmp_path, dtype="bfloat16")), servers


def read(server: Server) -> list[str]:
    return [payload["args"][0] for route, payload in server.control.asked if route == "/collective_rpc"]  # type: ignore[attr-defined]


def test_all_servers_read_one_file_which_stays_until_the_next_update(
    made: tuple[WeightSync, list[Server]], model: PreTrainedModel, tmp_path: Path
) -> None:
    sync, servers = made
    for version in (1, 2, 3):
        sync.send(model.state_dict(), policy_version=version)
        (only,) = tmp_path.iterdir()
        assert [read(server)[-1] for server in servers] == [str(only)] * 2
        assert {server.policy_version for server in servers} == {version}
        assert {server.served.path for server in servers} == {only}
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_one_server_refuses_starts_all_of_them_again_with_the_weights_before(
    made: tuple[WeightSync, list[Server]], model: PreTrainedModel, tmp_path: Path
) -> None:
    sync, servers = made
    sync.send(model.state_dict(), policy_version=1)
    (before,) = tmp_path.iterdir()
    servers[1].control.refuses = "/collective_rpc"  # type: ignore[attr-defined]
    with pytest.raises(SamplingError, match="could not be sent to the engine"):
        sync.send(model.state_dict(), policy_version=2)
    assert [server.restarted_from for server in servers] == [[before], [before]]
    assert [server.policy_version for server in servers] == [1, 1]
    assert list(tmp_path.iterdir()) == [before]


def test_a_server_that_died_while_the_learner_was_at_work_is_started_first(
    made: tuple[WeightSync, list[Server]], model: PreTrainedModel, tmp_path: Path
) -> None:
    sync, servers = made
    sync.send(model.state_dict(), policy_version=1)
    (before,) = tmp_path.iterdir()
    servers[1].control.is_dead = True  # type: ignore[attr-defined]
    sync.send(model.state_dict(), policy_version=2)
    assert [server.restarted_from for server in servers] == [[], [before]]
    (only,) = tmp_path.iterdir()
    assert [read(server)[-1] for server in servers] == [str(only)] * 2
    assert [server.policy_version for server in servers] == [2, 2]


@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/resume"])
def test_a_server_that_dies_as_it_loads_costs_a_start_of_all_and_no_update(
    made: tuple[WeightSync, list[Server]], model: PreTrainedModel, tmp_path: Path, route: str
) -> None:
    sync, servers = made
    sync.send(model.state_dict(), policy_version=1)
    (before,) = tmp_path.iterdir()
    servers[1].control.dies = route  # type: ignore[attr-defined]
    sync.send(model.state_dict(), policy_version=2)
    assert [server.restarted_from for server in servers] == [[before], [before]]
    (only,) = tmp_path.iterdir()
    assert [read(server) for server in servers] == [[str(only)]] * 2
    assert [server.policy_version for server in servers] == [2, 2]


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(
    made: tuple[WeightSync, list[Server]], model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, servers = made
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(SamplingError, match="no space"):
        sync.send(model.state_dict(), policy_version=1)
    assert list(tmp_path.iterdir()) == []
    assert servers[0].control.asked == []  # type: ignore[attr-defined]


class WorkerServer(EngineControl):
    """A server of ``count`` workers; with ``answers`` it answers when that is set."""

    def __init__(self, count: int = 1, *, refuses: str = "", answers: threading.Event | None = None) -> None:
        super().__init__(ADDRESS, log_tail=str)
        self.count, self.refuses, self.answers = count, refuses, answers
        self.asked: list[tuple[str, Any]] = []

    def ask(self, path: str, payload: Mapping[str, Any] | None, *, seconds: float = 0.0) -> Any:
        self.asked.append((path, payload))
        if path == self.refuses:
            raise SamplingError(f"the engine refused {path}")
        if self.answers:
            self.answers.wait(LONG)
        return {"success": True, "results": [{"tensors": 20}] * self.count}


def test_a_server_that_refuses_is_an_error_at_once_though_the_others_still_wait_for_it(tmp_path: Path) -> None:
    answers = threading.Event()
    servers = [WorkerServer(answers=answers), WorkerServer(refuses="/collective_rpc")]
    with pytest.raises(SamplingError, match="refused /"):
        ControlGroup(servers).ask("/collective_rpc", {})
    answers.set()


def test_a_worker_counts_what_it_read(tmp_path: Path) -> None:
    server = WorkerServer(2)
    publish(ControlGroup([server]), Weights(path=tmp_path), 1, num_tensors=20)
    assert server.asked[1] == ("/collective_rpc", {"method": "receive_weights", "args": [str(tmp_path)]})
    with pytest.raises(SamplingError, match="tensors that were not sent"):
        publish(ControlGroup([server]), Weights(path=tmp_path), 2, num_tensors=21)


def test_what_fails_in_the_background_is_raised_where_it_is_asked_for() -> None:
    def fail() -> None:
        raise RuntimeError(threading.current_thread().name)

    with pytest.raises(RuntimeError, match="weights"):
        in_background(fail).result(LONG)
