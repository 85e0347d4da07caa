"""Rejection sampling, the pure part: of many scored answers to each prompt, those that become demonstrations.

The order of decisions is fixed: what cannot be used (unscored, cut, blank), what is not good enough, then per prompt
the best first, without duplicates, up to a cap, and a cap per task in which prompts take turns, each with its best
answer first. Every answer that is not kept has exactly one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlcore.config import RejectionConfig
from rlcore.evaluation.intervals import Interval, accuracy, mean_fraction
from rlcore.seeding import derive_seed

SHINGLE_WORDS = 3
REASONS = (
    "unscored",
    "truncated",
    "unusable",
    "below_threshold",
    "duplicate",
    "near_duplicate",
    "over_prompt_cap",
    "over_task_cap",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One sampled answer.

    ``value``: its reward, None where the grader failed. ``is_whole``: it ended by itself. ``is_usable``: its text can
    be a demonstration (not blank, no control token spelled out). ``num_tokens``: its length as sampled. ``calls``: the
    turns before ``text``, the last one, each with what its tool said.
    """

    prompt_id: str
    task: str
    sample_index: int
    text: str
    num_tokens: int
    value: float | None
    is_finished: bool
    is_usable: bool
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def said(self) -> str:
        """Every turn of the policy and every output, by which answers are told apart."""
        return "\n".join([*(text for call in self.calls for text in call), self.text])


@dataclass(frozen=True, kw_only=True)
class Selection:
    """``kept``: in the order of the candidates. ``dropped``: how many went for each reason of ``REASONS``."""

    kept: tuple[Candidate, ...]
    dropped: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RejectionStats:
    """What became of the answers to a set of prompts.

    ``verified``: scores of the threshold and more. ``pass_rate``: mean over prompts of the share of verified answers,
    with its bootstrap interval over prompts; ``solved``: share of prompts with a verified answer, Wilson interval.
    """

    num_prompts: int
    sampled: int
    verified: int
    kept: int
    pass_rate: Interval
    solved: Interval


def select(candidates: Sequence[Candidate], config: RejectionConfig, *, seed: int) -> Selection:
    """Which answers to keep. ``seed`` decides alone which prompts come first where a task has more than its cap.

    The candidates of a prompt stand together. ``len(candidates) == len(kept) + sum(dropped.values())``.
    """
    reasons: dict[Candidate, str] = {}
    for _, group in groupby(candidates, key=lambda one: one.prompt_id):
        reasons |= _judge_prompt(list(group), config)
    chosen = [one for one in candidates if not reasons[one]]
    if config.keep_per_task:
        best_first = sorted(chosen, key=_preference(config))
        reasons |= dict.fromkeys(_over_task_cap(best_first, config, seed), "over_task_cap")
    counts = Counter(reason for reason in reasons.values() if reason)
    kept = tuple(one for one in candidates if not reasons[one])
    return Selection(kept=kept, dropped={reason: counts[reason] for reason in REASONS})


def is_verified(candidate: Candidate, config: RejectionConfig) -> bool:
    """Whether an answer's score reaches the threshold; an unscored one does not."""
    return candidate.value is not None and candidate.value >= config.threshold


def summarize(
    candidates: Sequence[Candidate],
    kept: Iterable[Candidate],
    config: RejectionConfig,
    *,
    seed: int,
    confidence: float = 0.95,
) -> RejectionStats:
    """The figures of one set of answers, at least one; ``confidence`` is that of the intervals.

    Raises:
        DataError: there are no candidates.
    """
    shares = [
        [is_verified(one, config) for one in group] for _, group in groupby(candidates, key=lambda one: one.prompt_id)
    ]
    return RejectionStats(
        num_prompts=len(shares),
        sampled=len(candidates),
        verified=sum(map(sum, shares)),
        kept=len(list(kept)),
        pass_rate=mean_fraction([sum(share) / len(share) for share in shares], seed=seed, confidence=confidence),
        solved=accuracy([any(share) for share in shares], confidence=confidence),
    )


def normalised(text: str) -> str:
    """The text with every run of white space as one blank: answers that are equal then are duplicates."""
    return " ".join(text.split())


def similarity(first: str, second: str) -> float:
    """Jaccard index of the runs of three words of two texts, 0..1; of the single words where one has fewer."""
    words = [text.split() for text in (first, second)]
    size = min(SHINGLE_WORDS, *map(len, words)) or 1
    one, other = ({tuple(each[place : place + size]) for place in range(len(each) - size + 1)} for each in words)
    return len(one & other) / len(one | other) if one | other else 1.0


def _judge_prompt(group: Sequence[Candidate], config: RejectionConfig) -> dict[Candidate, str]:
    """The reason against each answer to one prompt; empty for those that are kept."""
    reasons = {one: _unfit(one, config) for one in group}
    kept: list[Candidate] = []
    for one in sorted((one for one in group if not reasons[one]), key=_preference(config)):
        reasons[one] = _redundant(one, kept, config)
        if not reasons[one]:
            kept.append(one)
    return reasons


def _unfit(one: Candidate, config: RejectionConfig) -> str:
    if one.value is None:
        return "unscored"
    if not one.is_finished:
        return "truncated"
    if not one.is_usable:
        return "unusable"
    return "" if config.choose == "best" or is_verified(one, config) else "below_threshold"


def _preference(config: RejectionConfig) -> Callable[[Candidate], tuple[float, int, int]]:
    def key(one: Candidate) -> tuple[float, int, int]:
        value = one.value or 0.0
        return (
            -value if config.choose == "best" else 0.0,
            one.num_tokens if config.prefer == "shortest" else 0,
            one.sample_index,
        )

    return key


def _redundant(one: Candidate, kept: Sequence[Candidate], config: RejectionConfig) -> str:
    text = normalised(one.said)
    others = [normalised(other.said) for other in kept]
    if text in others:
        return "duplicate"
    if config.max_similarity < 1.0 and any(similarity(text, other) > config.max_similarity for other in others):
        return "near_duplicate"
    return "over_prompt_cap" if len(kept) >= config.keep_per_prompt else ""


def _over_task_cap(best_first: Sequence[Candidate], config: RejectionConfig, seed: int) -> list[Candidate]:
    """What is too much of a task: the best answer of every prompt comes before the second best of any."""
    turns: Counter[str] = Counter()
    ranked: list[tuple[str, int, int, Candidate]] = []
    for one in best_first:
        ranked.append((one.task, turns[one.prompt_id], derive_seed(seed, "rejection", one.prompt_id), one))
        turns[one.prompt_id] += 1
    ranked.sort(key=lambda entry: entry[:3])
    taken: Counter[str] = Counter()
    over = []
    for task, _, _, one in ranked:
        taken[task] += 1
        if taken[task] > config.keep_per_task:
            over.append(one)
    return over
