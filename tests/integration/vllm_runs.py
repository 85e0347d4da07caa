"""A vLLM server with a worker that can be told to lose weights, and the trainer that it is compared with."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from rlcore.algorithms.agreement import Spread
from rlcore.checks.canaries.sync import EngineCalibration, ExpectedWeights, sample_probes, sync_canary
from rlcore.config import EngineConfig, ModelConfig, ShapeConfig, TimeoutConfig
from rlcore.models.importing import import_model
from rlcore.models.lora import AdaptedModel
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import open_servers
from rlcore.sampling.vllm.client import call
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.server import VllmSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.local_learner import merged_state
from rlcore.training.scoring_models import token_scores
from rlcore.types import FailedRollout, Message, Prompt, Rollout

PYTHON = os.environ.get("ENGINE_PYTHON", "")
DTYPE = os.environ.get("ENGINE_DTYPE", "float32")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}[DTYPE]
SHAPE = ShapeConfig(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, max_positions=256
)
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=24, num_samples=3)
SOUND = EngineCalibration(
    noise=Spread(0.0, 0.0), unverified=frozenset()
)  # the least noise, and every weight to be compared
FAULTY = Path(__file__).with_name("faulty_vllm_worker.py")


def make_checkpoint(folder: Path) -> Path:
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return folder


def make_prompts(tokenizer: ChatTokenizer) -> list[Prompt]:
    conversations = [(Message(role="user", content=text),) for text in ("3+4", "12+30-7", "1", "8-2+5-1+6")]
    return [
        Prompt(prompt_id=str(n), messages=turns, token_ids=tokenizer.render_prompt(turns), reference="", task="test")
        for n, turns in enumerate(conversations)
    ]


def make_spec(checkpoint: Path, **settings: Any) -> ServerSpec:
    assert PYTHON, "ENGINE_PYTHON names no interpreter: run `make test-engine`"
    deadlines = TimeoutConfig(request_seconds=300.0)
    return ServerSpec(
        model=checkpoint,
        weight_dir=Path(tempfile.mkdtemp()),
        config=EngineConfig(kind="vllm", python=PYTHON, kv_cache_gib=0.25, timeouts=deadlines),
        dtype=DTYPE,
        max_model_len=256,
        max_concurrent=16,
        worker_file=FAULTY,
        worker_class="faulty_vllm_worker.FaultyReceiver",
        **settings,
    )


@contextmanager
def serving(checkpoint: Path, tokenizer: ChatTokenizer, **settings: Any) -> Iterator[VllmSampler]:
    spec = make_spec(checkpoint, **settings)
    with open_servers([spec], tokenizer, say) as sampler:
        assert isinstance(sampler, VllmSampler)
        yield sampler
        folder = sampler._process.folder if sampler._process else Path("/")
        processes = psutil.Process().children(recursive=True)
    assert not [process for process in processes if process.is_running()], "the engine left processes behind"
    assert not spec.weight_dir.exists()
    assert not folder.exists()


def say(text: str) -> None:
    sys.stdout.write(f"{text.strip()}\n")


def rollouts_of(groups: list[list[Rollout | FailedRollout]]) -> list[Rollout]:
    flat = [item for group in groups for item in group]
    assert all(isinstance(item, Rollout) for item in flat), [item for item in flat if not isinstance(item, Rollout)]
    return [item for item in flat if isinstance(item, Rollout)]


def worst_difference(engine: Sampler, native: NativeSampler, prompts: list[Prompt], seed: int) -> float:
    differences = []
    for rollout in rollouts_of(engine.sample(prompts, PARAMS, seed=seed)):
        expected = native.logprobs(rollout.prompt.token_ids, rollout.completion_ids, temperature=PARAMS.temperature)
        differences += [abs(a - b) for a, b in zip(rollout.sampler_logprobs, expected, strict=True)]
    say(f"\n{DTYPE}: {len(differences)} tokens, max {max(differences):.2e}, "
          f"mean {sum(differences) / len(differences):.2e}")  # fmt: skip
    return max(differences)


@torch.no_grad()
def move(model: PreTrainedModel, step: int, size: float) -> Mapping[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter += size * torch.randn(parameter.shape, generator=draws).to(parameter)
    return model.state_dict()


def sync(
    engine: VllmSampler,
    model: PreTrainedModel,
    prompts: list[Prompt],
    size: float = 0.03,
) -> float:
    """Weights moved, sent and proved as a run does it; returns the largest difference of a log-probability."""
    version = engine.policy_version + 1
    engine.load_weights(move(model, version, size), policy_version=version)
    return prove(engine, model, prompts)["sync/logprob_max_diff"]


def prove(engine: Sampler, policy: PreTrainedModel | AdaptedModel, prompts: list[Prompt]) -> dict[str, float]:
    score = partial(token_scores, policy, temperature=PARAMS.temperature, tokens_per_microbatch=4096)
    version = engine.policy_version
    truth = ExpectedWeights(
        state=merged_state(policy),
        policy_version=version,
        score=score,
        temperature=PARAMS.temperature,
        dtype=getattr(torch, DTYPE),
    )
    return sync_canary(engine, sample_probes(engine, prompts, PARAMS, seed=version), truth, SOUND)


def lose(engine: VllmSampler, what: str) -> None:
    """From now on the worker loses the tensor of that name, or all, or …; empty: none."""
    answer = call(engine.control.address, "/collective_rpc", {"method": "lose", "args": [what]}, seconds=60.0)
    assert answer[0] == 200, answer


@contextmanager
def killed_after(engine: VllmSampler, seconds: float) -> Iterator[None]:
    """Inside, the server's processes meet SIGKILL after so many seconds; a new one must serve at the end."""
    first = engine._process
    assert first is not None
    servers = [process for process in psutil.Process(first._guard.pid).children(recursive=True) if process.is_running()]
    assert servers

    def kill() -> None:
        for process in servers:
            process.send_signal(signal.SIGKILL)

    killer = threading.Timer(seconds, kill)
    killer.start()
    yield
    killer.join()
    assert engine._process is not first, "it was not killed in time: make the completions longer"
