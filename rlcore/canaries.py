"""Run-time checks that stop a silently broken run: a reward stuck at one value, stale weights, a masked-out EOS."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from rlcore.errors import CanaryError, StaleSamplerError
from rlcore.rewards.answers import closing
from rlcore.rewards.base import CORRECT_FROM, RewardFn
from rlcore.rewards.math_answer import find_reference
from rlcore.rewards.plain_numbers import parse_number
from rlcore.sampling.base import Sampler
from rlcore.types import Prompt, Rollout, Score, TrainingSample, turn_spans

WRONG_UP_TO = 0.5
LEFT_OVER = 0.1  # of the way from the old to the new log-probabilities, for a sync that counts as whole
_NO_ANSWER = "this is no answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardProbe:
    """A completion whose verdict is known."""

    rollout: Rollout
    is_right: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncProbe:
    """A text whose log-probabilities engine and trainer have to agree on."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SyncLimits:
    """``max_abs``: bound on the difference of any token; ``mean_abs``: what rounding alone makes of the mean (nats).

    ``shows_any_step``: no step is too small to change the log-probabilities. In half precision a small one vanishes in
    rounding, and an engine that took it may look like one that did not.
    """

    max_abs: float
    mean_abs: float
    shows_any_step: bool


# A sound engine showed max 4.6e-5 and mean 6e-6 against the trainer in float32, 0.24 and 0.05 in bfloat16.
SYNC_LIMITS: Mapping[torch.dtype, SyncLimits] = MappingProxyType(
    {
        torch.float64: SyncLimits(1e-3, 5e-5, True),
        torch.float32: SyncLimits(1e-3, 5e-5, True),
        torch.bfloat16: SyncLimits(0.5, 0.1, False),
        torch.float16: SyncLimits(0.1, 0.02, False),
    }
)


def reward_canary(reward: RewardFn, prompts: Sequence[Prompt], *, prefill: str = "") -> None:
    """Known right answers score right and known wrong ones wrong, or the run stops.

    Right is the reference itself; wrong are no answer at all, a text, and the reference's number plus one. Where the
    chat template begins the thinking (``prefill``), they end it first.

    Raises:
        CanaryError: names every probe that was judged wrongly or not at all.
    """
    check_probes(reward, [probe for prompt in prompts for probe in reward_probes(prompt, prefill=prefill)])


def reward_probes(prompt: Prompt, *, prefill: str = "") -> list[RewardProbe]:
    """One right completion of ``prompt`` and several wrong ones."""
    answer = known_answer(prompt)
    wrong = ["", _tagged(_NO_ANSWER)]
    number = parse_number(answer)
    if number is not None:
        wrong.append(_tagged(f"{number.value + 1}{'%' if number.is_percent else ''}"))
    texts = {_tagged(answer): True} | dict.fromkeys(wrong, False)
    return [
        RewardProbe(rollout=_completion(prompt, closing(prefill) + text), is_right=is_right)
        for text, is_right in texts.items()
    ]


def check_probes(reward: RewardFn, probes: Sequence[RewardProbe]) -> None:
    """Right probes score 0.99 or more, wrong ones 0.5 or less.

    Raises:
        CanaryError: there is no probe, or one was judged wrongly or not at all.
    """
    if not probes:
        raise CanaryError("the reward canary has no probes", fix="give it prompts with references")
    scores = reward([probe.rollout for probe in probes])
    faults = [fault for probe, score in zip(probes, scores, strict=True) if (fault := _misjudged(probe, score))]
    if faults:
        raise CanaryError(
            f"the reward {reward.name!r} misjudges {len(faults)} of {len(probes)} known answers:\n    "
            + "\n    ".join(faults),
            fix="check that the reward's kind fits the prompts' references; nothing has been trained",
        )


def known_answer(prompt: Prompt) -> str:
    """The right answer: a code task's ``solution`` in a fenced block, a procedural problem's ``entry.answer``, else the
    reference's own answer.
    """
    if prompt.reference.startswith("{"):
        try:
            problem = json.loads(prompt.reference)
            if "solution" in problem:
                return f"\n```python\n{problem['solution']}\n```\n"
            return str(problem["entry"]["answer"])
        except (ValueError, KeyError, TypeError):
            pass  # mathematics may start with a brace too: {1, 2}
    return find_reference(prompt.reference)


def sync_canary(
    sampler: Sampler,
    learner_logprobs: Callable[[SyncProbe], Sequence[float]],
    probes: Sequence[SyncProbe],
    *,
    policy_version: int,
    before: Sequence[Sequence[float]] | None,
    dtype: torch.dtype,
) -> dict[str, float]:
    """The engine serves the learner's weights: same version, same log-probabilities, and moved if the weights did.

    ``before`` are the engine's log-probabilities of the probes before the sync; None where the learner took no step
    since the last one. Besides the bound of ``dtype`` on every token, the engine has to be ten times as close to the
    learner as it was before: a small step that arrived in one of the layers stays within any fixed bound.

    Returns:
        ``sync/max_abs`` and, with ``before``, ``sync/moved``, in nats.

    Raises:
        StaleSamplerError: another policy version, or log-probabilities that did not move at all.
        CanaryError: log-probabilities that differ from the learner's, or are not finite.
    """
    if sampler.policy_version != policy_version:
        raise StaleSamplerError(
            f"the engine serves policy version {sampler.policy_version}, the learner has {policy_version}",
            fix="the weights were not loaded; see the engine's log",
        )
    engine = _flat([sampler.logprobs(probe.prompt_ids, probe.completion_ids, temperature=1.0) for probe in probes])
    learner = _flat([learner_logprobs(probe) for probe in probes])
    limits = SYNC_LIMITS[dtype]
    figures = {"sync/max_abs": _agreement(engine, learner, limits)}
    if before is not None:
        figures["sync/moved"] = _movement(engine, learner, _flat(before), limits)
    return figures


