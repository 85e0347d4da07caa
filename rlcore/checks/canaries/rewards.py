"""Does each term of the reward say what it should? Known answers where there are any, else order and finiteness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.checks.canaries.known_answers import known_answer, prompts_for
from rlcore.errors import CanaryError, RlcoreError
from rlcore.rewards.answers import closing
from rlcore.rewards.base import RewardFn, unwrap_reward
from rlcore.rewards.environment import EnvironmentReward
from rlcore.rewards.format import FormatReward
from rlcore.rewards.judge import JudgeReward
from rlcore.rewards.mix import WeightedReward, scores_of
from rlcore.rewards.plain_numbers import parse_number
from rlcore.rewards.reward_model import RewardModelReward
from rlcore.rewards.user_function import FunctionReward
from rlcore.types import Prompt, Rollout, Score, is_correct

WRONG_UP_TO = 0.5
NUM_SAMPLES = 4  # completions whose order is asked for: a term may be a paid service
VERIFIERS = ("math", "code", "procedural")
_NO_ANSWER = "this is no answer"
# Scores that do not depend on the batch come back the same; a reward model's depend on it by rounding, of which a tenth
# of the standard deviation of its scores is far more than there is.
_EXACT, _ROUNDED = 1e-6, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardProbe:
    """A completion whose verdict is known."""

    rollout: Rollout
    is_right: bool


def terms_canary(
    reward: WeightedReward, prompts: Sequence[Prompt], samples: Sequence[Rollout], *, prefill: str = ""
) -> list[str]:
    """Probe every term of the reward that trains by itself; ``prefill`` as in :func:`reward_canary`.

    A verifier and a format are asked for known answers, and again in another order. A user's function must not be a
    verifier upside down. Of every other term, and of a function, ``samples`` are scored: finite values, and the same
    ones in another order when the samples are. A judge is not asked twice: its order is that of our own requests.

    Returns:
        What could not be probed, a sentence for each term.

    Raises:
        CanaryError: a term misjudges a known answer, scores in another order, or returns a value that is not finite.
    """
    notes: list[str] = []
    for part in reward.parts:
        own = [prompt for prompt in prompts if part.is_on(prompt)]
        probes = _probes_of(part.reward, own, prefill)
        if isinstance(unwrap_reward(part.reward), FunctionReward):
            notes += _is_inverted(part.reward, own, prefill)
        elif probes:
            check_probes(part.reward, probes)
            for places in _orders(len(probes)):
                check_probes(part.reward, [probes[place] for place in places])
            continue
        elif part.reward.name in VERIFIERS:
            notes.append(f"the reward {part.reward.name!r} was not probed: no prompt has a reference")
            continue
        elif isinstance(unwrap_reward(part.reward), EnvironmentReward):
            continue  # it reads what an episode has brought, and no sample here is one
        notes += _check_samples(part.reward, [each for each in samples if part.is_on(each.prompt)][:NUM_SAMPLES])
    return notes


def known_answers_canary(reward: WeightedReward, prompts: Sequence[Prompt], *, prefill: str = "") -> list[str]:
    """The known answers alone, of the terms that have some: cheap enough for every checkpoint.

    Returns:
        The verifiers that could not be probed, a sentence for each.

    Raises:
        CanaryError: a term misjudges a known answer.
    """
    notes = []
    for part in reward.parts:
        if probes := _probes_of(part.reward, [prompt for prompt in prompts if part.is_on(prompt)], prefill):
            check_probes(part.reward, probes)
        elif part.reward.name in VERIFIERS:
            notes.append(f"the reward {part.reward.name!r} was not probed: no prompt has a reference")
    return notes


def reward_canary(reward: RewardFn, prompts: Sequence[Prompt], *, prefill: str = "") -> None:
    """Known right answers score right and known wrong ones wrong, or the run stops.

    Right is the reference itself; wrong are no answer at all, a text, and the reference's number plus one. Where the
    chat template begins the thinking (``prefill``), they end it first.

    Raises:
        CanaryError: names every probe that was judged wrongly or not at all.
    """
    check_probes(reward, [probe for prompt in prompts for probe in reward_probes(prompt, prefill=prefill)])


def reward_probes(prompt: Prompt, *, prefill: str = "") -> list[RewardProbe]:
    """One right completion of ``prompt``, where its answer is known, and several wrong ones."""
    answer = known_answer(prompt)
    texts = {} if answer is None else {_tagged(answer): True}
    texts |= {"": False, _tagged(_NO_ANSWER): False}
    number = parse_number(answer) if answer is not None else None
    if number is not None:
        texts[_tagged(f"{number.value + 1}{'%' if number.is_percent else ''}")] = False
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
    errors = [error for probe, score in zip(probes, scores, strict=True) if (error := _is_wrong(probe, score))]
    if errors:
        raise CanaryError(
            f"the reward {reward.name!r} misjudges {len(errors)} of {len(probes)} known answers:\n    "
            + "\n    ".join(errors),
            fix="check that the reward's kind fits the prompts' references; nothing has been trained",
        )


def _probes_of(reward: RewardFn, prompts: Sequence[Prompt], prefill: str) -> list[RewardProbe]:
    """Completions whose verdict by this term is known."""
    known = unwrap_reward(reward)
    if isinstance(known, FunctionReward):
        return []
    if isinstance(known, FormatReward) and prompts:
        right, wrong = known.known()
        texts = [(right, True), *((text, False) for text in wrong)]
        return [RewardProbe(rollout=_completion(prompts[0], text), is_right=is_right) for text, is_right in texts]
    if reward.name not in VERIFIERS:
        return []
    chosen = prompts_for(reward.name, prompts)
    found = [probe for prompt in chosen for probe in reward_probes(prompt, prefill=prefill)]
    return [*found, *_exchanged(chosen, prefill)] if reward.name == "math" else found


def _exchanged(prompts: Sequence[Prompt], prefill: str) -> list[RewardProbe]:
    """Wrong completions: the answer of another prompt, where both are numbers and these differ."""
    answers = [known_answer(prompt) or "" for prompt in prompts]
    numbers = [parse_number(answer) for answer in answers]
    return [
        RewardProbe(rollout=_completion(prompts[place], closing(prefill) + _tagged(answers[place - 1])), is_right=False)
        for place, number in enumerate(numbers)
        if (other := numbers[place - 1]) is not None and number is not None and number.value != other.value
    ]


def _is_inverted(reward: RewardFn, prompts: Sequence[Prompt], prefill: str) -> list[str]:
    """A function may look at anything; one that takes every right answer for wrong and the other way is inverted."""
    probes = [probe for prompt in prompts_for("math", prompts) for probe in reward_probes(prompt, prefill=prefill)]
    if not any(probe.is_right for probe in probes):
        return []
    try:
        scores = reward([probe.rollout for probe in probes])
    except RlcoreError as error:
        return [f"the reward {reward.name!r} was not asked for known answers: {error.what}"]
    turned = [replace(probe, is_right=not probe.is_right) for probe in probes]
    if not any(_is_wrong(probe, score) for probe, score in zip(turned, scores, strict=True)):
        raise CanaryError(
            f"the reward {reward.name!r} calls every known right answer wrong and every wrong one right",
            fix="turn its sign round",
        )
    return []


def _check_samples(reward: RewardFn, samples: Sequence[Rollout]) -> list[str]:
    """Finite, and in the order of the rollouts; a note where that cannot be told."""
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
    for places in _orders(len(samples)):
        if not _alike(_finite(reward, [samples[p] for p in places]), [values[p] for p in places], tolerance):
            raise _shuffled(reward)
    return []


def _finite(reward: RewardFn, samples: Sequence[Rollout]) -> list[float]:
    """The scores; NaN where a completion was not scored.

    Raises:
        CanaryError: none was scored, or a score is not finite.
    """
    scores = scores_of(reward, samples)
    values = [score.value for score in scores if score.value is not None]
    if not all(map(math.isfinite, values)):
        text = f"the reward {reward.name!r} returned a value that is not finite"
        raise CanaryError(text, fix="bound it, or return None")
    if scores and not values:
        raise CanaryError(f"the reward {reward.name!r} scores none of {len(scores)} completions: {scores[0].error}")
    return [math.nan if score.value is None else score.value for score in scores]


def _alike(found: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    # A completion that was not scored once says nothing of the order.
    return not any(abs(a - b) > tolerance for a, b in zip(found, expected, strict=True))


def _orders(count: int) -> list[list[int]]:
    """Two ways to order ``count`` items: the first two exchanged, and all moved on by one.

    Together they make every permutation, so that no fixed shuffle of different scores commutes with both: each is seen.
    """
    places = list(range(count))
    return [[1, 0, *places[2:]], [*places[1:], 0]] if count > 1 else []


def _shuffled(reward: RewardFn) -> CanaryError:
    return CanaryError(
        f"the scores of the reward {reward.name!r} are not in the order of the rollouts",
        fix="return one score for each rollout, in the order that they came in",
    )


def _is_wrong(probe: RewardProbe, score: Score) -> str:
    reference, text = probe.rollout.prompt.reference[:80], probe.rollout.text[:80]
    said = f"scored {score.value}" if score.value is not None else f"was not scored: {score.error}"
    is_wrong = score.value is not None and score.value <= WRONG_UP_TO
    if is_correct(score) if probe.is_right else is_wrong:  # NaN is neither
        return ""
    return f"{'right' if probe.is_right else 'wrong'} answer {text!r} for {reference!r} {said}"


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
