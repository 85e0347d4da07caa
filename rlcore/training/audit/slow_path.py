"""Slow path of the audit: plain forward passes of single sequences, and trials of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlcore.hardware.precision import compute_dtype
from rlcore.seeding import shuffled
from rlcore.text.packing import TokenSequence
from rlcore.training.audit.features import Features, rollout_features
from rlcore.training.audit.passes import picked, plain_logprobs, plain_values
from rlcore.training.audit.reference_impl import row_of
from rlcore.training.audit.trials import Trial, own_tokens, run_trials
from rlcore.training.learner import Learner
from rlcore.types import Rollout, TrainingSample

MAX_TOKENS = 256  # audited tokens per completion, because their logits [tokens, vocabulary] are in memory
_FIELDS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlowPathResult:
    """Results of the slow path for S samples and R rollouts.

    ``positions``: audited tokens of each sample; ``logprobs``, ``ref_logprobs``, ``values``: at these positions, empty
    without such a model; ``next_values``: the critic's value beyond each end. ``sampled_positions``, ``features``:
    inputs of the sampling test, per rollout. ``trial``: step on the unchanged samples; ``random_trial``: on random
    numbers, None if these were at bounds.
    """

    positions: tuple[tuple[int, ...], ...]
    logprobs: tuple[Tensor, ...]
    ref_logprobs: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    next_values: tuple[float, ...]
    sampled_positions: tuple[tuple[int, ...], ...]
    features: tuple[Features, ...]
    trial: Trial | None
    random_trial: Trial | None


@torch.no_grad()
def run_slow_path(
    learner: Learner,
    reference: Any,
    samples: Sequence[TrainingSample],
    rollouts: Sequence[Rollout] = (),
    *,
    eos_ids: Sequence[int],
    seed: int,
) -> SlowPathResult:
    """Audit samples before the update, and ``rollouts`` for the sampling test. Weights and gradients stay unchanged."""
    temperature, critic = learner.config.sampling.temperature, learner.critic
    sequences = [_sequence(sample) for sample in samples]
    positions = [_choose(sample.loss_mask.tolist(), seed, number) for number, sample in enumerate(samples)]
    pairs = list(zip(sequences, positions, strict=True))

    def score(model: Any) -> tuple[Tensor, ...]:
        found = [picked(plain_logprobs(model, *each, temperature), *each) for each in pairs]
        return tuple(each.float().cpu() for each in found)

    values, next_values = list[Tensor](), list[float]()
    for sequence, own in pairs if critic is not None else ():
        found = plain_values(critic, sequence, [*own, len(sequence.completion_ids)]).float().cpu()  # type: ignore[arg-type]
        values.append(found[:-1])
        next_values.append(float(found[-1]))
    sampled = [(rollout, _choose(rollout.loss_mask, seed, number)) for number, rollout in enumerate(rollouts)]
    row, cut = row_of(learner.config), [_cut(sample) for sample in samples]
    tried = run_trials(learner, row, cut, seed=seed) if row else None
    is_exact = compute_dtype(learner.policy).itemsize >= 4  # else the trials had another precision
    is_whole = [len(own_tokens(one)) == len(own_tokens(other)) for one, other in zip(samples, cut, strict=True)]
    return SlowPathResult(
        positions=tuple(positions),
        logprobs=tried.logprobs if tried and is_exact and all(is_whole) else score(learner.policy),
        ref_logprobs=score(reference) if reference is not None else (),
        values=tuple(values),
        next_values=tuple(next_values),
        sampled_positions=tuple(chosen for _, chosen in sampled),
        features=rollout_features(
            learner.policy, sampled, eos_ids, temperature=temperature, budget=learner.tokens_per_microbatch
        ),
        trial=tried.unchanged if tried else None,
        random_trial=tried.random if tried else None,
    )


def _sequence(sample: TrainingSample) -> TokenSequence:
    return TokenSequence(prompt_ids=sample.prompt_ids, completion_ids=sample.completion_ids)


def _choose(mask: Sequence[bool], seed: int, number: int) -> tuple[int, ...]:
    own = [index for index, is_own in enumerate(mask) if is_own]
    order = shuffled(len(own), seed, "places", number)[:MAX_TOKENS]
    return tuple(sorted(own[index] for index in order))


def _cut(sample: TrainingSample) -> TrainingSample:
    """Truncate a sample to a length whose logits fit into memory, from its first token of the policy.

    What precedes it, an answer that another sample trains, joins the prompt.
    """
    start = sample.loss_mask.tolist().index(True)
    kept = slice(start, start + MAX_TOKENS)
    cut = {name: getattr(sample, name)[kept] for name in _FIELDS}
    prompt_ids = sample.prompt_ids + sample.completion_ids[:start]
    return replace(sample, prompt_ids=prompt_ids, completion_ids=sample.completion_ids[kept], **cut)
