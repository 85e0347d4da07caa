"""Faults of the engine: its samples, its logprobs, its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.lab import Inject, replaced
from benchmarks.faults.models import scratch
from rlcore.sampling import native
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer


def drawing(sharpen: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    """Sample from other logits than the reported logprobs."""

    def draw(old: Any, logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
        tokens, _ = old(sharpen(logits / temperature), uniforms, temperature=1.0)
        return tokens, (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    return replaced(native, "sample_tokens", draw)


def top_k(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keep the most likely tokens only."""
    return lambda logits: logits.masked_fill(logits < logits.topk(count).values[:, -1:], -torch.inf)


def top_p(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keep the most likely tokens up to a fraction of the mass."""

    def cut(logits: torch.Tensor) -> torch.Tensor:
        chances, order = logits.softmax(-1).sort(descending=True)
        dropped = chances.cumsum(-1) - chances > share
        return logits.masked_fill(dropped.gather(-1, order.argsort(-1)), -torch.inf)

    return cut


def without_end(logits: torch.Tensor) -> torch.Tensor:
    """Drop the tokens that end a completion."""
    return logits.index_fill(1, torch.tensor(ChatTokenizer.load(scratch()).eos_ids), -torch.inf)


def likelier(text: str, by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Raise the log-odds of the token of ``text`` by this number of nats."""

    def lifted(logits: torch.Tensor) -> torch.Tensor:
        (token,) = ChatTokenizer.load(scratch()).encode(text)
        found = logits.clone()
        found[:, token] += by
        return found

    return lifted


def reporting(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Inject:
    """Sample correctly, and report other logprobs."""

    def draw(old: Any, logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Any:
        tokens, _ = old(logits, uniforms, temperature=temperature)
        return tokens, change(logits, temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    return replaced(native, "sample_tokens", draw)


def loading(change: Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor] | None]) -> Inject:
    """Change the received weights; None: ignore them, except for the version."""

    def load(old: Any, self: NativeSampler, state: Any, *, policy_version: int) -> None:
        found = change({name: state[name] for name in state}, policy_version)
        if found is None:
            self.policy_version = policy_version
        else:
            old(self, found, policy_version=policy_version)

    return replaced(NativeSampler, "load_weights", load)


def half_of_it(state: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Keep the first values of the second layer."""
    first = _FIRST.setdefault("state", {name: value.clone() for name, value in state.items()})
    return {name: first[name] if "layers.1" in name else value for name, value in state.items()}


_FIRST: dict[str, dict[str, torch.Tensor]] = {}


def same_draws(old: Any, block: Any, num_tokens: int, *, seed: int, sharing: int = 1000) -> torch.Tensor:
    """Use the same random numbers for ``sharing`` completions of a group."""
    shared = [dataclasses.replace(request, sample_index=request.sample_index // sharing) for request in block]
    found: torch.Tensor = old(shared, num_tokens, seed=seed)
    return found


ENGINE: dict[str, tuple[str, Inject]] = {
    "the engine draws at half the temperature it reports": ("grpo", drawing(lambda logits: logits / 0.5)),
    "the engine draws at 0.8 of the temperature it reports": ("grpo", drawing(lambda logits: logits / 0.8)),
    "the engine draws at 1.3 times the temperature it reports": ("grpo", drawing(lambda logits: logits / 1.3)),
    "the engine draws greedily, and reports as if it drew": ("grpo", drawing(lambda logits: 50.0 * logits)),
    "the engine draws of the 2 likeliest tokens": ("grpo", drawing(top_k(2))),
    "the engine draws of the likeliest 0.8": ("grpo", drawing(top_p(0.8))),
    "the engine draws all tokens alike": ("grpo", drawing(torch.zeros_like)),
    "the engine never draws an end": ("grpo", drawing(without_end)),
    "the engine draws one token twice as often": ("grpo, longer", drawing(likelier("1", 0.7))),
    "the engine reports log-probabilities at temperature 1": (
        "grpo, temperature 0.7",
        reporting(lambda logits, temperature: logits),
    ),
    "the engine reports log-probabilities of a flatter model": (
        "grpo",
        reporting(lambda logits, temperature: 0.97 * logits / temperature),
    ),
    "the engine takes the version, and no weights": ("grpo", loading(lambda state, version: None)),
    "the engine takes the weights of a part": ("grpo", loading(half_of_it)),
    "the engine takes weights times 1.01": (
        "grpo",
        loading(lambda state, version: {name: 1.01 * value for name, value in state.items()}),
    ),
    "the engine completes each prompt's neighbour": (
        "grpo",
        replaced(
            native,
            "decode",
            lambda old, model, prompts, *rest, **more: old(model, [*prompts[4:], *prompts[:4]], *rest, **more),
        ),
    ),
    "a group's completions have the same random numbers": ("grpo", replaced(native, "_uniforms", same_draws)),
    "every iteration has the same random numbers": (
        "grpo",
        replaced(native, "_uniforms", lambda old, *given, seed: old(*given, seed=7)),
    ),
}
