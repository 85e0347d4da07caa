"""The worker in the server: who may ask it, what it receives, and the checksums of what it holds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlcore.config import LoraConfig
from rlcore.models.lora import MergedState, add_lora
from rlcore.sampling.vllm.client import Address
from rlcore.sampling.vllm.process import ServerProcess, command
from rlcore.sampling.vllm.weights import adapter_checksums, differing_parts
from rlcore.sampling.vllm.worker.checksums import (
    NUM_COLUMNS,
    bit_checksum,
    columns,
    engine_checksums,
    part_of,
    state_checksums,
)
from rlcore.sampling.vllm.worker.gate import TOKEN, Gate
from tests import strategies
from tests.rlcore.sampling.servers import server_spec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

GOLDEN = 3932143167874224356


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_layout_and_padding_do_not_count(dtype: torch.dtype) -> None:
    values = torch.randn(7, 13, dtype=torch.float64).to(dtype)
    whole = bit_checksum(values)
    assert bit_checksum(values.T) == whole
    assert bit_checksum(values.flatten()[torch.randperm(91)]) == whole
    assert bit_checksum(torch.cat([values, torch.zeros(3, 13, dtype=dtype)])) == whole
    assert (bit_checksum(values[:3]) + bit_checksum(values[3:])) % 2**63 == whole


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 10_000), place=st.integers(0, 90), other=st.integers(0, 90))
def test_one_last_bit_is_seen_and_two_that_cancel_are_too(
    dtype: torch.dtype, seed: int, place: int, other: int
) -> None:
    values = torch.randn(91, generator=torch.Generator().manual_seed(seed)).to(dtype)
    word = torch.int32 if dtype == torch.float32 else torch.int16
    bits = values.clone().view(word)
    bits[place] += 1
    assert bit_checksum(bits.view(dtype)) != bit_checksum(values)
    bits[other] -= 1
    # The same numbers in another order have the same sum: where one number was the other's next, they changed places.
    is_permuted = torch.equal(bits.sort().values, values.view(bits.dtype).sort().values)
    assert (bit_checksum(bits.view(dtype)) == bit_checksum(values)) == is_permuted


def test_zeros_of_either_sign_are_nothing() -> None:
    assert bit_checksum(torch.tensor([0.0, -0.0])) == 0
    assert bit_checksum(torch.tensor([])) == 0


def test_the_sum_of_one_is_the_same_wherever_it_is_computed() -> None:
    """Engine and trainer are two programs: a golden value."""
    assert bit_checksum(torch.tensor([1.0])) == bit_checksum(torch.tensor([0.0, 1.0])) == GOLDEN


def test_names_of_the_engine_and_the_checkpoint_are_of_one_part() -> None:
    for names in (
        ("model.layers.12.self_attn.q_proj.weight", "model.layers.12.self_attn.qkv_proj.base_layer.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
    ):
        assert len({part_of(name) for name in names}) == 1
    assert part_of("model.layers.3.input_layernorm.weight", 1) == "vectors of layer 3"
    assert part_of("model.norm.weight", 1) == "vectors of rest"
    assert part_of("transformer.wte.weight") == "embedding"


class Packed(nn.Module):
    """A linear layer as vLLM leaves it on a CPU: the matrix is gone, a packed copy multiplies."""

    def __init__(self, weight: torch.Tensor, *, keep: bool = False) -> None:
        super().__init__()
        packed = weight.detach().clone().T.contiguous()
        self.input_size_per_partition = weight.shape[1]
        self.weight = nn.Parameter(weight if keep else weight.new_empty(0), requires_grad=False)
        self.cpu_linear = lambda x, weight, bias: x @ packed


class Vector(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def engine_of(state: dict[str, torch.Tensor], *, head: torch.Tensor | None = None, packed: bool = True) -> nn.Module:
    """Return vLLM's form of a tiny Llama: fused query, key and value, fused gate and up, a padded vocabulary."""
    root = nn.Module()
    make = Packed if packed else Vector
    for number in range(2):
        layer, prefix = nn.Module(), f"model.layers.{number}."
        attention = [state[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        layer.qkv_proj = make(torch.cat(attention))
        layer.o_proj = make(state[f"{prefix}self_attn.o_proj.weight"])
        layer.gate_up_proj = make(torch.cat([state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]))
        layer.down_proj = make(state[f"{prefix}mlp.down_proj.weight"])
        layer.input_layernorm = Vector(state[f"{prefix}input_layernorm.weight"])
        layer.post_attention_layernorm = Vector(state[f"{prefix}post_attention_layernorm.weight"])
        root.add_module(f"model.layers.{number}".replace(".", "/"), layer)
    table = state["model.embed_tokens.weight"]
    padded = torch.cat([table, table.new_zeros(3, table.shape[1])])
    root.embed_tokens = Vector(padded)
    root.lm_head = Packed(padded if head is None else head, keep=True) if packed else Vector(padded)
    root.norm = Vector(state["model.norm.weight"])
    return Renamed(root)


class Renamed(nn.Module):
    """Names of modules with dots, as a nested model has them."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root

    def named_modules(self, *_: Any, **__: Any) -> Any:
        return [(name.replace("/", "."), module) for name, module in self.root.named_modules()]


def answers(model: nn.Module, dtype: torch.dtype, seed: int = 3) -> list[dict[str, Any]]:
    return [engine_checksums(model, dtype=dtype, seed=seed)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_packed_and_padded_engine_holds_the_learners_weights(dtype: torch.dtype, packed: bool) -> None:
    state = strategies.tiny_llama().state_dict()
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}
    found = answers(engine_of(cast, packed=packed), dtype)
    assert found[0]["by_columns"] == packed
    assert differing_parts(found, state, is_adapter=False, dtype=dtype, seed=3) == []


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"])
def test_one_matrix_of_before_is_found_in_its_layer(name: str, packed: bool) -> None:
    old = dict(strategies.tiny_llama().state_dict())
    new = {key: tensor + 1e-6 if key == name else tensor for key, tensor in old.items()}
    found = answers(engine_of(old, packed=packed), torch.float32)
    assert differing_parts(found, new, is_adapter=False, dtype=torch.float32, seed=3) == ["layer 1"]


def test_a_packed_head_of_before_is_found_though_the_embedding_is_new() -> None:
    old = strategies.tiny_llama().state_dict()
    new = {name: tensor + 1e-6 if "embed" in name or "head" in name else tensor for name, tensor in old.items()}
    found = answers(engine_of(new, head=old["lm_head.weight"]), torch.float32)
    assert differing_parts(found, new, is_adapter=False, dtype=torch.float32, seed=3) == ["head"]


def test_workers_that_share_a_matrix_out_hold_it_together() -> None:
    state = strategies.tiny_llama().state_dict()
    parts = {name: value for name, value in state.items() if value.ndim == 2}
    both = [
        {"sums": state_checksums(half.items(), dtype=torch.float32, seed=0, by_columns=False), "by_columns": False}
        for half in ({n: v[:4] for n, v in parts.items()}, {n: v[4:] for n, v in parts.items()})
    ]
    assert differing_parts(both, parts, is_adapter=False, dtype=torch.float32, seed=0) == []


def test_columns_are_the_seeds_and_never_more_than_there_are() -> None:
    assert columns(1000, 3).tolist() == columns(1000, 3).tolist() != columns(1000, 4).tolist()
    assert len(columns(1000, 3)) == NUM_COLUMNS
    assert sorted(columns(5, 0).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_is_compared_as_vllm_keeps_it(dtype: torch.dtype) -> None:
    """A in the engine's precision, B times alpha / rank = 4; the base by itself."""
    base = strategies.tiny_llama()
    plain = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    policy = add_lora(base, LoraConfig(rank=2, alpha=8), "policy", seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01
    model = engine_of({name: tensor.to(dtype) for name, tensor in plain.items()})
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            layer = base.get_submodule(name.replace("o_proj", "self_attn.o_proj"))
            down, up = (getattr(layer, f"lora_{letter}")["policy"].weight.detach().to(dtype) for letter in "AB")
            module.lora_a_stacked = (torch.cat([down, torch.zeros_like(down)])[None, None],)
            module.lora_b_stacked = ((up * 4)[None, None],)
    found = answers(model, dtype)
    everything = adapter_checksums(policy, dtype)
    only = SimpleNamespace(
        base=base,
        name="policy",
        named_parameters=lambda: [(n, p) for n, p in policy.named_parameters() if "o_proj" in n],
    )
    expected = adapter_checksums(only, dtype)  # type: ignore[arg-type]
    assert {part: value for part, value in found[0]["sums"].items() if "adapter" in part} == expected
    assert set(everything) == set(expected) == {"adapter of layer 0", "adapter of layer 1"}
    state = MergedState(policy)
    differing = differing_parts(found, state, is_adapter=True, dtype=dtype, seed=3)
    assert differing == ["adapter of layer 0", "adapter of layer 1"]  # of one module of seven alone


KNOWN = b"Bearer planted-token"


def answered(kind: str, *headers: tuple[bytes, bytes]) -> tuple[bool, list[dict[str, Any]]]:
    """Return True if the application behind the gate was reached, and what was sent to the client."""
    reached, sent = [], list[dict[str, Any]]()

    async def app(*_: Any) -> None:
        reached.append(True)

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(Gate(app)({"type": kind, "path": "/collective_rpc", "headers": list(headers)}, receive, send))
    return bool(reached), sent


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "planted-token")


def test_the_trainer_and_the_servers_own_start_are_let_through() -> None:
    assert answered("http", (b"host", b"x"), (b"authorization", KNOWN)) == (True, [])
    assert answered("websocket", (b"authorization", KNOWN)) == (True, [])
    assert answered("lifespan") == (True, [])


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"Bearer other", b"planted-token", KNOWN + b"x"])
def test_anybody_else_is_refused(header: bytes) -> None:
    reached, sent = answered("http", (b"authorization", header))
    assert (reached, sent[0]["status"]) == (False, 401)
    assert answered("websocket", (b"authorization", header)) == (False, [{"type": "websocket.close", "code": 1008}])
    assert answered("http")[0] is False


