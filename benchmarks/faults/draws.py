"""Small or partial faults of the engine: its samples and its weights."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.faults.engine import drawing, likelier, loading, same_draws, top_k, top_p
from benchmarks.faults.experience import Scores, scores
from benchmarks.faults.lab import Inject, Patches, replaced
from benchmarks.faults.models import scratch
from rlcore.sampling import native
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Score


def min_p(share: float) -> Any:
    """Drop tokens that are far less likely than the most likely one."""

    def cut(logits: torch.Tensor) -> torch.Tensor:
        chances = logits.softmax(-1)
        return logits.masked_fill(chances < share * chances.amax(-1, keepdim=True), -torch.inf)

    return cut


def penalised(patch: Patches) -> None:
    """Penalize repeated tokens in sampling only."""
    seen: list[torch.Tensor] = []

    def draw(logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
        if not seen or len(seen[0]) != len(logits):
            seen[:] = [torch.zeros_like(logits, dtype=torch.bool)]
        tempered = logits / temperature
        lowered = torch.where(tempered > 0, tempered / 1.5, tempered * 1.5)
        tokens, _ = old(torch.where(seen[0], lowered, tempered), uniforms, temperature=1.0)
        seen[0][torch.arange(len(tokens)), tokens] = True
        return tokens, tempered.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    old = patch.set(native, "sample_tokens", draw)


def greedy_at_first(patch: Patches) -> None:
    """Sample the first token of each completion greedily."""
    decode = native.decode

    def decoding(*given: Any, choose: Any, **more: Any) -> Any:
        first = [True]

        def chosen(logits: torch.Tensor, uniforms: torch.Tensor) -> Any:
            tokens, found = choose(logits, uniforms)
            if first.pop() if first else False:
                tokens = logits.argmax(-1)
                found = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            return tokens, found

        return decode(*given, choose=chosen, **more)

    patch.set(native, "decode", decoding)


def ends(by: float) -> Any:
    """Raise the log-odds of EOS by this number of nats."""

    def lifted(logits: torch.Tensor) -> torch.Tensor:
        found = logits.clone()
        found[:, list(ChatTokenizer.load(scratch()).eos_ids)] += by
        return found

    return lifted


def without(word: str) -> Inject:
    """Keep the first values of some tensors in the engine."""
    first: dict[str, torch.Tensor] = {}

    def load(state: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        if not first:
            first.update({name: value.clone() for name, value in state.items()})
        return {name: first[name] if word in name else value for name, value in state.items()}

    return loading(load)


def one_behind() -> Inject:
    """Load the weights of the previous update."""
    kept: list[dict[str, torch.Tensor]] = []

    def load(state: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        kept.append({name: value.clone() for name, value in state.items()})
        return kept[-2] if len(kept) > 1 else kept[-1]

    return loading(load)


def now_and_then(them: list[Score]) -> Scores:
    """Replace one score in eight by the previous rollout's."""
    return [them[place - 1] if place % 8 == 3 else one for place, one in enumerate(them)]


class Remembered:
    """Reward that repeats the first score of each index."""

    def __init__(self) -> None:
        self.first: list[Score] = []

    def __call__(self, them: list[Score]) -> Scores:
        self.first = self.first or them
        return [self.first[place % len(self.first)] for place in range(len(them))]


DRAWS: dict[str, tuple[str, Inject]] = {
    "the engine draws at 0.9 of the temperature it reports": ("grpo", drawing(lambda logits: logits / 0.9)),
    "the engine draws at 1.1 times the temperature it reports": ("grpo", drawing(lambda logits: logits / 1.1)),
    "the engine draws of the likeliest 0.95": ("grpo", drawing(top_p(0.95))),
    "the engine draws of the likeliest 0.99": ("grpo", drawing(top_p(0.99))),
    "the engine draws of the 10 likeliest tokens": ("grpo", drawing(top_k(10))),
    "the engine drops tokens below 0.05 of the likeliest": ("grpo", drawing(min_p(0.05))),
    "the engine lowers tokens that came before": ("grpo", penalised),
    "the engine draws each first token greedily": ("grpo", greedy_at_first),
    "the engine draws ends 1.6 times as often": ("grpo", drawing(ends(0.5))),
    "the engine draws a digit half as often": ("grpo", drawing(likelier("1", -0.7))),
    "two completions of a group have the same random numbers each": (
        "grpo",
        replaced(native, "_uniforms", lambda *given, **more: same_draws(*given, **more, sharing=2)),
    ),
    "the engine's norms are not loaded": ("grpo", without("norm")),
    "the engine's embeddings are not loaded": ("grpo, an untied head", without("embed_tokens")),
    "the engine's head is not loaded": ("grpo, an untied head", without("lm_head")),
    "the engine's weights are one update behind": ("grpo", one_behind()),
    "one score in eight is that of the rollout before": ("grpo", scores(now_and_then)),
    "scores are those of the first iteration": ("grpo", scores(Remembered())),
}
