"""Update of an iteration: scored groups to experience, experience to optimizer steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlcore.checks.audit.audit import Audit
from rlcore.checks.audit.prompt_checks import is_agents
from rlcore.checks.canaries.masks import sample_canary
from rlcore.components import Components
from rlcore.errors import NonFiniteError
from rlcore.hardware.memory import Footprint
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.loop.run import Run, counted
from rlcore.loop.weight_sync import verify_rollouts
from rlcore.models.memory_meter import kv_cache_bytes
from rlcore.models.saving import atomic_folder
from rlcore.seeding import derive_seed
from rlcore.training.experience import Experience, build_experience
from rlcore.training.update_stats import UpdateStats
from rlcore.types import ScoredRollout, TrainingSample

SKIPPED = "skipped"
SAMPLES = "samples.json"
_FIELDS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def update_policy(
    run: Run, sampled: SampledGroups[list[ScoredRollout]], iteration: int, *, audit: Audit | None = None
) -> dict[str, float]:
    """Compute advantages, take the optimizer steps, and return the metrics of both.

    Raises:
        TrainingError: No rollout can be trained on, or a single sequence does not fit in memory.
        NonFiniteError: NaN or infinity in a reward, or in too many consecutive losses or gradients.
        StaleSamplerError, CanaryError: A canary or the audit found an error.
    """
    components, learner = run.components, run.components.learner
    experience = build_experience(
        sampled.groups,
        learner.algorithm,
        learner,
        kl=components.config.kl,
        kl_coefficient=learner.kl_coefficient,
        truncated=components.config.update.truncated_completions,
        need_old_logprobs=learner.config.update.needs_old_logprobs,
    )
    with counted(run.check_seconds, "canaries"):
        by_agents = is_agents([item for group in sampled.groups for item in group])
        sample_canary(experience.samples, components.tokenizer.eos_ids, is_agents=by_agents)
    if audit:
        scheduled = run.prompt_schedule.prompts_for(iteration)
        audit.check_before_update(sampled.groups, experience, iteration, scheduled=scheduled, replaced=sampled.replaced)
    try:
        stats, memory = measured_update(run, experience.samples, seed=derive_seed(components.seed, "update", iteration))
    except NonFiniteError as error:
        save_skipped_batch(components.folder, iteration, experience.samples, [error.what])
        raise
    if stats.skipped:
        kept = save_skipped_batch(components.folder, iteration, experience.samples, stats.skipped)
        run.recorder.log(f"skipped steps: {'; '.join(stats.skipped)}; samples saved to {kept}")
    agreement = verify_rollouts(run, [item.rollout for group in sampled.groups for item in group], stats)
    kl = mean_kl(experience, stats.metrics)
    if audit:
        audit.check_after_update(stats, experience.samples, iteration, mean_kl=kl)
    if not stats.skipped:  # the KL of skipped steps is unknown
        learner.observe_kl(kl, experience.num_episodes)
    # KL in the reward is measured with the rewards, KL in the loss with the loss.
    return {**stats.metrics, **experience.metrics, **memory, **agreement}


def mean_kl(experience: Experience, metrics: Mapping[str, float]) -> float:
    """Return the KL to the reference policy in nats per episode, which the adaptive coefficient follows.

    KL in the reward is summed over each episode; KL in the loss is measured per token.
    """
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in experience.samples)
    return experience.mean_kl + metrics.get("kl/ref", 0.0) * num_tokens / experience.num_episodes


def measured_update(run: Run, samples: Sequence[TrainingSample], *, seed: int) -> tuple[UpdateStats, dict[str, float]]:
    """Update the policy. The first update of a run that moves the policy also returns ``memory/...``.

    An update without signal takes no step, so it has no gradients or optimizer states to measure.
    """
    is_known = run.history.has("memory/total_bytes")
    stats, held = run.components.learner.update(samples, seed=seed, measure_memory=not is_known)
    return stats, _memory_metrics(run.components, held) if held and stats.moved else {}


def _memory_metrics(components: Components, held: Footprint) -> dict[str, float]:
    policy, config, width = components.learner.facts, components.config, components.engine_dtype.itemsize
    together = min(config.sampling.max_concurrent, config.prompts_per_iteration * config.group_size)
    longest = max(len(prompt.token_ids) for prompt in components.prompts) + config.sampling.max_new_tokens
    whole = replace(
        held,
        weights=held.weights + policy.num_parameters * width,
        kv_cache=kv_cache_bytes(policy.config, num_sequences=together, num_tokens=longest, bytes_per_number=width),
    )
    return whole.metrics(policy.num_parameters)


def save_skipped_batch(folder: Path, iteration: int, samples: Sequence[TrainingSample], errors: Sequence[str]) -> Path:
    """Save all samples of an iteration with the errors of its skipped steps, and return their folder.

    An iteration that a resumed run repeats has them already.

    Raises:
        StorageError: The disk is full or write-protected.
    """
    target = folder / SKIPPED / f"iteration-{iteration:05d}"
    if not target.exists():
        with atomic_folder(target) as temporary:
            saved = {"errors": list(errors), "samples": [_to_json(sample) for sample in samples]}
            (temporary / SAMPLES).write_text(json.dumps(saved), encoding="utf-8")
    return target


def _to_json(sample: TrainingSample) -> dict[str, int | Sequence[float | None]]:
    """Return tokens and numbers of a sample; None for NaN and infinity, which JSON does not have."""
    numbers = {
        name: [value if math.isfinite(value) else None for value in getattr(sample, name).tolist()] for name in _FIELDS
    }
    tokens = {"prompt_ids": list(sample.prompt_ids), "completion_ids": list(sample.completion_ids)}
    return {"episode": sample.episode, "group": sample.group, **tokens, **numbers}
