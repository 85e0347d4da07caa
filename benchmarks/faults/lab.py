"""Small runs for fault injection, and their results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.models import MAX_NEW_TOKENS, new_folder, prompts, start
from rlcore.agents.sampler import AgentSampler
from rlcore.config import (
    AgentConfig,
    AuditConfig,
    CheckpointConfig,
    CriticConfig,
    DistributedConfig,
    EpisodeConfig,
    GaeConfig,
    HealthConfig,
    KlConfig,
    LoraConfig,
    OptimConfig,
    RewardTerm,
    RlConfig,
    SamplingConfig,
    UpdateConfig,
)
from rlcore.distributed.build import LearnerPlan, make_learner, make_policy
from rlcore.distributed.distributed_learner import DistributedLearner
from rlcore.environments.calculator import CalculatorTool
from rlcore.environments.episodes import EpisodeSampler
from rlcore.errors import RlcoreError
from rlcore.hardware.runtime import Runtime
from rlcore.loop import Components, HeldOut, train
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer

NUM_ITERATIONS = 40
TERMS = (
    RewardTerm(kind="math"),
    RewardTerm(kind="length", weight=0.2, options={"limit": MAX_NEW_TOKENS, "buffer": 4}),
)


_WARNINGS = ("health", "audit", "updates follow", "was not checked")


class Patches:
    """Attributes that are replaced temporarily, and restored in reverse order."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace ``owner.name`` by ``value``; return the old value."""
        old = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        self._stack.callback(setattr, owner, name, old)
        setattr(owner, name, value)
        return old

    def undo(self) -> None:
        """Restore everything."""
        self._stack.close()


@dataclass
class Diary:
    """Recorder that collects messages and metrics, and kills a run at an iteration."""

    killed_after: int = 0
    notes: list[tuple[int, str]] = field(default_factory=list)  # after how many iterations, and what
    rows: list[dict[str, float]] = field(default_factory=list)

    def log(self, text: str) -> None:
        self.notes.append((len(self.rows), text))

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))

    def rollouts(self, iteration: int, drawn: Any) -> None:
        if self.killed_after and iteration > self.killed_after:
            raise KilledError

    def stopped(self, stop: Any) -> None:
        self.log(str(stop))

    def flush(self) -> None:
        """Do nothing: all records are in memory."""


class KilledError(Exception):
    """Error that kills a run which is to be resumed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a run: the error or warning that reported a fault, and the number of iterations or steps before it."""

    caught: str  # "stopped", "warned" or "silent"
    steps: int
    message: str


Inject = Callable[[Patches], None]
Play = Callable[[Patches], Verdict]


def replaced(owner: Any, name: str, change: Callable[..., Any]) -> Inject:
    """Replace a function by ``change(right function, *arguments)``."""

    def inject(patch: Patches) -> None:
        old = patch.set(owner, name, lambda *given, **more: change(old, *given, **more))

    return inject


def stopped_by(work: Callable[[], object], steps: int = 0) -> Verdict:
    """Return the result of work without iterations."""
    try:
        work()
    except RlcoreError as error:
        return Verdict(caught="stopped", steps=steps, message=error.what)
    return Verdict(caught="silent", steps=steps, message="")


