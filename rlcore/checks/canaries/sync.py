"""Does the engine serve the learner's weights, as the learner would? Asked before the first update and after each sync.

Three proofs, of which none can do the others' work:

1. the version that the engine names;
2. its weights, part by part: they are the learner's in the engine's precision, last bits included. This sees a stale
   part however small the step was, and is silent where a step vanished in rounding;
3. completions that it samples now, at the run's temperature: the log-probabilities that it reports are the learner's,
   up to rounding. This sees what is computed otherwise from the right weights. See ``agreement``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from rlcore.checks.canaries.agreement import LogprobAgreement, Spread, agreement, check_agreement
from rlcore.distributed.sharded import device_of, run_forward
from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.models.batching import pack_for
from rlcore.models.policy import completion_logprobs, scatter_tokens
from rlcore.sampling.base import Sampler, SamplingParams
from rlcore.text.packing import TokenSequence
from rlcore.types import Prompt, Rollout

NUM_PROBES = 8  # completions
PROBE_TOKENS = 32  # of one at most: 256 tokens find a temperature to 0.3 % in bfloat16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedWeights:
    """What an engine has to agree with.

    ``state``: the learner's weights, under ``policy_version``. ``score``: from N completions the learner's
    log-probability and entropy of each of their tokens at ``temperature``, nats, one after another, [T] each.
    ``dtype``: the coarser precision of engine and learner.
    """

    state: Mapping[str, torch.Tensor]
    policy_version: int
    score: Callable[[Sequence[Rollout]], tuple[torch.Tensor, torch.Tensor]]
    temperature: float
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCalibration:
    """What a sound engine showed before any update.

    ``noise``: how far rounding alone sets it apart from the learner. ``hidden``: parts of the model whose weights it
    keeps in a form that cannot be compared.
    """

    noise: Spread
    unverified: frozenset[str]


def sample_probes(engine: Sampler, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int) -> list[Rollout]:
    """One completion of each of the first ``NUM_PROBES`` prompts, as the engine samples them now.

    Raises:
        CanaryError: the engine completes none of them.
    """
    short = SamplingParams(
        temperature=params.temperature, max_new_tokens=min(params.max_new_tokens, PROBE_TOKENS), num_samples=1
    )
    made = [item for group in engine.sample(prompts[:NUM_PROBES], short, seed=seed) for item in group]
    probes = [item for item in made if isinstance(item, Rollout)]
    if not probes:
        reason = "; ".join(sorted({item.reason for item in made if not isinstance(item, Rollout)}))
        raise CanaryError(f"the engine completes none of {len(made)} probes: {reason}")
    return probes


@torch.no_grad()
def token_scores(
    model: PreTrainedModel, rollouts: Sequence[Rollout], *, temperature: float, tokens_per_microbatch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every token of the completions, one after another, float32 [T] on the CPU."""
    texts = [TokenSequence(prompt_ids=r.prompt.token_ids, completion_ids=r.completion_ids) for r in rollouts]
    logprobs, entropies = ([torch.empty(len(text.completion_ids)) for text in texts] for _ in range(2))
    for packed in pack_for(model, texts, tokens_per_microbatch=tokens_per_microbatch):
        batch = packed.to(device_of(model))
        found = run_forward(model, partial(completion_logprobs, model, batch, temperature=temperature))
        for values, results in zip(found, (logprobs, entropies), strict=True):
            scatter_tokens(values, batch, results)
    return torch.cat(logprobs), torch.cat(entropies)


def calibrate_engine(engine: Sampler, probes: Sequence[Rollout], truth: ExpectedWeights) -> EngineCalibration:
    """Before any update engine and learner hold the same weights: what sets them apart now is rounding, or a error.

    Raises:
        StaleSamplerError, CanaryError: as :func:`sync_canary`.
    """
    found = _compare(engine, probes, truth)
    check_agreement(found, noise=None, dtype=truth.dtype)
    hidden = frozenset(engine.differing_parts(truth.state) or ())
    return EngineCalibration(noise=Spread(found.mean_odds, found.high_odds), unverified=hidden)


def sync_canary(
    engine: Sampler, probes: Sequence[Rollout], truth: ExpectedWeights, baseline: EngineCalibration
) -> dict[str, float]:
    """After a sync: the version, the weights, and the log-probabilities of ``probes``, which were sampled after it.

    Returns:
        ``sync/logprob_max_diff``, ``sync/log_odds_mean_diff``, ``sync/temperature_ratio`` and
        ``sync/unverified_modules``; see the glossary.

    Raises:
        StaleSamplerError: another policy version, or other weights than the learner's.
        CanaryError: log-probabilities that rounding does not explain, or another temperature.
    """
    _require_version(truth.policy_version, engine, probes)
    weights_canary(engine, truth.state, baseline, policy_version=truth.policy_version)
    found = _compare(engine, probes, truth)
    check_agreement(found, noise=baseline.noise, dtype=truth.dtype)
    return {
        "sync/logprob_max_diff": found.max_abs,
        "sync/log_odds_mean_diff": found.mean_odds,
        "sync/temperature_ratio": found.temperature,
        "sync/unverified_modules": float(len(baseline.unverified)),
    }


def weights_canary(
    engine: Sampler, state: Mapping[str, torch.Tensor], baseline: EngineCalibration, *, policy_version: int
) -> None:
    """The version and the weights alone: of a learner that is elsewhere by now, nothing else can be asked.

    Raises:
        StaleSamplerError: another policy version, or other weights than ``state``.
    """
    _require_version(policy_version, engine)
    differing = set(engine.differing_parts(state) or ()) - baseline.unverified
    if differing:
        raise StaleSamplerError(
            f"the engine's weights are not the learner's in {len(differing)} parts: {', '.join(sorted(differing)[:8])}",
            where=f"policy version {policy_version}",
            fix="the new weights did not arrive completely; see the engine's log",
        )


def _compare(engine: Sampler, probes: Sequence[Rollout], truth: ExpectedWeights) -> LogprobAgreement:
    _require_version(truth.policy_version, engine, probes)
    reported = torch.tensor([value for probe in probes for value in probe.sampler_logprobs])
    return agreement(reported, *truth.score(probes), temperature=truth.temperature)


def _require_version(policy_version: int, engine: Sampler, probes: Sequence[Rollout] = ()) -> None:
    others = {engine.policy_version, *(probe.policy_version for probe in probes)} - {policy_version}
    if others:
        raise StaleSamplerError(
            f"the engine serves policy version {min(others)}, the learner has {policy_version}",
            fix="the weights were not loaded; see the engine's log",
        )