def mask_canary(rollouts: Sequence[Rollout], eos_ids: Collection[int]) -> None:
    """Every completion is whole: not empty, one entry per token in each field, and the EOS of every turn is trained on.

    Tool output between two turns is masked out, with whatever EOS it holds; no completion ends with it.

    Raises:
        CanaryError: names the first fault of each rollout.
    """
    faults = [f"{r.prompt.prompt_id}: {fault}" for r in rollouts if (fault := _rollout_fault(r, eos_ids))]
    _require_none(faults, len(rollouts), "rollouts")


def sample_canary(samples: Sequence[TrainingSample], eos_ids: Collection[int]) -> None:
    """The same of training samples, whose loss mask is what the update sees.

    Raises:
        CanaryError: names the first fault of each sample.
    """
    faults = [f"sample {i}: {fault}" for i, s in enumerate(samples) if (fault := _sample_fault(s, eos_ids))]
    _require_none(faults, len(samples), "training samples")


def _misjudged(probe: RewardProbe, score: Score) -> str:
    reference, text = probe.rollout.prompt.reference[:80], probe.rollout.text[:80]
    said = f"scored {score.value}" if score.value is not None else f"was not scored: {score.error}"
    if score.value is not None and (
        score.value >= CORRECT_FROM if probe.is_right else score.value <= WRONG_UP_TO  # NaN fails both
    ):
        return ""
    return f"{'right' if probe.is_right else 'wrong'} answer {text!r} for {reference!r} {said}"


def _agreement(engine: torch.Tensor, learner: torch.Tensor, limits: SyncLimits) -> float:
    """The largest difference of a token; it has to be within the bound."""
    if engine.shape != learner.shape or not len(engine):
        raise CanaryError(f"the probes have {len(learner)} tokens for the learner and {len(engine)} for the engine")
    worst = float((engine - learner).abs().max())
    if not worst <= limits.max_abs:  # NaN is a fault too
        raise CanaryError(
            f"the engine's log-probabilities differ from the learner's by {worst:.3g} (bound {limits.max_abs:g})",
            fix="compare precision, temperature and weights of the two; a sync may have been partial",
        )
    return worst


def _movement(engine: torch.Tensor, learner: torch.Tensor, before: torch.Tensor, limits: SyncLimits) -> float:
    """How far the engine moved; it has to have left its old weights behind and to have arrived at the learner's."""
    if engine.shape != before.shape:
        raise CanaryError(f"the probes have {len(engine)} tokens after the sync and had {len(before)} before")
    if limits.shows_any_step and torch.equal(engine, before):
        raise StaleSamplerError("the weights moved, the engine did not", fix="its load_weights changes nothing")
    mean, mean_before = float((engine - learner).abs().mean()), float((before - learner).abs().mean())
    if not mean <= max(limits.mean_abs, LEFT_OVER * mean_before):
        raise CanaryError(
            f"the engine is {mean:.3g} from the learner after the sync and was {mean_before:.3g} before",
            fix="only a part of the weights arrived",
        )
    return float((engine - before).abs().max())


def _rollout_fault(rollout: Rollout, eos_ids: Collection[int]) -> str:
    lengths = {len(rollout.completion_ids), len(rollout.sampler_logprobs), len(rollout.loss_mask)}
    if len(lengths) > 1:
        return f"tokens, log-probabilities and loss mask have different lengths {sorted(lengths)}"
    if not any(rollout.loss_mask):
        return "no token is trained on"
    if rollout.finish_reason == "stop" and rollout.completion_ids[-1] not in eos_ids:
        return "it ended by itself, but its last token is no EOS"
    return _turns_fault(rollout.completion_ids, rollout.loss_mask, eos_ids)


def _sample_fault(sample: TrainingSample, eos_ids: Collection[int]) -> str:
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
    return _turns_fault(sample.completion_ids, sample.loss_mask.tolist(), eos_ids)


def _turns_fault(completion_ids: Sequence[int], loss_mask: Sequence[bool], eos_ids: Collection[int]) -> str:
    """What is wrong with the turns that a mask makes: each but the last ends with an EOS, and the last is the end."""
    if not loss_mask[-1]:
        is_eos = completion_ids[-1] in eos_ids
        return "the EOS token is masked out of the loss" if is_eos else "it ends with tokens that are not the policy's"
    for number, (start, end) in enumerate(turn_spans(loss_mask), start=1):
        if any(token in eos_ids for token in completion_ids[start : end - 1]):
            return f"turn {number} goes on after its EOS"
        if end < len(completion_ids) and completion_ids[end - 1] not in eos_ids:
            return f"turn {number} is followed by tool output, but ends with no EOS"
    return ""


def _require_none(faults: Sequence[str], total: int, what: str) -> None:
    if faults:
        shown = "\n    ".join(faults[:8])
        raise CanaryError(f"{len(faults)} of {total} {what} are broken:\n    {shown}", fix="check the engine's output")


def _tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _completion(prompt: Prompt, text: str) -> Rollout:
    return Rollout(
        prompt=prompt,
        completion_ids=(0,),
        sampler_logprobs=(0.0,),
        loss_mask=(True,),
        policy_version=0,
        finish_reason="stop",
        text=text,
    )


def _flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)
