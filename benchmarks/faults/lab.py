"""The small runs that faults are injected into, and what comes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlcore.config import (
    AuditConfig,
    CheckpointConfig,
    CriticConfig,
    EpisodeConfig,
    HealthConfig,
    KlConfig,
    ModelConfig,
    OptimConfig,
    RewardTerm,
    RlConfig,
    SamplingConfig,
    SftConfig,
    ShapeConfig,
    UpdateConfig,
)
from rlcore.demonstrations import Demonstration, render_conversation
from rlcore.errors import RlcoreError
from rlcore.loop import HeldOut, Parts, train
from rlcore.loop.native import chat_prompts, native_parts
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy, save_model
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.sampling.episodes import EpisodeSampler
from rlcore.tokenization import ChatTokenizer
from rlcore.tools.calculator import CalculatorTool
from rlcore.training.sft import train_sft
from rlcore.types import Message, Prompt

SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64, max_positions=128)
SUMS = {f"{a}+{b}": a + b for a in range(10) for b in range(10)}
MAX_NEW_TOKENS = 32
NUM_ITERATIONS = 40
SFT = SftConfig(num_steps=120, batch_size=16, learning_rate=5e-3)
TERMS = (
    RewardTerm(kind="math"),
    RewardTerm(kind="length", weight=0.2, options={"limit": MAX_NEW_TOKENS, "buffer": 4}),
)


CPU: Mapping[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_WARNINGS = ("health", "audit", "updates follow", "was not checked")


class Patches:
    """Attributes that are replaced for a while, and put back in the reverse order."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Put ``value`` in the place of ``owner.name``; returns what was there."""
        old = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        self._stack.callback(setattr, owner, name, old)
        setattr(owner, name, value)
        return old

    def undo(self) -> None:
        """Put everything back."""
        self._stack.close()


@dataclass
class Diary:
    """A recorder that keeps notes and figures, and ends a run where it is to be killed."""

    killed_after: int = 0
    notes: list[tuple[int, str]] = field(default_factory=list)  # after how many iterations, and what
    rows: list[dict[str, float]] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append((len(self.rows), text))

    def metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))

    def rollouts(self, iteration: int, drawn: Any) -> None:
        if self.killed_after and iteration > self.killed_after:
            raise KilledError

    def stopped(self, stop: Any) -> None:
        self.note(str(stop))

    def flush(self) -> None:
        """Nothing is kept elsewhere."""


class KilledError(Exception):
    """What a run is ended with that is to be resumed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a run: the error or the warning that told of a fault, and after how many iterations or steps."""

    caught: str  # "stopped", "warned" or "silent"
    steps: int
    message: str


Inject = Callable[[Patches], None]
Play = Callable[[Patches], Verdict]


def stopped_by(work: Callable[[], object], steps: int = 0) -> Verdict:
    """The verdict on work that has no iterations."""
    try:
        work()
    except RlcoreError as error:
        return Verdict(caught="stopped", steps=steps, message=error.what)
    return Verdict(caught="silent", steps=steps, message="")


