"""Inputs of the sampling test: features of tokens under the learner's own distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.hardware.precision import at_least_float32, compute_dtype, no_autocast, wide_product
from rlcore.hardware.sharded import device_of, run_forward
from rlcore.models.architectures import logit_scale, pack_for
from rlcore.models.policy import completion_states
from rlcore.text.packing import PackedBatch
from rlcore.training.scoring_models import rollout_sequences
from rlcore.types import Rollout

POWERS = (0.5, 0.7, 0.85, 0.92, 1.08, 1.2, 1.4, 2.0)
LIKELIEST = (2, 10, 50)
NUCLEI = (0.5, 0.8, 0.9, 0.95, 0.99)
FLOORS = (0.02, 0.1)
GROUPS = 64
_TOP = 128  # largest nucleus, in tokens
_CHUNK = 2**19  # probabilities at once: on a CPU, larger buffers leave the processor's cache


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """Inputs of the bets for n tokens of one completion, float64.

    Attributes:
        own: Log-probability of each token.
        above: Mass of likelier tokens.
        equal: Mass of equally likely tokens.
        below: Mass of tokens with a smaller id.
        powers: [n, powers], logarithm of the sum of ``p ** power``.
        tilted: [n, 3], mass of EOS tokens, of tokens of the completion so far, and of tokens of prompt or completion.
        is_tilted: [n, 3], 1 if the token is one of them.
        kept: [n, sets], mass of each truncated distribution.
        is_kept: [n, sets], 1 if the token is in it.
        group: Id group of the token.
        groups: [n, 64], mass of each id group.
    """

    own: Tensor
    above: Tensor
    equal: Tensor
    below: Tensor
    powers: Tensor
    tilted: Tensor
    is_tilted: Tensor
    kept: Tensor
    is_kept: Tensor
    group: Tensor
    groups: Tensor

    def __len__(self) -> int:
        return len(self.own)


def rollout_features(
    policy: Any,
    sampled: Sequence[tuple[Rollout, Sequence[int]]],
    eos_ids: Sequence[int],
    *,
    temperature: float,
    budget: int,
) -> tuple[Features, ...]:
    """Return the features of each rollout's tokens at the given positions, from passes of ``budget`` tokens.

    Any distribution may bet, so no slow path is needed.
    """
    found, scale = dict[int, Features](), temperature / logit_scale(policy.config)

    def add(number: int, logprobs: Tensor) -> None:
        rollout, positions = sampled[number]
        ids, prompt_ids = rollout.completion_ids, rollout.prompt.token_ids
        before, targets = [ids[:position] for position in positions], [ids[position] for position in positions]
        found[number] = features_of(logprobs[list(positions)], targets, eos_ids, before=before, prompt_ids=prompt_ids)

    sequences = rollout_sequences([rollout for rollout, _ in sampled])
    for packed in pack_for(policy, sequences, tokens_per_microbatch=budget) if sequences else ():
        run_forward(policy, partial(_each_distribution, policy, packed, scale, add))
    return tuple(found[number] for number in range(len(sampled)))


def _each_distribution(
    policy: Any, packed: PackedBatch, temperature: float, use: Callable[[int, Tensor], None]
) -> None:
    """Call ``use`` with each number and log-probabilities [T, V], one sequence in memory at a time."""
    states = completion_states(policy, packed.to(device_of(policy)))
    head = policy.get_output_embeddings().weight.to(compute_dtype(policy))
    for number in packed.sequences.tolist():
        own = (packed.sequence_index == number).nonzero()[:, 0].to(states.device)
        with no_autocast(states):
            logits = at_least_float32(wide_product(states[own].to(head.dtype), head.T))
        use(number, (logits / temperature).log_softmax(-1))


def features_of(
    logprobs: Tensor,
    targets: Sequence[int],
    eos_ids: Sequence[int],
    *,
    before: Sequence[Sequence[int]] = (),
    prompt_ids: Sequence[int] = (),
) -> Features:
    """Compute the features of n tokens from the whole distribution ``logprobs`` [n, V] at the run's temperature.

    ``before``: for each token the earlier ones of the completion; empty: none.
    """
    earlier = list(before) or [()] * len(targets)
    marked = [[set(eos_ids)] * len(targets), list(map(set, earlier)), [{*prompt_ids, *each} for each in earlier]]
    count = max(1, _CHUNK // logprobs.shape[-1])
    chunks = [slice(start, start + count) for start in range(0, len(targets), count)] or [slice(0)]
    parts = [_columns_of(logprobs[rows], targets[rows], [sets[rows] for sets in marked]) for rows in chunks]
    return Features(**{name: torch.cat([part[name] for part in parts]).double().cpu() for name in parts[0]})


def _columns_of(
    logprobs: Tensor, targets: Sequence[int], marked: Sequence[Sequence[Collection[int]]]
) -> dict[str, Tensor]:
    """Return the columns of :class:`Features`; ``marked``: the tilted sets of tokens, by kind and row."""
    chosen = torch.tensor(list(targets), dtype=torch.int64, device=logprobs.device)[:, None]
    own, masses = logprobs.gather(-1, chosen), logprobs.exp()
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    top = logprobs.topk(min(_TOP, logprobs.shape[-1])).values
    edges = _edges(top)
    padded = nn.functional.pad(masses, (0, -masses.shape[1] % GROUPS))
    return {
        "own": own[:, 0],
        "above": (masses * (logprobs > own)).sum(-1),
        "equal": (masses * (logprobs == own)).sum(-1),
        "below": (masses * (ids < chosen)).sum(-1),
        "powers": torch.stack([(power * logprobs).exp_().sum(-1).log_() for power in POWERS], dim=-1),
        "tilted": torch.stack([_mass_of(masses, sets) for sets in marked], dim=-1),
        "is_tilted": torch.tensor(
            [[token in each for token, each in zip(targets, sets, strict=True)] for sets in marked]
        ).T,
        "kept": torch.stack([_kept_mass(logprobs, masses, top, edge) for edge in edges], dim=-1),
        "is_kept": torch.cat([own >= edge for edge in edges], dim=-1),
        "group": chosen[:, 0] % GROUPS,
        "groups": padded.reshape(len(padded), padded.shape[1] // GROUPS, GROUPS).sum(1),
    }


def _mass_of(masses: Tensor, tokens: Sequence[Collection[int]]) -> Tensor:
    size = masses.shape[1]
    rows = [number for number, each in enumerate(tokens) for token in each if token < size]
    ids = [token for each in tokens for token in each if token < size]
    index = torch.tensor([rows, ids], dtype=torch.int64, device=masses.device)
    return masses.new_zeros(len(masses)).index_add_(0, index[0], masses[index[0], index[1]])


def _kept_mass(logprobs: Tensor, masses: Tensor, top: Tensor, edge: Tensor) -> Tensor:
    """Return the mass [n] of the tokens at or above ``edge`` [n, 1]; ``top``: the largest log-probabilities."""
    if bool((edge == -torch.inf).all()):
        return masses.sum(-1)
    if bool((edge > top[:, -1:]).all()):
        return (top.exp() * (top >= edge)).sum(-1)
    return (masses * (logprobs >= edge)).sum(-1)


def _edges(top: Tensor) -> list[Tensor]:
    """Return the lowest log-probability [n, 1] of each truncated distribution; -inf if nothing is cut.

    ``top``: the largest log-probabilities, in descending order.
    """
    mass = top.exp().cumsum(-1)
    edges = [top[:, min(count, top.shape[1]) - 1, None] for count in LIKELIEST]
    for top_p in NUCLEI:
        rank = (mass < top_p).sum(-1, keepdim=True)  # the first rank at which the mass reaches top_p
        found = top.gather(-1, rank.clamp(max=top.shape[1] - 1))
        edges.append(found.masked_fill(rank >= top.shape[1], -torch.inf))
    return edges + [top[:, :1] + math.log(fraction) for fraction in FLOORS]