BASE: Mapping[str, Any] = {
    "algorithm": "grpo",
    "num_iterations": NUM_ITERATIONS,
    "prompts_per_iteration": 4,
    "group_size": 4,
    "learning_rate": 3e-4,
    "rewards": TERMS,
    "sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS),
    "checkpoints": CheckpointConfig(every_iterations=1000),
}
CALCULATOR, ADAPTER, TWO_RANKS = "grpo, a calculator", "grpo, an adapter", "grpo, two ranks"
UNTIED = "grpo, an untied head"
EVALUATED, REPLACES, STOPS = "grpo, evaluated", "dapo, which replaces groups", "dapo, which stops early"
AGENT = "grpo, an agent"
LEARNS = "grpo, which learns to be brief"  # its reward rises from about -0.4 to 0 when nothing is wrong
_TWICE = UpdateConfig(num_epochs=2, num_minibatches=2, optim=OptimConfig(schedule="linear", warmup_steps=2))
SCENES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "grpo, 2 epochs": {"update": _TWICE},
    "grpo, KL in the loss": {"kl": KlConfig(coefficient=0.1)},
    "grpo, small micro-batches": {"update": UpdateConfig(tokens_per_microbatch=160)},
    "grpo, temperature 0.7": {"sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=0.7)},
    "grpo, one iteration ahead": {"sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, staleness=1)},
    "dapo, cut answers masked": {
        "algorithm": "dapo",
        "update": UpdateConfig(truncated_completions="mask"),
        "sampling": SamplingConfig(max_new_tokens=24),
    },
    "ppo": {
        "algorithm": "ppo",
        "critic": CriticConfig(learning_rate=1e-3),
        "kl": KlConfig(coefficient=0.05, apply_to="reward"),
        "update": _TWICE,
    },
    "ppo, head on the backbone": {
        "algorithm": "ppo",
        "critic": CriticConfig(learning_rate=1e-3, architecture="shared"),
    },
    "ppo, the critic warms up": {"algorithm": "ppo", "critic": CriticConfig(learning_rate=1e-3, warmup_iterations=3)},
    "ppo, head on the backbone, which warms up": {
        "algorithm": "ppo",
        "critic": CriticConfig(learning_rate=1e-3, architecture="shared", warmup_iterations=3),
    },
    "rloo": {"algorithm": "rloo"},
    CALCULATOR: {"sampling": SamplingConfig(max_new_tokens=3 * MAX_NEW_TOKENS)},
    "grpo, longer": {"num_iterations": 5 * NUM_ITERATIONS},
    UNTIED: {},
    "grpo, weights decay": {"update": UpdateConfig(optim=OptimConfig(weight_decay=0.1))},
    "grpo, entropy in the loss": {"update": UpdateConfig(entropy_coefficient=0.02)},
    "grpo, the KL adapts": {"kl": KlConfig(coefficient=0.1, target=0.05, horizon=200)},
    "grpo, the KL in the reward adapts": {"kl": KlConfig(coefficient=0.1, apply_to="reward", target=0.05, horizon=200)},
    "ppo_penalty": {
        "algorithm": "ppo_penalty",
        "learning_rate": 1e-3,
        "critic": CriticConfig(learning_rate=1e-3),
        "update": _TWICE,
    },
    STOPS: {
        "algorithm": "dapo",
        "learning_rate": 2e-3,
        "update": UpdateConfig(num_epochs=4, num_minibatches=2, early_stop_kl=0.005),
    },
    "grpo, stops at the reference": {
        "learning_rate": 1e-3,
        "kl": KlConfig(coefficient=0.01),
        "update": UpdateConfig(num_epochs=3, num_minibatches=2, early_stop_ref_kl=0.01),
    },
    REPLACES: {
        "algorithm": "dapo",
        "rewards": TERMS[:1],
        "sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, dynamic_sampling_rounds=2),
    },
    EVALUATED: {"eval_every": 1, "num_iterations": 8},
    AGENT: {"num_iterations": 8},
    "dapo, 2 epochs": {"algorithm": "dapo", "learning_rate": 1e-3, "update": _TWICE},
    "gspo, 2 epochs": {"algorithm": "gspo", "update": _TWICE},
    "ppo, values beyond the end": {
        "algorithm": "ppo",
        "critic": CriticConfig(learning_rate=1e-3, gae=GaeConfig(bootstrap_truncated=True)),
        "sampling": SamplingConfig(max_new_tokens=12),
        "update": _TWICE,
    },
    ADAPTER: {"update": UpdateConfig(lora=LoraConfig(rank=4)), "learning_rate": 3e-3},
    TWO_RANKS: {"num_iterations": 3},
    LEARNS: {
        "learning_rate": 2e-3,
        "rewards": (RewardTerm(kind="length", options={"limit": 20, "buffer": 18}),),
    },
}
_CALL = """
import json, os, urllib.request
task = json.loads(os.environ["RLCORE_TASK"])
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"messages": task["messages"]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
"""
_EPISODES = EpisodeConfig(tools=("calculator",), max_turns=2, max_turn_tokens=MAX_NEW_TOKENS, max_tool_output_tokens=16)


def components_of(
    scene: str,
    *,
    folder: Path | None = None,
    share: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Components:
    """The components of a run of a scene, as a preset would make them; ``share``: of the time, for the audit."""
    config = RlConfig(**{**BASE, **SCENES[scene], **settings})
    first, asked = start(calling=scene == CALCULATOR, untied=scene == UNTIED), prompts()
    tokenizer, runtime = ChatTokenizer.load(first), Runtime(device=torch.device("cpu"), compute_dtype=dtype)
    engine = NativeSampler(runtime.load_frozen(first), tokenizer)
    plan = LearnerPlan(start=first, critic_start=first, config=config, seed=seed)
    several = DistributedConfig(
        backend="processes", learner_ranks=2, shard="replicate", timeout_minutes=5.0, max_restarts=0
    )
    components = Components(
        seed=seed,
        learner=DistributedLearner(plan, several, runtime, log=lambda _: None)
        if scene == TWO_RANKS
        else make_learner(plan, make_policy(plan, runtime), runtime),
        engine=engine,
        sampler=_player(scene, engine, tokenizer),
        engine_dtype=dtype,
        tokenizer=tokenizer,
        reward=build_rewards(config.rewards, resources=RewardResources()),
        prompts=asked[: 4 * len(asked) // 5],
        folder=folder or new_folder(),
        identity={"scene": scene, "seed": str(seed)},
    )
    verifier = build_rewards((RewardTerm(kind="math"),), resources=RewardResources())
    held_out = HeldOut(prompts=asked[4 * len(asked) // 5 :], verifier=verifier)
    # The rules on curves are off: groups of four and sixteen rollouts are too few for them.
    health = HealthConfig(action="off", audit=AuditConfig(max_time_fraction=share, rollouts=4))
    return dataclasses.replace(components, held_out=held_out, health=health)


def _player(scene: str, engine: NativeSampler, tokenizer: ChatTokenizer) -> Sampler:
    if scene == AGENT:
        return AgentSampler(engine, tokenizer, AgentConfig(command=("python", "-c", _CALL)))
    return EpisodeSampler(engine, tokenizer, [CalculatorTool()], _EPISODES) if scene == CALCULATOR else engine


def played(make: Callable[[], Components]) -> Verdict:
    """Do a whole run, and return its result."""
    diary = Diary()
    try:
        with contextlib.ExitStack() as stack:
            components = make()
            stack.callback(components.learner.close)
            stack.callback(components.reward.close)
            train(components, diary)
    except RlcoreError as error:
        return Verdict(caught="stopped", steps=len(diary.rows), message=error.what)
    warned = [noted for noted in diary.notes if any(word in noted[1] for word in _WARNINGS)]
    if warned:
        return Verdict(caught="warned", steps=warned[0][0], message=warned[0][1])
    return Verdict(caught="silent", steps=len(diary.rows), message=course_of(diary.rows))


def course_of(rows: list[dict[str, float]]) -> str:
    """Return the reward as means of five iterations: the cost of a silent fault."""
    first, last = (sum(row["reward/mean"] for row in part) / 5.0 for part in (rows[:5], rows[-5:]))
    return f"the reward went from {first:.2f} to {last:.2f}"


def resumed(scene: str, *, killed_after: int = 3, **settings: Any) -> Iterator[Path]:
    """Run up to a kill, then pass the folder to the function that resumes."""
    folder = new_folder()
    often = {"checkpoints": CheckpointConfig(every_iterations=1), **settings}
    components = components_of(scene, folder=folder, **often)
    with contextlib.suppress(KilledError), contextlib.closing(components.learner):
        train(components, Diary(killed_after=killed_after))
    yield folder