@functools.cache
def home() -> Path:
    """A folder for everything that is written, which ends with the process."""
    kept = tempfile.TemporaryDirectory(prefix="rlcore-faults-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[Any] = []
_numbers = itertools.count()


def new_folder() -> Path:
    """A folder that does not exist yet."""
    return home() / f"run-{next(_numbers)}"


@functools.cache
def scratch() -> Path:
    """The model before it has learned anything."""
    import_model(ModelConfig(source="scratch", shape=SHAPE), home() / "scratch", seed=0)
    return home() / "scratch"


def rows_of(split: str) -> list[tuple[tuple[Message, ...], str]]:
    """Questions with answers in a few words, of which half are wrong."""
    draws, rows = random.Random(0), []
    for question, total in SUMS.items():
        said = total if draws.random() < 0.5 else max(0, total + draws.choice((-2, -1, 1, 2)))
        words = " ".join(draws.choice(("so", "well", "thus", "hence")) for _ in range(draws.randint(1, 4)))
        rows.append(((Message(role="user", content=question),), f"{words} #### {said}"))
    return rows if split == "train" else rows[::2]


def demonstrations(split: str) -> list[Demonstration]:
    """The rows as tokens."""
    tokenizer = ChatTokenizer.load(scratch())
    return [render_conversation(tokenizer, messages, answer) for messages, answer in rows_of(split)]


def calls(split: str) -> list[Demonstration]:
    """The rows as tokens, where the calculator is called before the answer."""
    tokenizer = ChatTokenizer.load(scratch())

    def turns(question: str) -> tuple[Message, ...]:
        said = Message(role="tool", content=str(SUMS[question]))
        return (Message(role="assistant", content=f"<tool:calculator>{question}</tool>"), said)

    rows = rows_of(split)
    return [render_conversation(tokenizer, (*asked, *turns(asked[0].content)), answer) for asked, answer in rows]


def start(*, calling: bool = False) -> Path:
    """A policy that answers in form, and is right now and then; ``calling``: it asks the calculator first."""
    return _start(calling)


@functools.cache
def _start(calling: bool) -> Path:
    model = load_policy(scratch(), device=torch.device("cpu"), dtype=torch.float32)
    rows = calls if calling else demonstrations
    config = dataclasses.replace(SFT, num_steps=5 * SFT.num_steps) if calling else SFT  # copying takes longer
    train_sft(model, rows("train"), rows("eval"), config, seed=0, report=lambda *_: None)
    folder = home() / ("calling" if calling else "start")
    save_model(model, scratch(), folder)
    return folder


def prompts() -> list[Prompt]:
    """Sums with their answers as references."""
    return chat_prompts(ChatTokenizer.load(start()), {question: str(total) for question, total in SUMS.items()})


BASE: Mapping[str, Any] = {
    "algorithm": "grpo",
    "num_iterations": NUM_ITERATIONS,
    "prompts_per_iteration": 4,
    "group_size": 4,
    "learning_rate": 3e-4,
    "rewards": TERMS,
    "sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS),
    "checkpoints": CheckpointConfig(iterations=1000),
}
CALCULATOR = "grpo, a calculator"
_TWICE = UpdateConfig(epochs=2, minibatches=2, optim=OptimConfig(schedule="linear", warmup_steps=2))
SCENES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "grpo, 2 epochs": {"update": _TWICE},
    "grpo, KL in the loss": {"kl": KlConfig(coefficient=0.1)},
    "grpo, small micro-batches": {"update": UpdateConfig(tokens_per_microbatch=160)},
    "grpo, temperature 0.7": {"sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=0.7)},
    "grpo, one iteration ahead": {"sampling": SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, staleness=1)},
    "dapo, cut answers masked": {
        "algorithm": "dapo",
        "update": UpdateConfig(truncated="mask"),
        "sampling": SamplingConfig(max_new_tokens=24),
    },
    "ppo": {
        "algorithm": "ppo",
        "critic": CriticConfig(learning_rate=1e-3),
        "kl": KlConfig(coefficient=0.05, placement="reward"),
        "update": _TWICE,
    },
    "ppo, head on the trunk": {"algorithm": "ppo", "critic": CriticConfig(learning_rate=1e-3, placement="head")},
    "ppo, the critic warms up": {"algorithm": "ppo", "critic": CriticConfig(learning_rate=1e-3, warmup_iterations=3)},
    "ppo, head on the trunk, which warms up": {
        "algorithm": "ppo",
        "critic": CriticConfig(learning_rate=1e-3, placement="head", warmup_iterations=3),
    },
    "rloo": {"algorithm": "rloo"},
    CALCULATOR: {"sampling": SamplingConfig(max_new_tokens=3 * MAX_NEW_TOKENS)},
    "grpo, longer": {"num_iterations": 5 * NUM_ITERATIONS},
}
_EPISODES = EpisodeConfig(tools=("calculator",), max_turns=2, max_turn_tokens=MAX_NEW_TOKENS, max_output_tokens=16)


def parts_of(scene: str, *, folder: Path | None = None, share: float = 1.0, seed: int = 0, **settings: Any) -> Parts:
    """The parts of a run of a scene, as a preset would make them; ``share``: of the time, for the audit."""
    config = RlConfig(**{**BASE, **SCENES[scene], **settings})
    calling, asked = scene == CALCULATOR, prompts()
    parts = native_parts(
        start(calling=calling),
        config,
        prompts=asked[: 4 * len(asked) // 5],
        reward=build_rewards(config.rewards, resources=RewardResources()),
        folder=folder or new_folder(),
        seed=seed,
    )
    if calling:
        player = EpisodeSampler(parts.engine, parts.tokenizer, [CalculatorTool()], _EPISODES)
        parts = dataclasses.replace(parts, sampler=player)
    verifier = build_rewards((RewardTerm(kind="math"),), resources=RewardResources())
    held_out = HeldOut(prompts=asked[4 * len(asked) // 5 :], verifier=verifier)
    # The rules on curves are off: groups of four and sixteen rollouts are too few for them.
    health = HealthConfig(action="off", audit=AuditConfig(share=share, rollouts=4))
    return dataclasses.replace(parts, held_out=held_out, health=health)


def played(make: Callable[[], Parts]) -> Verdict:
    """Do a whole run, and say what it was told."""
    diary = Diary()
    try:
        with contextlib.ExitStack() as stack:
            parts = make()
            stack.callback(parts.learner.close)
            stack.callback(parts.reward.close)
            train(parts, diary)
    except RlcoreError as error:
        return Verdict(caught="stopped", steps=len(diary.rows), message=error.what)
    warned = [noted for noted in diary.notes if any(word in noted[1] for word in _WARNINGS)]
    if warned:
        return Verdict(caught="warned", steps=warned[0][0], message=warned[0][1])
    return Verdict(caught="silent", steps=len(diary.rows), message="")


def resumed(scene: str, *, killed_after: int = 3, **settings: Any) -> Iterator[Path]:
    """Do a run up to a kill, then give its folder to who goes on with it."""
    folder = new_folder()
    often = {"checkpoints": CheckpointConfig(iterations=1), **settings}
    parts = parts_of(scene, folder=folder, **often)
    with contextlib.suppress(KilledError), contextlib.closing(parts.learner):
        train(parts, Diary(killed_after=killed_after))
    yield folder