def test_without_a_token_no_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    with pytest.raises(KeyError):
        answered("http")


# vLLM's modules, as far as the worker reads them when it is imported, and vLLM's way to find the class.
VLLM = """
class WeightTransferEngine: ...
class WeightTransferEngineFactory:
    names = []
    register_engine = classmethod(lambda cls, name, engine: cls.names.append(name))
"""

BASE = "class WeightTransferInitInfo: ...\nclass WeightTransferUpdateInfo: ..."

FIND = """
import importlib, sys
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
module, _, name = sys.argv[1].rpartition(".")
found = getattr(importlib.import_module(module), name)
print(found.__name__, *WeightTransferEngineFactory.names, "with" if "rlcore" in sys.modules else "without", "rlcore")
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder with those modules."""
    package = tmp_path / "site" / "vllm" / "distributed" / "weight_transfer"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text(VLLM, encoding="utf-8")
    (package / "base.py").write_text(BASE, encoding="utf-8")
    return tmp_path / "site"


def found(name: str, cwd: Path, *folders: Path) -> str:
    """Return vLLM's lookup of a worker class in an interpreter that sees these folders."""
    path = ":".join(str(folder) for folder in folders)
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FIND, name], env=environment, cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_servers_folder_holds_the_worker_that_its_command_names_and_rlcore_is_not_needed(
    checkpoint: Path, vllm: Path, tmp_path: Path
) -> None:
    spec = server_spec(checkpoint, tmp_path, engine={"python": "true"})
    line = command(spec, "python", Address("127.0.0.1", 1))
    server = ServerProcess(spec)
    name = line[line.index("--worker-extension-cls") + 1]
    said = found(name, tmp_path, server.folder, vllm)
    server.stop()
    assert said == "WeightReceiver gloo without rlcore"
