"""An update reaches every server, by a file, by memory or from GPU to GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlcore.config import EngineConfig, TransferKind
from rlcore.errors import ConfigError, SamplingError
from rlcore.sampling.vllm import gpu_assignment
from rlcore.sampling.vllm import server_sync as syncing
from rlcore.sampling.vllm import transfer as transfers
from rlcore.sampling.vllm import weights as weight_files
from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl, in_background
from rlcore.sampling.vllm.gpu_assignment import choose_transfer
from rlcore.sampling.vllm.process import ServerSpec, command, environment
from rlcore.sampling.vllm.server_sync import WeightSync
from rlcore.sampling.vllm.transfer import ControlClient, WeightSource, open_transfer, rendezvous_host
from rlcore.sampling.vllm.weights import Converted, Weights, checkpoint_shapes, stored_tensors, write_weights
from rlcore.sampling.vllm.worker.gloo import broadcast, join_group, join_store, own_address
from tests.rlcore.sampling.servers import server_spec
from tests.waiting import LONG

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


Opened = list[tuple[EngineControl, ...]]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    def build(transfer: TransferKind, *, trainer_moves: bool = False) -> tuple[WeightSync, list[Server]]:
        settings = {"dtype": "bfloat16", "transfer": transfer, "trainer_moves": trainer_moves}
        spec = server_spec(checkpoint, tmp_path, **settings)
        servers = [Server(checkpoint), Server(checkpoint)]
        return WeightSync(servers, spec), servers

    return build


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The groups that a transport from GPU to GPU was opened to, which only reads what it is given."""
    groups: Opened = []

    def send(weights: Weights) -> None:
        assert len(dict(weights.tensors())) == 20
        assert weights.is_live_alone != weights.path.exists()

    def open_transfer(kind: str, group: ControlGroup, *, num_tensors: int) -> Callable[[Weights], None]:
        groups.append(group.members)
        return send

    monkeypatch.setattr(syncing, "open_transfer", open_transfer)
    return groups


@pytest.fixture
def direct(make: Make, opened: Opened) -> tuple[WeightSync, list[Server]]:
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
    direct: tuple[WeightSync, list[Server]], model: PreTrainedModel, opened: Opened
) -> None:
    sync, servers = direct
    for version in (1, 2):
        sync.send(model.state_dict(), policy_version=version)
    first = tuple(server.control for server in servers)
    assert opened == [first]
    servers[1].start()
    sync.send(model.state_dict(), policy_version=3)
    assert opened == [first, (first[0], servers[1].control)]
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
    make: Make, model: PreTrainedModel, opened: Opened, tmp_path: Path
) -> None:
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


CPU, GPU = torch.device("cpu"), torch.device("cuda")

LOOPBACK = Address("127.0.0.1", 1)


class WorkerServer(EngineControl):
    """A server of ``count`` workers that answer as vLLM's do; ``received`` is what each of them was sent."""

    def __init__(self, count: int = 1) -> None:
        super().__init__(LOOPBACK, log_tail=str)
        self.count = count
        self.asked: list[tuple[str, Any]] = []
        self.received: list[dict[str, torch.Tensor]] = []
        self.groups: list[Any] = []
        self.refuses = ""

    def ask(self, path: str, payload: Mapping[str, Any] | None, *, seconds: float = 0.0) -> Any:
        self.asked.append((path, payload))
        if path == self.refuses:
            raise SamplingError(f"the engine refused {path}")
        if path == "/get_world_size":
            assert payload is None  # a GET
            return {"world_size": self.count}
        if payload and "port" in payload.get("init_info", {}):
            self.groups = each(self.count, lambda number: self._join(number, payload["init_info"]))
        if payload and "names" in payload.get("update_info", {}):
            self.received = each(self.count, lambda number: self._receive(number, payload["update_info"]))
        return {"results": [{"tensors": 20}] * self.count}

    def _join(self, number: int, told: Mapping[str, Any]) -> Any:
        store = join_store(told["host"], told["port"], told["size"])
        return join_group(store, told["first_rank"] + number, told["size"], host=told["host"])

    def _receive(self, number: int, told: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        found = {}
        for name, dtype, shape in zip(told["names"], told["dtypes"], told["shapes"], strict=True):
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.groups[number], found[name])
        return found


