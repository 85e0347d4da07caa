"""The learning half of an iteration: scored groups to experience, experience to optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlcore.audit.audit import Audit
from rlcore.canaries import sample_canary
from rlcore.loop.run import Parts, Run
from rlcore.memory import Footprint, kv_cache_bytes
from rlcore.seeding import derive_seed
from rlcore.training.experience import Experience, build_experience
from rlcore.training.totals import UpdateStats
from rlcore.types import ScoredRollout, TrainingSample


def update_policy(
    run: Run, groups: Sequence[Sequence[ScoredRollout]], iteration: int, *, audit: Audit | None = None
) -> dict[str, float]:
    """Advantages, then the optimizer steps; gives the metrics of both. ``audit`` looks on, if one is given.

    Raises:
        TrainingError: not one rollout can be trained on, or memory does not hold a single sequence.
        NonFiniteError: NaN or infinity in a reward, a loss or a gradient.
        CanaryError: a training sample is not whole, the end of a turn is not trained on, or the audit found a fault.
    """
    parts, learner = run.parts, run.parts.learner
    experience = build_experience(
        groups,
        learner.algorithm,
        learner,
        kl=parts.config.kl,
        kl_coefficient=learner.kl_coefficient,
        truncated=parts.config.update.truncated,
        need_old_logprobs=learner.needs_old_logprobs,
    )
    sample_canary(experience.samples, parts.tokenizer.eos_ids)
    looked = audit.before(groups, experience.samples, iteration) if audit else None
    stats, memory = measured_update(run, experience.samples, seed=derive_seed(parts.seed, "update", iteration))
    if audit:
        audit.after(looked, stats, experience.samples, iteration)
    learner.observe_kl(mean_kl(experience, stats.metrics), len(experience.samples))
    # KL in the reward is measured while the rewards are made, KL in the loss while the loss is.
    return {**stats.metrics, **experience.metrics, **memory}


def mean_kl(experience: Experience, metrics: Mapping[str, float]) -> float:
    """Nats per completion to the reference, what the adaptive coefficient looks at.

    KL in the reward is summed over the completions; KL in the loss is measured per token, while the loss is.
    """
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in experience.samples)
    return experience.mean_kl + metrics.get("kl/ref", 0.0) * num_tokens / len(experience.samples)


def measured_update(run: Run, samples: Sequence[TrainingSample], *, seed: int) -> tuple[UpdateStats, dict[str, float]]:
    """Do an update, and give ``memory/...`` where it is the first of the run that moves the policy; else no metrics.

    An update without signal takes no step: it has neither gradients nor an optimizer's state to be measured.
    """
    is_known = any("memory/total_bytes" in row for row in run.history)
    stats, held = run.parts.learner.update(samples, seed=seed, measured=not is_known)
    return stats, _memory_metrics(run.parts, held) if held and stats.moved else {}


def _memory_metrics(parts: Parts, held: Footprint) -> dict[str, float]:
    """The engine's copy of the weights and its cache of keys and values are worked out from their shapes."""
    policy, config, width = parts.learner.facts, parts.config, parts.engine_dtype.itemsize
    together = min(config.sampling.max_concurrent, config.prompts_per_iteration * config.group_size)
    longest = max(len(prompt.token_ids) for prompt in parts.prompts) + config.sampling.max_new_tokens
    whole = replace(
        held,
        weights=held.weights + policy.num_parameters * width,
        kv_cache=kv_cache_bytes(policy.config, num_sequences=together, num_tokens=longest, bytes_per_number=width),
    )
    return whole.metrics(policy.num_parameters)
