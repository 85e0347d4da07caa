"""Canary of rewards: known answers if there are any, else the order of scores and finite values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.checks.canaries.known_answers import known_answer, prompts_for
from rlcore.errors import CanaryError, ConfigError, RlcoreError
from rlcore.rewards.answers import required_prefix
from rlcore.rewards.base import VERIFIERS, EnvironmentReward, RewardFn, unwrap_reward
from rlcore.rewards.format import FormatReward
from rlcore.rewards.judge import JudgeReward
from rlcore.rewards.mix import WeightedReward, scores_of
from rlcore.rewards.reward_model import RewardModelReward
from rlcore.rewards.units import parse_number
from rlcore.rewards.user_function import FunctionReward
from rlcore.types import Prompt, Rollout, Score, is_correct

WRONG_UP_TO = 0.5
NUM_SAMPLES = 4  # completions for the order check; few, because a term may be a paid service
_NO_ANSWER = "this is no answer"
# Scores that do not depend on the batch must be equal. A reward model's depend on it by rounding, which is far below a
# tenth of the standard deviation of its scores.
_EXACT, _ROUNDED = 1e-6, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardProbe:
    """A completion with a known result."""

    rollout: Rollout
    is_right: bool


def terms_canary(
    reward: WeightedReward, prompts: Sequence[Prompt], samples: Sequence[Rollout], *, prefill: str = ""
) -> list[str]:
    """Probe every term of the training reward; ``prefill`` as in :func:`reward_probes`.

    A verifier and a format reward score known answers in several orders. A custom function must not be an inverted
    verifier. Every other term, and functions, score ``samples``: values must be finite, and follow the order of the
    samples. A judge is not called twice. Return a note on each term that could not be probed.

    Raises:
        CanaryError: A term is wrong on a known answer, scores in another order, or returns a value that is not finite.
    """
    notes: list[str] = []
    for term in _weighted(reward).terms:
        own = [prompt for prompt in prompts if term.applies_to(prompt)]
        probes = _probes_of(term.reward, own, prefill)
        if isinstance(unwrap_reward(term.reward), FunctionReward):
            notes += _require_not_inverted(term.reward, own, prefill)
        elif probes:
            check_probes(term.reward, probes)
            for order in _orders(len(probes)):
                check_probes(term.reward, [probes[index] for index in order])
            continue
        elif term.reward.name in VERIFIERS:
            notes.append(f"the reward {term.reward.name!r} was not probed: no prompt has a reference")
            continue
        elif isinstance(unwrap_reward(term.reward), EnvironmentReward):
            continue  # it needs episodes, and no sample is one
        notes += _check_samples(term.reward, [each for each in samples if term.applies_to(each.prompt)][:NUM_SAMPLES])
    return notes


def known_answers_canary(reward: WeightedReward, prompts: Sequence[Prompt], *, prefill: str = "") -> list[str]:
    """Probe only terms with known answers, which is cheap enough for every checkpoint; as :func:`terms_canary`."""
    notes = []
    for term in _weighted(reward).terms:
        if probes := _probes_of(term.reward, [prompt for prompt in prompts if term.applies_to(prompt)], prefill):
            check_probes(term.reward, probes)
        elif term.reward.name in VERIFIERS:
            notes.append(f"the reward {term.reward.name!r} was not probed: no prompt has a reference")
    return notes


def _weighted(reward: WeightedReward) -> WeightedReward:
    if not isinstance(reward, WeightedReward):
        raise ConfigError(
            f"a reward or verifier is a {type(reward).__name__}, not the result of function_reward or build_rewards",
            fix="wrap the function: rlcore.function_reward(function)",
        )
    return reward


def reward_probes(prompt: Prompt, *, prefill: str = "") -> list[RewardProbe]:
    """Return one right completion of ``prompt``, if its answer is known, and several wrong ones.

    Wrong ones are an empty text, a sentence, the reference's number plus one, and two answers that contain the right
    one: ``12 or 13`` and ``112`` for 12. If the chat template opens the thinking (``prefill``), they close it first.
    """
    answer = known_answer(prompt)
    texts = {} if answer is None else {_tagged(answer): True}
    texts |= {"": False, _tagged(_NO_ANSWER): False}
    number = parse_number(answer) if answer is not None else None
    if number is not None:
        other = f"{number.value + 1}{'%' if number.is_percent else ''}"
        containing = [f"{answer} or {other}", *([f"1{answer}"] if str(answer)[0].isdigit() else [])]
        texts |= dict.fromkeys(map(_tagged, [other, *containing]), False)
    return [_probe(prompt, required_prefix(prefill) + text, is_right=is_right) for text, is_right in texts.items()]


def check_probes(reward: RewardFn, probes: Sequence[RewardProbe]) -> None:
    """Check that right probes score at least 0.99 and wrong ones at most 0.5.

    Raises:
        CanaryError: There is no probe, or one has a wrong score or no score.
    """
    if not probes:
        raise CanaryError("the reward canary has no probes", fix="use prompts with reference answers")
    scores = reward([probe.rollout for probe in probes])
    errors = [error for probe, score in zip(probes, scores, strict=True) if (error := _is_wrong(probe, score))]
    if errors:
        raise CanaryError(
            f"the reward {reward.name!r} misjudges {len(errors)} of {len(probes)} known answers:\n    "
            + "\n    ".join(errors),
            fix="check that the reward's kind matches the prompts' references; nothing was trained",
        )


def _probes_of(reward: RewardFn, prompts: Sequence[Prompt], prefill: str) -> list[RewardProbe]:
    known = unwrap_reward(reward)
    if isinstance(known, FunctionReward):
        return []
    if isinstance(known, FormatReward) and prompts:
        right, wrong = known.known()
        return [_probe(prompts[0], text, is_right=text == right) for text in (right, *wrong)]
    if reward.name not in VERIFIERS:
        return []
    chosen = prompts_for(reward.name, prompts)
    found = [probe for prompt in chosen for probe in reward_probes(prompt, prefill=prefill)]
    return [*found, *_exchanged(chosen, prefill)] if reward.name == "math" else found


def _exchanged(prompts: Sequence[Prompt], prefill: str) -> list[RewardProbe]:
    answers = [known_answer(prompt) or "" for prompt in prompts]
    numbers = [parse_number(answer) for answer in answers]
    return [
        _probe(prompts[index], required_prefix(prefill) + _tagged(answers[index - 1]), is_right=False)
        for index, number in enumerate(numbers)
        if (other := numbers[index - 1]) is not None and number is not None and number.value != other.value
    ]


def _require_not_inverted(reward: RewardFn, prompts: Sequence[Prompt], prefill: str) -> list[str]:
    """Raise if a function scores every right answer as wrong and every wrong one as right. Return notes."""
    probes = [probe for prompt in prompts_for("math", prompts) for probe in reward_probes(prompt, prefill=prefill)]
    if not any(probe.is_right for probe in probes):
        return []
    try:
        scores = reward([probe.rollout for probe in probes])
    except RlcoreError as error:
        return [f"the reward {reward.name!r} was not probed with known answers: {error.what}"]
    inverted = [replace(probe, is_right=not probe.is_right) for probe in probes]
    if not any(_is_wrong(probe, score) for probe, score in zip(inverted, scores, strict=True)):
        raise CanaryError(
            f"the reward {reward.name!r} scores every known right answer as wrong and every wrong one as right",
            fix="invert its sign",
        )
    return []


def _check_samples(reward: RewardFn, samples: Sequence[Rollout]) -> list[str]:
    values = _finite(reward, samples)
    if isinstance(unwrap_reward(reward), JudgeReward) or len(samples) < 3:
        return []
    is_exact = not isinstance(unwrap_reward(reward), RewardModelReward)
    tolerance = _EXACT if is_exact else max(_ROUNDED, 0.25 * (max(values) - min(values)))
    again = _finite(reward, samples)
    if not _alike(values, again, tolerance):
        if sorted(values) == sorted(again):
            raise _shuffled(reward)
        return [f"the reward {reward.name!r} scores the same completions differently: its order was not checked"]
    for order in _orders(len(samples)):
        if not _alike(_finite(reward, [samples[i] for i in order]), [values[i] for i in order], tolerance):
            raise _shuffled(reward)
    return []


def _finite(reward: RewardFn, samples: Sequence[Rollout]) -> list[float]:
    """Return the scores, at least one and all finite; NaN for unscored completions."""
    scores = scores_of(reward, samples)
    values = [score.value for score in scores if score.value is not None]
    if not all(map(math.isfinite, values)):
        text = f"the reward {reward.name!r} returned a value that is not finite"
        raise CanaryError(text, fix="limit its range, or return None")
    if scores and not values:
        raise CanaryError(f"the reward {reward.name!r} scores none of {len(scores)} completions: {scores[0].error}")
    return [math.nan if score.value is None else score.value for score in scores]


def _alike(found: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    # Unscored completions give NaN, which counts as equal.
    return not any(abs(a - b) > tolerance for a, b in zip(found, expected, strict=True))


def _orders(count: int) -> list[list[int]]:
    """Return two permutations: the first two items exchanged, and all items rotated by one.

    They generate every permutation, so no fixed shuffle of different scores commutes with both.
    """
    indices = list(range(count))
    return [[1, 0, *indices[2:]], [*indices[1:], 0]] if count > 1 else []


def _shuffled(reward: RewardFn) -> CanaryError:
    return CanaryError(
        f"the scores of the reward {reward.name!r} are not in the order of the rollouts",
        fix="return one score per rollout, in the order of the rollouts",
    )


def _is_wrong(probe: RewardProbe, score: Score) -> str:
    reference, text = probe.rollout.prompt.reference[:80], probe.rollout.text[:80]
    result = f"scored {score.value}" if score.value is not None else f"was not scored: {score.error}"
    is_wrong = score.value is not None and score.value <= WRONG_UP_TO
    if is_correct(score) if probe.is_right else is_wrong:  # NaN is neither
        return ""
    return f"{'right' if probe.is_right else 'wrong'} answer {text!r} for {reference!r} {result}"


def _tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _probe(prompt: Prompt, text: str, *, is_right: bool) -> RewardProbe:
    completion = Rollout(
        prompt=prompt,
        completion_ids=(0,),
        sampler_logprobs=(0.0,),
        loss_mask=(True,),
        policy_version=0,
        finish_reason="stop",
        text=text,
    )
    return RewardProbe(rollout=completion, is_right=is_right)
