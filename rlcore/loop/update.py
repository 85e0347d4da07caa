"""The learning half of an iteration: scored groups to experience, experience to optimizer steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlcore.checks.audit.audit import Audit
from rlcore.checks.canaries import sample_canary
from rlcore.errors import NonFiniteError
from rlcore.hardware.memory import Footprint, kv_cache_bytes
from rlcore.loop.prompt_schedule import SampledGroups
from rlcore.loop.run import Components, Run
from rlcore.models.saving import atomic_folder
from rlcore.seeding import derive_seed
from rlcore.training.experience import Experience, build_experience
from rlcore.training.update_stats import UpdateStats
from rlcore.types import ScoredRollout, TrainingSample

SKIPPED = "skipped"
SAMPLES = "samples.json"
_FIELDS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def update_policy(
    run: Run, drawn: SampledGroups[list[ScoredRollout]], iteration: int, *, audit: Audit | None = None
) -> dict[str, float]:
    """Compute advantages, then take the optimizer steps. Returns the metrics of both. ``audit``, if given, checks them.

    Raises:
        TrainingError: no rollout can be trained on, or a single sequence does not fit in memory.
        NonFiniteError: NaN or infinity in a reward, or in the losses or gradients of too many steps in a row.
        CanaryError: a training sample is not whole, the end of a turn is not trained on, or the audit found a error.
    """
    parts, learner = run.components, run.components.learner
    experience = build_experience(
        drawn.groups,
        learner.algorithm,
        learner,
        kl=parts.config.kl,
        kl_coefficient=learner.kl_coefficient,
        truncated=parts.config.update.truncated_completions,
        need_old_logprobs=learner.needs_old_logprobs,
    )
    sample_canary(experience.samples, parts.tokenizer.eos_ids)
    asked = run.prompt_schedule.prompts_for(iteration)
    looked = (
        audit.check_before_update(drawn.groups, experience, iteration, asked=asked, replaced=drawn.replaced)
        if audit
        else None
    )
    try:
        stats, memory = measured_update(run, experience.samples, seed=derive_seed(parts.seed, "update", iteration))
    except NonFiniteError as error:
        save_skipped_batch(parts.folder, iteration, experience.samples, [error.what])
        raise
    if stats.skipped:
        kept = save_skipped_batch(parts.folder, iteration, experience.samples, stats.skipped)
        run.recorder.log(f"steps that were skipped: {'; '.join(stats.skipped)}; their samples are in {kept}")
    kl = mean_kl(experience, stats.metrics)
    if audit:
        audit.check_after_update(looked, stats, experience.samples, iteration, mean_kl=kl)
    if not stats.skipped:  # of what was skipped no KL is known
        learner.observe_kl(kl, len(experience.samples))
    # KL in the reward is measured with the rewards, KL in the loss with the loss.
    return {**stats.metrics, **experience.metrics, **memory}


def mean_kl(experience: Experience, metrics: Mapping[str, float]) -> float:
    """The KL to the reference in nats per completion, which the adaptive coefficient follows.

    KL in the reward is summed over the completions. KL in the loss is measured per token, together with the loss.
    """
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in experience.samples)
    return experience.mean_kl + metrics.get("kl/ref", 0.0) * num_tokens / len(experience.samples)


def measured_update(run: Run, samples: Sequence[TrainingSample], *, seed: int) -> tuple[UpdateStats, dict[str, float]]:
    """Do an update. The first one of a run that moves the policy gives ``memory/...`` too.

    An update without signal takes no step, so there are neither gradients nor optimizer states to measure.
    """
    is_known = run.history.has("memory/total_bytes")
    stats, held = run.components.learner.update(samples, seed=seed, measured=not is_known)
    return stats, _memory_metrics(run.components, held) if held and stats.moved else {}


def _memory_metrics(parts: Components, held: Footprint) -> dict[str, float]:
    """The measured memory, and the engine's, which follows from the shapes of its weights, keys and values."""
    policy, config, width = parts.learner.facts, parts.config, parts.engine_dtype.itemsize
    together = min(config.sampling.max_concurrent, config.prompts_per_iteration * config.group_size)
    longest = max(len(prompt.token_ids) for prompt in parts.prompts) + config.sampling.max_new_tokens
    whole = replace(
        held,
        weights=held.weights + policy.num_parameters * width,
        kv_cache=kv_cache_bytes(policy.config, num_sequences=together, num_tokens=longest, bytes_per_number=width),
    )
    return whole.metrics(policy.num_parameters)


def save_skipped_batch(folder: Path, iteration: int, samples: Sequence[TrainingSample], errors: Sequence[str]) -> Path:
    """Write all samples of an iteration, with what its skipped steps met; returns their folder.

    An iteration that a resumed run does again has them already.

    Raises:
        StorageError: the disk is full or refuses.
    """
    target = folder / SKIPPED / f"iteration-{iteration:05d}"
    if not target.exists():
        with atomic_folder(target) as temporary:
            found = {"errors": list(errors), "samples": [_described(sample) for sample in samples]}
            (temporary / SAMPLES).write_text(json.dumps(found), encoding="utf-8")
    return target


def _described(sample: TrainingSample) -> dict[str, Sequence[float | None]]:
    """Its tokens and numbers; None for NaN and infinity, which JSON does not have."""
    numbers = {
        name: [value if math.isfinite(value) else None for value in getattr(sample, name).tolist()] for name in _FIELDS
    }
    return {"prompt_ids": list(sample.prompt_ids), "completion_ids": list(sample.completion_ids), **numbers}
