"""Small runs for fault injection: a tiny model that answers sums, its scenes, and their results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlcore import config as c
from rlcore.agents.sampler import AgentSampler
from rlcore.distributed.build import LearnerPlan, make_learner, make_policy
from rlcore.distributed.distributed_learner import DistributedLearner
from rlcore.environments.calculator import CalculatorTool
from rlcore.environments.episodes import EpisodeSampler
from rlcore.errors import RlcoreError
from rlcore.loop import Components, HeldOut, train
from rlcore.loop.native import chat_prompts
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy, save_model
from rlcore.models.runtime import Runtime
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.text.demonstrations import render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.sft import SftLearner, run_sft_steps
from rlcore.types import Message, Prompt

SHAPE = c.ShapeConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64, max_positions=128
)
SUMS = {f"{a}+{b}": a + b for a in range(10) for b in range(10)}
SFT = c.SftConfig(num_steps=120, batch_size=16, learning_rate=5e-3)
CPU: Mapping[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
MAX_NEW_TOKENS, NUM_ITERATIONS = 32, 40

CALCULATOR, UNTIED, AGENT = "grpo, a calculator", "grpo, an untied head", "grpo, an agent"
TWO_RANKS, EVALUATED = "grpo, two ranks", "grpo, evaluated"
STARTS = {CALCULATOR: "calling", UNTIED: "untied"}  # of other scenes: "start"
_TERMS = (
    c.RewardTerm(kind="math"),
    c.RewardTerm(kind="length", weight=0.2, options={"limit": MAX_NEW_TOKENS, "buffer": 4}),
)
_TWICE = c.UpdateConfig(num_epochs=2, num_minibatches=2, optim=c.OptimConfig(schedule="linear", warmup_steps=2))
_FOUR = c.UpdateConfig(num_epochs=4, num_minibatches=2, early_stop_kl=0.005)
_AT_REFERENCE = c.UpdateConfig(num_epochs=3, num_minibatches=2, early_stop_ref_kl=0.01)
_CRITIC = c.CriticConfig(learning_rate=1e-3)
_sampling = functools.partial(c.SamplingConfig, max_new_tokens=MAX_NEW_TOKENS)
_BASE: Mapping[str, Any] = {
    "algorithm": "grpo",
    "num_iterations": NUM_ITERATIONS,
    "prompts_per_iteration": 4,
    "group_size": 4,
    "learning_rate": 3e-4,
    "rewards": _TERMS,
    "sampling": _sampling(),
    "checkpoints": c.CheckpointConfig(every_iterations=1000),
}


def _ppo(critic: c.CriticConfig = _CRITIC, **others: Any) -> dict[str, Any]:
    return {"algorithm": "ppo", "critic": critic, **others}


def _update(**others: Any) -> dict[str, Any]:
    return {"update": c.UpdateConfig(**others)}


_SHARED = dataclasses.replace(_CRITIC, architecture="shared")
_CUT = _ppo(dataclasses.replace(_CRITIC, gae=c.GaeConfig(bootstrap_truncated=True)), update=_TWICE)
SCENES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "grpo, 2 epochs": {"update": _TWICE},
    "grpo, KL in the loss": {"kl": c.KlConfig(coefficient=0.1)},
    "grpo, small micro-batches": _update(tokens_per_microbatch=160),
    "grpo, temperature 0.7": {"sampling": _sampling(temperature=0.7)},
    "grpo, one iteration ahead": {"sampling": _sampling(staleness=1)},
    "dapo, cut answers masked": {
        "algorithm": "dapo",
        "sampling": c.SamplingConfig(max_new_tokens=24),
        **_update(truncated_completions="mask"),
    },
    "ppo": _ppo(kl=c.KlConfig(coefficient=0.05, apply_to="reward"), update=_TWICE),
    "ppo, head on the backbone": _ppo(_SHARED),
    "ppo, the critic warms up": _ppo(dataclasses.replace(_CRITIC, warmup_iterations=3)),
    "ppo, head on the backbone, which warms up": _ppo(dataclasses.replace(_SHARED, warmup_iterations=3)),
    "rloo": {"algorithm": "rloo"},
    CALCULATOR: {"sampling": c.SamplingConfig(max_new_tokens=3 * MAX_NEW_TOKENS)},
    "grpo, longer": {"num_iterations": 5 * NUM_ITERATIONS},
    UNTIED: {},
    "grpo, weights decay": _update(optim=c.OptimConfig(weight_decay=0.1)),
    "grpo, entropy in the loss": _update(entropy_coefficient=0.02),
    "grpo, the KL adapts": {"kl": c.KlConfig(coefficient=0.1, target=0.05, horizon=200)},
    "grpo, the KL in the reward adapts": {
        "kl": c.KlConfig(coefficient=0.1, apply_to="reward", target=0.05, horizon=200)
    },
    "ppo_penalty": _ppo(update=_TWICE) | {"algorithm": "ppo_penalty", "learning_rate": 1e-3},
    "dapo, which stops early": {"algorithm": "dapo", "learning_rate": 2e-3, "update": _FOUR},
    "grpo, stops at the reference": {
        "learning_rate": 1e-3,
        "kl": c.KlConfig(coefficient=0.01),
        "update": _AT_REFERENCE,
    },
    "dapo, which replaces groups": {
        "algorithm": "dapo",
        "rewards": _TERMS[:1],
        "sampling": _sampling(dynamic_sampling_rounds=2),
    },
    EVALUATED: {"eval_every": 1, "num_iterations": 8},
    AGENT: {"num_iterations": 8},
    "dapo, 2 epochs": {"algorithm": "dapo", "learning_rate": 1e-3, "update": _TWICE},
    "gspo, 2 epochs": {"algorithm": "gspo", "update": _TWICE},
    "ppo, values beyond the end": _CUT | {"sampling": c.SamplingConfig(max_new_tokens=12)},
    "grpo, an adapter": {"learning_rate": 3e-3, **_update(lora=c.LoraConfig(rank=4))},
    TWO_RANKS: {"num_iterations": 3},
    "grpo, which learns to be brief": {  # its reward rises from about -0.4 to 0 when nothing is wrong
        "learning_rate": 2e-3,
        "rewards": (c.RewardTerm(kind="length", options={"limit": 20, "buffer": 18}),),
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
_EPISODES = c.EpisodeConfig(
    tools=("calculator",), max_turns=2, max_turn_tokens=MAX_NEW_TOKENS, max_tool_output_tokens=16
)
_RANKS = c.DistributedConfig(
    backend="processes", learner_ranks=2, shard="replicate", timeout_minutes=5.0, max_restarts=0
)
_WARNINGS = ("health", "audit", "updates follow", "was not checked")


class KilledError(Exception):
    """Error that kills a run which is to be resumed."""


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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Error or warning that reported a fault, and the number of iterations or steps before it."""

    caught: str  # "stopped", "warned" or "silent"
    steps: int
    message: str


