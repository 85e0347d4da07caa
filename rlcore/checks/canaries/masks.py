"""Canary of completions and loss masks: completions are complete, and the end of each turn is trained on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlcore.errors import CanaryError
from rlcore.types import Rollout, TrainingSample, turn_spans


def mask_canary(rollouts: Sequence[Rollout], eos_ids: Collection[int]) -> None:
    """Check that completions have one entry per token in each field, and that each turn's EOS is trained on.

    Tool output between two turns is masked, including any EOS in it; no completion ends with it. A turn of an agent may
    end at a stop string instead; all tokens that were sampled for it are trained on. The samples of an episode have one
    prompt, and at least one is trained on. A CanaryError names the first error of each rollout.
    """
    errors = [f"{r.prompt.prompt_id}: {error}" for r in rollouts if (error := _episode_error(r, eos_ids))]
    _require_none(errors, len(rollouts), "rollouts")


def sample_canary(samples: Sequence[TrainingSample], eos_ids: Collection[int], *, is_agents: bool = False) -> None:
    """Apply the checks of :func:`mask_canary` to training samples, whose loss mask the update uses.

    ``is_agents``: agents played the episodes.
    """
    errors = [f"sample {i}: {error}" for i, s in enumerate(samples) if (error := _sample_error(s, eos_ids, is_agents))]
    _require_none(errors, len(samples), "training samples")


def _episode_error(episode: Rollout, eos_ids: Collection[int]) -> str:
    """Return the first error of an episode's samples, or "". A sample without a token of the policy is not trained."""
    if any(branch.branches or branch.prompt.prompt_id != episode.prompt.prompt_id for branch in episode.branches):
        return "a branch has branches of its own, or is of another prompt"
    trained, count = sum(sum(sample.loss_mask) for sample in episode.samples), episode.num_sampled
    if count is not None and trained != count:
        return f"{trained} tokens are trained on, and {count} were sampled"
    errors = (_rollout_error(sample, eos_ids, count is not None) for sample in episode.trained_samples or (episode,))
    return next(filter(None, errors), "")


def _rollout_error(rollout: Rollout, eos_ids: Collection[int], is_agents: bool) -> str:
    lengths = {len(rollout.completion_ids), len(rollout.sampler_logprobs), len(rollout.loss_mask)}
    if len(lengths) > 1:
        return f"tokens, log-probabilities and loss mask have different lengths {sorted(lengths)}"
    if not any(rollout.loss_mask):
        return "no token is trained on"
    if rollout.finish_reason == "stop" and not is_agents and rollout.completion_ids[-1] not in eos_ids:
        return "finish_reason is stop, but its last token is no EOS"
    return _turns_error(rollout.completion_ids, rollout.loss_mask, eos_ids, is_agents)


def _sample_error(sample: TrainingSample, eos_ids: Collection[int], is_agents: bool) -> str:
    per_token = (
        sample.loss_mask,
        sample.sampler_logprobs,
        sample.old_logprobs,
        sample.ref_logprobs,
        sample.advantages,
        sample.values,
        sample.returns,
    )
    lengths = {len(sample.completion_ids), *map(len, per_token)}
    if len(lengths) > 1:
        return f"its tensors have different lengths {sorted(lengths)}"
    if not bool(sample.loss_mask.any()):
        return "no token is trained on"
    return _turns_error(sample.completion_ids, sample.loss_mask.tolist(), eos_ids, is_agents)


def _turns_error(
    completion_ids: Sequence[int], loss_mask: Sequence[bool], eos_ids: Collection[int], is_agents: bool
) -> str:
    if not loss_mask[-1]:
        is_eos = completion_ids[-1] in eos_ids
        return "the EOS token is masked out of the loss" if is_eos else "it ends with tokens that are not the policy's"
    for number, (start, end) in enumerate(turn_spans(loss_mask), start=1):
        if any(token in eos_ids for token in completion_ids[start : end - 1]):
            return f"turn {number} continues after its EOS"
        if end < len(completion_ids) and not is_agents and completion_ids[end - 1] not in eos_ids:
            return f"turn {number} precedes tool output, but does not end with EOS"
    return ""


def _require_none(errors: Sequence[str], total: int, what: str) -> None:
    if errors:
        shown = "\n    ".join(errors[:8])
        raise CanaryError(f"{len(errors)} of {total} {what} are broken:\n    {shown}", fix="check the engine's output")