def each(count: int, work: Callable[[int], Any]) -> list[Any]:
    waiting = [in_background(lambda number=number: work(number)) for number in range(count)]  # type: ignore[misc]
    return [future.result(LONG) for future in waiting]


@pytest.fixture
def path(checkpoint: Path, tmp_path: Path) -> Path:
    stored = dict(stored_tensors(checkpoint))
    write_weights(
        Converted(stored, shapes=checkpoint_shapes(checkpoint), dtype=torch.bfloat16), tmp_path / "w.safetensors"
    )
    return tmp_path / "w.safetensors"


def test_gloo_brings_every_tensor_to_every_worker_of_every_server_time_after_time(path: Path) -> None:
    servers = [WorkerServer(2), WorkerServer(1)]
    transfer = open_transfer("gloo", ControlGroup(servers), num_tensors=20)
    expected = dict(stored_tensors(path))
    for _ in range(2):
        transfer(Weights(path=path))
        assert [len(server.received) for server in servers] == [2, 1]
        for received in (*servers[0].received, *servers[1].received):
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
            assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16}
    routes = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    for server in servers:
        assert [asked for asked, _ in server.asked] == [
            "/get_world_size",
            "/init_weight_transfer_engine",
            *routes,
            *routes,
        ]


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_server_that_refuses_is_an_error_at_once_though_the_sender_and_the_others_still_wait_for_it(
    route: str, path: Path
) -> None:
    servers = [WorkerServer(), WorkerServer()]
    servers[1].refuses = route
    with pytest.raises(SamplingError, match="refused /"):
        open_transfer("gloo", ControlGroup(servers), num_tensors=20)(Weights(path=path))
    assert "/finish_weight_update" not in dict(servers[0].asked)


@pytest.mark.parametrize("kind", ["file", "shared_memory"])
def test_a_file_asks_nothing_of_the_servers_but_our_worker_which_counts_what_it_read(
    kind: TransferKind, path: Path
) -> None:
    servers = [WorkerServer(2), WorkerServer()]
    open_transfer(kind, ControlGroup(servers), num_tensors=20)(Weights(path=path))
    for server in servers:
        assert server.asked == [("/collective_rpc", {"method": "receive_weights", "args": [str(path)]})]
    with pytest.raises(SamplingError, match="tensors that were not sent"):
        open_transfer(kind, ControlGroup(servers), num_tensors=21)(Weights(path=path))


def test_servers_that_no_one_address_of_this_machine_reaches_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "own_address", lambda peer: f"10.0.0.{peer[1]}")
    group = ControlGroup([EngineControl(("a", number), log_tail=str) for number in (1, 2)])
    with pytest.raises(SamplingError, match=r"different interfaces: 10\.0\.0\.1, 10\.0\.0\.2"):
        rendezvous_host(group)


def choose(
    device: torch.device, *, shares: Sequence[bool] = (False,), can_send: bool = False, **settings: Any
) -> TransferKind:
    config = EngineConfig(kind="vllm", **settings)
    return choose_transfer(config, device, num_bytes=1, shares=shares, can_send=can_send)


@pytest.mark.parametrize(
    ("settings", "fits", "expected"),
    [
        ({}, True, "shared_memory"),
        ({}, False, "file"),
        ({"weight_dir": "/data"}, True, "file"),  # a folder was named
        ({"urls": ("http://a:1",)}, True, "file"),  # who knows how it was started
        ({"urls": ("http://a:1",), "weight_transfer": "gloo"}, True, "gloo"),
        ({"weight_transfer": "gloo"}, False, "gloo"),
        ({"weight_transfer": "shared_memory"}, True, "shared_memory"),
    ],
)
def test_auto_is_memory_for_a_server_of_ours_and_a_file_else(
    settings: dict[str, Any], fits: bool, expected: TransferKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_assignment, "fits_in_memory", lambda num_bytes: fits)
    for device in (CPU, GPU):
        assert choose(device, **settings) == expected
    assert choose(CPU, can_send=True, **settings) == expected