def stopped_by(work: Callable[[], object]) -> Verdict:
    """Return the result of work without iterations."""
    try:
        work()
    except RlcoreError as error:
        return Verdict(caught="stopped", steps=0, message=error.what)
    return Verdict(caught="silent", steps=0, message="")


def played(make: Callable[[], Components]) -> Verdict:
    """Return the result of a whole run; of a silent one the reward, as means of five iterations."""
    diary = Diary()
    try:
        with contextlib.ExitStack() as stack:
            components = make()
            stack.callback(components.learner.close)
            stack.callback(components.reward.close)
            train(components, diary)
    except RlcoreError as error:
        return Verdict(caught="stopped", steps=len(diary.rows), message=error.what)
    for steps, text in diary.notes:
        if any(word in text for word in _WARNINGS):
            return Verdict(caught="warned", steps=steps, message=text)
    first, last = (sum(row["reward/mean"] for row in part) / 5.0 for part in (diary.rows[:5], diary.rows[-5:]))
    message = f"the reward went from {first:.2f} to {last:.2f}"
    return Verdict(caught="silent", steps=len(diary.rows), message=message)


def components_of(
    scene: str, *, folder: Path | None = None, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any
) -> Components:
    """Make the components of a run of a scene, as a preset would."""
    config = c.RlConfig(**{**_BASE, **SCENES[scene], **settings})
    first, asked = start(STARTS.get(scene, "start")), prompts()
    tokenizer, runtime = ChatTokenizer.load(first), Runtime(device=torch.device("cpu"), compute_dtype=dtype)
    engine = NativeSampler(runtime.load_frozen(first), tokenizer)
    plan = LearnerPlan(start=first, critic_start=first, config=config, seed=seed)
    verifier = build_rewards(_TERMS[:1], resources=RewardResources())
    return Components(
        seed=seed,
        learner=DistributedLearner(plan, _RANKS, runtime, log=lambda _: None)
        if scene == TWO_RANKS
        else make_learner(plan, make_policy(plan, runtime), runtime),
        engine=engine,
        sampler=_player(scene, engine, tokenizer),
        engine_dtype=dtype,
        tokenizer=tokenizer,
        reward=build_rewards(config.rewards, resources=RewardResources()),
        prompts=asked[: 4 * len(asked) // 5],
        held_out=HeldOut(prompts=asked[4 * len(asked) // 5 :], verifier=verifier),
        folder=folder or new_folder(),
        identity={"scene": scene, "seed": str(seed)},
        # The rules on curves are off: groups of four and sixteen rollouts are too few for them.
        health=c.HealthConfig(action="off", audit=c.AuditConfig(max_time_fraction=1.0, rollouts=4)),
    )


def _player(scene: str, engine: NativeSampler, tokenizer: ChatTokenizer) -> Sampler:
    if scene == AGENT:
        return AgentSampler(engine, tokenizer, c.AgentConfig(command=("python", "-c", _CALL)))
    return EpisodeSampler(engine, tokenizer, [CalculatorTool()], _EPISODES) if scene == CALCULATOR else engine


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rlcore-faults-")


def new_folder(name: str = "") -> Path:
    """Return a folder that does not exist yet, or the one of that name."""
    return Path(_home().name) / (name or f"run-{next(_numbers)}")


_numbers = itertools.count()


@functools.cache
def scratch() -> Path:
    """Make the untrained model."""
    import_model(c.ModelConfig(source="scratch", shape=SHAPE), new_folder("scratch"), seed=0)
    return new_folder("scratch")


def rows_of_sums() -> list[tuple[tuple[Message, ...], str]]:
    """Return questions with short answers, half of them wrong."""
    draws, rows = random.Random(0), list[tuple[tuple[Message, ...], str]]()
    for question, total in SUMS.items():
        said = total if draws.random() < 0.5 else max(0, total + draws.choice((-2, -1, 1, 2)))
        words = " ".join(draws.choice(("so", "well", "thus", "hence")) for _ in range(draws.randint(1, 4)))
        rows.append(((Message(role="user", content=question),), f"{words} #### {said}"))
    return rows


def start(kind: str = "start") -> Path:
    """Train a policy that answers in the format and is sometimes right.

    Of the kind ``calling`` it calls the calculator first; ``untied`` has a separate head.
    """
    return _start(kind)


@functools.cache
def _start(kind: str) -> Path:
    model = load_policy(start() if kind == "untied" else scratch(), **CPU)
    if kind == "untied":
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    else:
        tokenizer, rows, calls = ChatTokenizer.load(scratch()), rows_of_sums(), kind == "calling"
        made = [render_conversation(tokenizer, _called(asked) if calls else asked, said) for asked, said in rows]
        config = dataclasses.replace(SFT, num_steps=5 * SFT.num_steps) if calls else SFT  # copying takes longer
        run_sft_steps(SftLearner(model, config), made, made[::2], config, seed=0, report=lambda *_: None)
    save_model(model, scratch(), new_folder(kind))
    return new_folder(kind)


def _called(asked: tuple[Message, ...]) -> tuple[Message, ...]:
    question = asked[0].content
    call = Message(role="assistant", content=f"<tool:calculator>{question}</tool>")
    return (*asked, call, Message(role="tool", content=str(SUMS[question])))


def prompts() -> list[Prompt]:
    """Return sums with their reference answers."""
    return chat_prompts(ChatTokenizer.load(start()), {question: str(total) for question, total in SUMS.items()})
