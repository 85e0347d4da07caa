"""A micro model, and runs of it that a script drives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import CheckpointConfig, ModelConfig, SamplingConfig, ShapeConfig
from rlcore.loop import Components, HealthStop
from rlcore.loop.native import chat_prompts, native_components
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.models.importing import import_model
from rlcore.rewards.user_function import function_reward
from rlcore.sampling.scripted import ScriptedSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout, ScoredRollout
from tests import strategies

SHAPE = ShapeConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, max_positions=128)
QUESTIONS = {f"{a}+{b}": str(a + b) for a, b in [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)]}
ANSWERS = ("right", "wrong", "no")
Script = Mapping[str, Sequence[str]]
MakeComponents = Callable[..., Components]


class KilledError(Exception):
    """Error that ends a run in a test."""


@dataclass
class Tape:
    """A recorder that keeps everything, and ends the run where an iteration is recorded that it is to be killed in."""

    killed_in: int = 0
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    drawn: list[SampledGroups[list[ScoredRollout]]] = field(default_factory=list)
    stops: list[HealthStop] = field(default_factory=list)
    num_flushes: int = 0

    def log(self, text: str) -> None:
        self.notes.append(text)

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration == self.killed_in:
            raise KilledError
        self.rows.append({"iteration": iteration, **metrics})

    def rollouts(self, iteration: int, drawn: SampledGroups[list[ScoredRollout]]) -> None:
        self.drawn.append(drawn)

    def stopped(self, stop: HealthStop) -> None:
        self.stops.append(stop)

    def flush(self) -> None:
        self.num_flushes += 1


def right_answers(rollouts: Sequence[Rollout]) -> list[float | Sequence[float] | None]:
    return [float(rollout.text == "right") for rollout in rollouts]


@cache
def prompts_of(start: Path | str) -> tuple[Prompt, ...]:
    return tuple(chat_prompts(ChatTokenizer.load(start), QUESTIONS))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "model"
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder, seed=0)
    return folder


@pytest.fixture
def make_components(start: Path, tmp_path: Path) -> MakeComponents:
    """Parts of a run of four iterations whose completions are a script's; ``changes``: of the components."""

    def make(
        *, script: Script | None = None, config: Mapping[str, Any] | None = None, folder: str = "run", **changes: Any
    ) -> Components:
        required: Mapping[str, Any] = {
            "prompts_per_iteration": 2,
            "sampling": SamplingConfig(max_new_tokens=6),
            "checkpoints": CheckpointConfig(every_iterations=1),
        }
        components = native_components(
            start,
            strategies.rl_config(**{**required, **(config or {})}),
            prompts=prompts_of(start),
            reward=function_reward(right_answers),
            folder=tmp_path / folder,
        )
        texts = dict.fromkeys(QUESTIONS, ANSWERS) if script is None else script
        engine = ScriptedSampler.from_texts(texts, components.tokenizer, scorer=components.engine)
        return dataclasses.replace(components, **{"engine": engine, "sampler": engine, **changes})

    return make


def weights(components: Components) -> torch.Tensor:
    learner = components.learner.learner
    modules = [learner.policy, *([learner.critic] if learner.critic else [])]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()]).clone()
