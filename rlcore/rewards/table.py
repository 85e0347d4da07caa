"""Table of rewards by name, and the reward of a run built from its configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

from rlcore.choices import choices
from rlcore.config import RewardTerm
from rlcore.errors import ConfigError, RlcoreError
from rlcore.rewards.base import EnvironmentOptions, EnvironmentReward, RewardFn
from rlcore.rewards.code_tests import CodeOptions, CodeReward
from rlcore.rewards.format import FormatOptions, FormatReward
from rlcore.rewards.judge import JudgeOptions, JudgeReward
from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.rewards.mix import WeightedReward, WeightedTerm
from rlcore.rewards.procedural import ProceduralOptions, ProceduralReward
from rlcore.rewards.reward_model import RewardModelOptions, RewardModelReward
from rlcore.rewards.text_rewards import (
    LanguageOptions,
    LengthOptions,
    RepetitionOptions,
    language_reward,
    length_reward,
    repetition_reward,
)
from rlcore.rewards.user_function import import_function
from rlcore.strict_config import build

if TYPE_CHECKING:
    import torch

    from rlcore.rewards.reward_model import ScoreTokens, TokenItems


@dataclass(frozen=True, kw_only=True)
class RewardResources:
    """Resources of rewards besides their options.

    Attributes:
        score_tokens: Trained reward models by the ``stage`` of a term.
        prefill: Text that the chat template writes before each completion.
    """

    score_tokens: Mapping[str, ScoreTokens] = field(default_factory=dict)
    prefill: str = ""


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """Row of the table: the type of a term's options, and the constructor of the reward."""

    options: type
    make: Callable[[Any, RewardResources, RewardTerm], RewardFn]


def _make_reward_model(options: RewardModelOptions, resources: RewardResources, term: RewardTerm) -> RewardFn:
    if term.stage not in resources.score_tokens:
        raise ConfigError(
            f"the reward model {term.stage!r} does not exist",
            fix="run the stage that trains it, or remove the term",
        )
    return RewardModelReward(options, resources.score_tokens[term.stage], name=term.stage or "reward_model")


def _prefilled(options: type, reward: Callable[..., RewardFn]) -> RewardEntry:
    return RewardEntry(options, lambda chosen, resources, _: reward(chosen, prefill=resources.prefill))


REWARDS: Mapping[str, RewardEntry] = choices(
    "rewards.kind",
    {
        "math": _prefilled(MathOptions, MathReward),
        "procedural": _prefilled(ProceduralOptions, ProceduralReward),
        "code": _prefilled(CodeOptions, CodeReward),
        "format": _prefilled(FormatOptions, FormatReward),
        "language": RewardEntry(LanguageOptions, lambda options, *_: language_reward(options)),
        "repetition": RewardEntry(RepetitionOptions, lambda options, *_: repetition_reward(options)),
        "length": RewardEntry(LengthOptions, lambda options, *_: length_reward(options)),
        "environment": RewardEntry(EnvironmentOptions, lambda *_: EnvironmentReward()),
        "judge": RewardEntry(JudgeOptions, lambda options, *_: JudgeReward(options)),
        "reward_model": RewardEntry(RewardModelOptions, _make_reward_model),
    },
)


FUNCTIONS = choices("rewards.kind", {"function": import_function})


def build_rewards(terms: Sequence[RewardTerm], *, resources: RewardResources) -> WeightedReward:
    """Build the weighted sum of ``terms`` with their gates. A ``with`` block stops its processes.

    Raises:
        ConfigError: No term, an unknown kind or option, a function that cannot be imported, or a duplicate name.
    """
    if not terms:
        raise ConfigError("a run needs at least one reward", where="rewards")
    weighted = [_weighted_term(term, f"rewards.{index}", resources) for index, term in enumerate(terms)]
    for name in _duplicate_names(weighted):
        raise ConfigError(f"the reward {name!r} is named twice for the same data", where="rewards", fix=_KEEP_ONE)
    return WeightedReward(weighted)


def reward_errors(terms: Sequence[RewardTerm], path: str, *, prefill: str = "") -> list[str]:
    """Return all errors of :func:`build_rewards`, each with its full key; ``path`` is that of the terms.

    Reward models of other stages are assumed to exist. Functions are imported, but no completion is scored.
    """
    models = {term.stage: placeholder_model for term in terms}
    weighted, errors = [], list[str]()
    for index, term in enumerate(terms):
        try:
            weighted.append(
                _weighted_term(term, f"{path}.{index}", RewardResources(score_tokens=models, prefill=prefill))
            )
        except RlcoreError as error:
            errors += _lines(error, f"{path}.{index}")
    with WeightedReward(weighted):  # stops their processes
        twice = _duplicate_names(weighted)
    return errors + [f"{path}: the reward {name!r} is named twice for the same data; {_KEEP_ONE}" for name in twice]


def _lines(error: RlcoreError, path: str) -> list[str]:
    """Return an error of a term as lines with full keys. ``where`` is a key unless it names a file."""
    where = error.where if error.where.startswith(path) else path
    key, _, named = where.partition(" (")  # options are followed by their kind
    if named:
        return [f"{key}.{line.strip()}" for line in error.what.splitlines()[1:]]
    return [f"{key}: {error.what}" + (f"; {error.fix}" if error.fix else "")]


def placeholder_model(items: TokenItems, *, calibrated: bool) -> torch.Tensor:
    """Replace a reward model that is not trained yet, in rewards that are built only to be checked."""
    raise AssertionError("a reward that is built only to be checked was called")


def _weighted_term(term: RewardTerm, path: str, resources: RewardResources) -> WeightedTerm:
    return WeightedTerm(_make(term, path, resources), term.weight, term.gate, term.below_gate, term.data)


def _duplicate_names(weighted: Sequence[WeightedTerm]) -> list[str]:
    alike = [(one, other) for one, other in combinations(weighted, 2) if one.reward.name == other.reward.name]
    return list(dict.fromkeys(one.reward.name for one, other in alike if _overlap(one.data, other.data)))


_KEEP_ONE = "keep one and add the weights, or give them different data"


def _overlap(one: Collection[str], other: Collection[str]) -> bool:
    """An empty collection means all data sets."""
    return not one or not other or bool(set(one) & set(other))


def _make(term: RewardTerm, path: str, resources: RewardResources) -> RewardFn:
    if ":" in term.kind:
        return FUNCTIONS["function"](term, path)
    if term.kind not in REWARDS:
        close = difflib.get_close_matches(term.kind, REWARDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(REWARDS)}, or module:function"
        raise ConfigError(f"unknown reward {term.kind!r}", where=f"{path}.kind", fix=hint)
    entry = REWARDS[term.kind]
    return entry.make(build(entry.options, term.options, source=f"{path}.options ({term.kind})"), resources, term)
