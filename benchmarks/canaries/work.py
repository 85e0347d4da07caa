"""Workload of the canary experiment, and its two measurements: stopped correct syncs, and detected faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.canaries.session import Session
from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.models.policy import completion_logprobs
from rlcore.models.saving import atomic_folder
from rlcore.sampling.base import SamplingParams
from rlcore.text.packing import TokenSequence, pack
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt

LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=32, num_samples=1)
SHAPE = ShapeConfig(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, max_positions=128
)
SFT_STEPS, BATCH = 300, 32


@dataclass(frozen=True, eq=False)
class Work:
    """Model that has learned some arithmetic, with its checkpoint."""

    folder: Path
    model: PreTrainedModel
    tokenizer: ChatTokenizer
    prompts: Sequence[Prompt]


@dataclass
class Cell:
    """Syncs of one kind: their number, how many the canary stopped, and its readings of the correct ones.

    ``by_logprobs``: how many it would have stopped if no weight could be compared.
    """

    syncs: int = 0
    stopped: int = 0
    by_logprobs: int = 0
    log_odds: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)


def make_work(folder: Path) -> Work:
    """Train a model with a tied head for a minute at most: it is sure of some tokens, not of others."""
    import_model(ModelConfig(source="scratch", shape=SHAPE), folder / "start", seed=0)
    tokenizer = ChatTokenizer.load(folder / "start")
    model = load_policy(folder / "start", device=torch.device("cpu"), dtype=torch.float32)
    draws, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(SFT_STEPS):
        texts = [_worked(tokenizer, draws.randint(0, 99), draws.randint(0, 99)) for _ in range(BATCH)]
        (batch,) = pack(texts, tokens_per_microbatch=65_536)
        loss = -completion_logprobs(model, batch)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with atomic_folder(folder / "model") as made:
        model.save_pretrained(made)
        for path in (folder / "start").iterdir():
            if path.suffix in (".json", ".jinja") and not (made / path.name).exists():
                (made / path.name).write_bytes(path.read_bytes())
    prompts = [_prompt(tokenizer, f"{draws.randint(0, 99)}+{draws.randint(0, 99)}") for _ in range(8)]
    return Work(folder / "model", model, tokenizer, prompts)


def sound(session: Session, cell: Cell, learning_rate: float, *, syncs: int) -> None:
    """Take a number of steps with their syncs, and run the canary before the first."""
    cell.hidden |= session.begin().unverified
    for _ in range(syncs):
        cell.syncs += 1
        try:
            figures = session.step(learning_rate)
        except (CanaryError, StaleSamplerError) as error:
            cell.stopped += 1
            cell.messages.append(str(error.what))
            continue
        cell.log_odds.append(figures["sync/log_odds_mean_diff"])
        cell.temperatures.append(figures["sync/temperature_ratio"])


def detect(session: Session, cell: Cell, learning_rate: float, *, is_there: Callable[[], bool] = lambda: True) -> None:
    """Step until the fault changes a sync; return True if the canary stops that sync."""
    session.learn(learning_rate)
    session.push()
    while not is_there():
        session.learn(learning_rate)
        session.push()
    cell.stopped += _stops(session)
    baseline, hidden = session.baseline, frozenset(session.engine.differing_parts(session.truth.state) or ())
    session.baseline = replace(baseline, unverified=hidden)
    cell.by_logprobs += _stops(session)
    session.baseline = baseline
    cell.syncs += 1


def _stops(session: Session) -> bool:
    try:
        session.prove()
    except (CanaryError, StaleSamplerError):
        return True
    return False


def _worked(tokenizer: ChatTokenizer, left: int, right: int) -> TokenSequence:
    answer = tokenizer.encode(f"{left}+{right}={left + right}") + tokenizer.end_of_turn
    return TokenSequence(prompt_ids=_prompt(tokenizer, f"{left}+{right}").token_ids, completion_ids=tuple(answer))


def _prompt(tokenizer: ChatTokenizer, text: str) -> Prompt:
    turns = (Message(role="user", content=text),)
    token_ids = tokenizer.render_prompt(turns)
    return Prompt(prompt_id=text, messages=turns, token_ids=token_ids, reference="", task="sum")
