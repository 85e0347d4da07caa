"""Canary experiment with a real vLLM server, whose worker can be made to lose weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.canaries.session import Session
from benchmarks.canaries.work import DTYPES, LEARNING_RATES, PARAMS, Cell, Work, detect, sound
from rlcore.config import EngineConfig
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.vllm import server_sync as syncing
from rlcore.sampling.vllm.client import call
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.server import VllmSampler, open_vllm
from rlcore.sampling.vllm.server_sync import publish
from rlcore.types import FailedRollout, Prompt, Rollout

WORKER = Path(__file__).parents[2] / "tests" / "integration" / "faulty_vllm_worker.py"
LOST = {"stale": "stale", "layer missing": "model.layers.1.", "tied head not repacked": "head"}
RANK = 4
Cells = dict[tuple[str, str, str, float], Cell]  # by engine, precision, fault ("" for none) and learning rate


class WarmServer:
    """Server that receives a temperature that is 0.1 too high."""

    def __init__(self, server: VllmSampler) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        warmer = replace(params, temperature=params.temperature + 0.1)
        return self._server.sample(prompts, warmer, seed=seed, places=places)


def measure_vllm(work: Work, python: str, cells: Cells, *, syncs: int, trials: int) -> None:
    """Run correct syncs and faults in each precision: all weights through one server, LoRAs through another."""
    for name, dtype in DTYPES.items():
        with _server(work, python, name, rank=0) as server:
            _whole(work, server, cells, dtype, syncs=syncs, trials=trials)
        with _server(work, python, name, rank=RANK) as server:
            _adapters(work, server, cells, dtype, syncs=syncs, trials=trials)


def _whole(work: Work, server: VllmSampler, cells: Cells, dtype: torch.dtype, *, syncs: int, trials: int) -> None:
    name = str(dtype).removeprefix("torch.")
    for rate in LEARNING_RATES:
        session = _restarted(work, server, dtype)
        sound(session, cells.setdefault(("vllm", name, "", rate), Cell()), rate, syncs=syncs)
        for fault, lost in LOST.items():
            if lost == "head" and dtype == torch.float16:
                continue  # on a CPU vLLM has no separate head in float16 to lose
            for _ in range(trials):
                session = _restarted(work, server, dtype)
                session.begin()
                _lose(server, lost)
                detect(session, cells.setdefault(("vllm", name, fault, rate), Cell()), rate)
                _lose(server, "")
        for _ in range(trials):
            session = _restarted(work, server, dtype)
            session.begin()
            session.engine = WarmServer(server)  # type: ignore[assignment]  # it forwards all other attributes
            detect(session, cells.setdefault(("vllm", name, "temperature + 0.1", rate), Cell()), rate)


def _adapters(work: Work, server: VllmSampler, cells: Cells, dtype: torch.dtype, *, syncs: int, trials: int) -> None:
    """Inject the fault: the server gets the previous LoRA, or requests name its base, alternating."""
    name = str(dtype).removeprefix("torch.")
    for rate in LEARNING_RATES:
        session = Session(work.model, server, work.prompts, dtype, rank=RANK, params=PARAMS)
        session.version = server.policy_version
        if server.served.is_adapter:  # of the previous rate: a fresh one replaces it
            session.version += 1
            session.push()
        sound(session, cells.setdefault(("vllm, adapter", name, "", rate), Cell()), rate, syncs=syncs)
        cell = cells.setdefault(("vllm, adapter", name, "adapter never applied", rate), Cell())
        for _ in range(trials):
            with tempfile.TemporaryDirectory() as folder, _deaf(server, Path(folder)):
                detect(session, cell, rate)
            session.version += 1
            session.push()


def _restarted(work: Work, server: VllmSampler, dtype: torch.dtype) -> Session:
    """Reset the learner, and the server with its weights."""
    session = Session(work.model, server, work.prompts, dtype, params=PARAMS)
    session.version = server.policy_version + 1
    session.push()
    return session


@contextmanager
def _deaf(server: VllmSampler, folder: Path) -> Iterator[None]:
    """Inside the context, each LoRA that is sent is the current one."""
    kept = replace(server.served, path=Path(shutil.copytree(server.served.path, folder / "kept")))
    with patch.object(syncing, "publish", lambda group, _, version, send: publish(group, kept, version, send)):
        yield


@contextmanager
def _server(work: Work, python: str, dtype: str, *, rank: int) -> Iterator[VllmSampler]:
    spec = ServerSpec(
        model=work.folder,
        weight_dir=Path(tempfile.mkdtemp()),
        config=EngineConfig(kind="vllm", python=python, kv_cache_gib=0.25),
        dtype=dtype,
        max_model_len=128,
        max_concurrent=16,
        lora_rank=rank,
        worker_file=WORKER,
        worker_class="faulty_vllm_worker.FaultyReceiver",
    )
    with open_vllm(spec, work.tokenizer, print) as server:
        yield server


def _lose(server: VllmSampler, what: str) -> None:
    status, answer = call(server.control.address, "/collective_rpc", {"method": "lose", "args": [what]}, seconds=60.0)
    if status != 200:
        raise RuntimeError(str(answer))