def test_auto_is_nccl_between_gpus_where_vllm_is_on_both_sides() -> None:
    assert choose(GPU, can_send=True) == "nccl"
    assert choose(GPU, can_send=True, shares=(False, True)) != "nccl"  # one GPU has two processes
    assert choose(GPU, can_send=True, urls=("http://a:1",), shares=()) == "file"


def test_from_gpu_to_gpu_is_refused_at_once_where_it_cannot_be() -> None:
    for name in ("nccl", "ipc"):
        with pytest.raises(ConfigError, match=f"{name} sends weights from GPU to GPU, but this run trains on cpu"):
            choose(CPU, can_send=True, weight_transfer=name)
        with pytest.raises(ConfigError, match=f"{name} needs vLLM in the trainer's environment too"):
            choose(GPU, weight_transfer=name)
    with pytest.raises(ConfigError, match="nccl cannot join two processes on one GPU, but replica 1 uses"):
        choose(GPU, can_send=True, weight_transfer="nccl", shares=(False, True))
    with pytest.raises(ConfigError, match="ipc shares memory of one GPU, but replica 0 does not use"):
        choose(GPU, can_send=True, weight_transfer="ipc", shares=(False, True))
    assert choose(GPU, can_send=True, weight_transfer="nccl", shares=(False, False)) == "nccl"
    assert choose(GPU, can_send=True, weight_transfer="ipc", shares=(True,)) == "ipc"


def test_memory_that_is_short_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = EngineConfig(kind="vllm", weight_transfer="shared_memory")
    with pytest.raises(ConfigError, match="has no room for three times"):
        choose_transfer(short, CPU, num_bytes=2**60, shares=(False,), can_send=False)
    monkeypatch.setattr(weight_files, "_MEMORY", tmp_path / "none")
    assert choose(CPU) == "file"
    with pytest.raises(ConfigError, match="needs no folder"):
        EngineConfig(weight_transfer="shared_memory", weight_dir="/data")


def test_the_server_is_started_for_the_way_that_was_chosen(tmp_path: Path) -> None:
    def spec(transfer: str) -> ServerSpec:
        return server_spec(tmp_path, tmp_path, transfer=transfer)

    for transfer in ("file", "shared_memory"):
        assert "--weight-transfer-config" not in command(spec(transfer), "python", LOOPBACK)
    for transfer in ("gloo", "ipc"):
        line = command(spec(transfer), "python", LOOPBACK)
        assert line[line.index("--weight-transfer-config") + 1] == f'{{"backend": "{transfer}"}}'
    allows = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    assert [allows in environment(spec(name), tmp_path) for name in ("gloo", "nccl", "ipc")] == [False, False, True]


def test_vllms_senders_see_the_live_weights_in_the_engines_precision_and_after_a_death_those_of_the_file(
    checkpoint: Path, path: Path
) -> None:
    shapes = checkpoint_shapes(checkpoint)
    stored = dict(stored_tensors(checkpoint))
    live = Converted({**stored, "lm_head.weight": torch.zeros(1)}, shapes=shapes, dtype=torch.bfloat16)
    source = WeightSource(CPU)
    for weights in (Weights(path=path / "none", live=live), Weights(path=path)):
        source.weights = weights
        assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
            (name, torch.bfloat16, shape) for name, shape in shapes.items()
        ]
        assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in source)


def test_vllms_senders_reach_every_server_by_its_four_routes_and_no_two_workers_have_one_rank() -> None:
    servers = [WorkerServer(2), WorkerServer(1)]
    client = ControlClient(ControlGroup(servers), [2, 1])
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 4})
    client.start_weight_update()
    client.finish_weight_update("7")
    for server, first in zip(servers, (1, 3), strict=True):
        assert server.asked == [
            ("/init_weight_transfer_engine", {"init_info": {"rank_offset": first, "world_size": 4}}),
            ("/start_weight_update", {}),
            ("/finish_weight_update", {}),
        ]
    ipc = WorkerServer()
    ControlClient(ControlGroup([ipc]), [1]).init_weight_transfer_engine({"packed": True})
    assert ipc.asked == [("/init_weight_transfer_engine", {"init_info": {"packed": True}})]


def test_the_store_is_open_on_the_way_to_the_server_alone() -> None:
    assert own_address(LOOPBACK[:2]) == "127.0.0.1"
