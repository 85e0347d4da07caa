"""One update for several servers: what is written, what is sent, and what is left when something fails.

The servers here are stand-ins; tests/integration/test_vllm_replicas.py has vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlcore.config import EngineConfig, TransferKind
from rlcore.errors import SamplingError
from rlcore.sampling.vllm import server_sync as syncing
from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.server_sync import WeightSync
from rlcore.sampling.vllm.weights import Weights

ADDRESS = Address("127.0.0.1", 1)
Make = Callable[..., tuple[WeightSync, list["Server"]]]


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
        self.restarted_from.append(self.served.stored())


class Sent:
    """A way from GPU to GPU that only reads what it is given."""

    opened: ClassVar[list[tuple[EngineControl, ...]]]

    def __init__(self, group: ControlGroup) -> None:
        self.opened.append(group.members)

    def send(self, weights: Weights) -> None:
        assert len(dict(weights.tensors())) == 20
        assert weights.is_live_alone


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    def build(transfer: TransferKind, *, trainer_moves: bool = False) -> tuple[WeightSync, list[Server]]:
        spec = ServerSpec(
            model=checkpoint,
            weight_dir=tmp_path,
            config=EngineConfig(kind="vllm"),
            dtype="bfloat16",
            max_model_len=128,
            max_concurrent=1,
            transfer=transfer,
            trainer_moves=trainer_moves,
        )
        servers = [Server(checkpoint), Server(checkpoint)]
        return WeightSync(servers, spec), servers

    return build


@pytest.fixture
def direct(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[WeightSync, list[Server]]:
    monkeypatch.setattr(Sent, "opened", [], raising=False)
    monkeypatch.setattr(syncing, "open_transfer", lambda kind, group, *, num_tensors: Sent(group))
    return make("nccl")


def read(server: Server) -> list[str]:
    return [payload["args"][0] for route, payload in server.control.asked if route == "/collective_rpc"]  # type: ignore[attr-defined]


def test_all_servers_read_one_file_which_stays_until_the_next_update(
    make: Make, model: PreTrainedModel, tmp_path: Path
) -> None:
    sync, servers = make("file")
    for version in (1, 2, 3):
        sync.send(model.state_dict(), policy_version=version)
        (only,) = tmp_path.iterdir()
        assert [read(server)[-1] for server in servers] == [str(only)] * 2
        assert {server.policy_version for server in servers} == {version}
        assert {server.served.stored() for server in servers} == {only}
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_one_server_refuses_starts_all_of_them_again_with_the_weights_before(
    make: Make, model: PreTrainedModel, tmp_path: Path
) -> None:
    sync, servers = make("file")
    sync.send(model.state_dict(), policy_version=1)
    (before,) = tmp_path.iterdir()
    servers[1].control.refuses = "/collective_rpc"  # type: ignore[attr-defined]
    with pytest.raises(SamplingError, match="could not be sent to the engine"):
        sync.send(model.state_dict(), policy_version=2)
    assert [server.restarted_from for server in servers] == [[before], [before]]
    assert [server.policy_version for server in servers] == [1, 1]
    assert list(tmp_path.iterdir()) == [before]


def test_a_server_that_died_while_the_learner_was_at_work_is_started_first(
    make: Make, model: PreTrainedModel, tmp_path: Path
) -> None:
    sync, servers = make("file")
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
    make: Make, model: PreTrainedModel, tmp_path: Path, route: str
) -> None:
    sync, servers = make("file")
    sync.send(model.state_dict(), policy_version=1)
    (before,) = tmp_path.iterdir()
    servers[1].control.dies = route  # type: ignore[attr-defined]
    sync.send(model.state_dict(), policy_version=2)
    assert [server.restarted_from for server in servers] == [[before], [before]]
    (only,) = tmp_path.iterdir()
    assert [read(server) for server in servers] == [[str(only)]] * 2
    assert [server.policy_version for server in servers] == [2, 2]


def test_from_gpu_to_gpu_no_file_is_written_and_a_server_that_died_gets_one_of_the_trainers_weights(
    direct: tuple[WeightSync, list[Server]], model: PreTrainedModel, tmp_path: Path
) -> None:
    sync, servers = direct
    sync.send(model.state_dict(), policy_version=1)
    assert list(tmp_path.iterdir()) == []
    servers[0].start()
    (written,) = tmp_path.iterdir()
    name = "model.norm.weight"
    assert torch.equal(load_file(written)[name], model.state_dict()[name].bfloat16())
    sync.send(model.state_dict(), policy_version=2)
    assert list(tmp_path.iterdir()) == []


def test_one_group_is_formed_of_all_servers_and_again_when_one_of_them_is_another_process(
    direct: tuple[WeightSync, list[Server]], model: PreTrainedModel
) -> None:
    sync, servers = direct
    for version in (1, 2):
        sync.send(model.state_dict(), policy_version=version)
    first = tuple(server.control for server in servers)
    assert Sent.opened == [first]
    servers[1].start()
    sync.send(model.state_dict(), policy_version=3)
    assert Sent.opened == [first, (first[0], servers[1].control)]
    assert "/shutdown_weight_transfer_engine" in [route for route, _ in first[0].asked]  # type: ignore[attr-defined]


def test_weights_that_were_the_trainers_alone_are_gone_when_it_has_others(
    direct: tuple[WeightSync, list[Server]], model: PreTrainedModel
) -> None:
    sync, servers = direct
    sync.send(model.state_dict(), policy_version=1)
    servers[0].control.refuses = "/reset_prefix_cache"  # type: ignore[attr-defined]
    with pytest.raises(SamplingError, match="were not stored, and the trainer has newer ones"):
        sync.send(model.state_dict(), policy_version=2)


def test_a_copy_is_written_where_the_trainers_weights_move_while_the_engine_samples(
    make: Make, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Copied:
        def send(self, weights: Weights) -> None:
            assert weights.live is not None

    monkeypatch.setattr(syncing, "open_transfer", lambda kind, group, *, num_tensors: Copied())
    sync, servers = make("nccl", trainer_moves=True)
    sync.send(model.state_dict(), policy_version=1)
    (written,) = tmp_path.iterdir()
    assert servers[0].served.live is None
    assert servers[0].served.stored() == written


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(
    make: Make, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, servers = make("file")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(SamplingError, match="no space"):
        sync.send(model.state_dict(), policy_version=1)
    assert list(tmp_path.iterdir()) == []
    assert servers[0].control.asked == []  # type: ignore[attr-defined]
