"""Settings of the promotion gate: which checkpoint challenges the champion, and what it must not lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from rlcore.config.bounds import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from rlcore.strict import Above, Below


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """The checkpoint ``challenger`` against the champion of its registered model, greedy on the same held-out prompts.

    ``alpha``: largest chance of ever promoting a model that is no better, over all looks at one version of the prompts.
    ``min_gain``: smallest gain in accuracy worth a promotion. The margins are the largest losses allowed: of accuracy
    within a task, of accuracy on each of ``safety_tasks``, of the share of answers that end by themselves; and the
    tokens by which answers may grow. A task with fewer than ``min_task_problems`` problems is not judged separately,
    unless it is a safety task. ``min_accuracy``, ``max_truncated`` and ``max_ref_kl`` are limits of the challenger
    itself; a first champion has to meet only those.

    ``win_rate``: a stage of that kind. Its judge, prompts and sampling then compare the challenger with the champion,
    whatever checkpoints it names itself, and the win rate decides in the place of accuracy, which stays a guard;
    ``min_gain`` is then of the win rate above ½.

    ``benchmarks``: stages of that kind, each with a margin. Champion and challenger are both asked their tasks, and the
    share of none may be lower by the margin.
    """

    challenger: str
    win_rate: str = ""
    benchmarks: Mapping[str, Fraction] = field(default_factory=dict)
    alpha: Annotated[float, Above(0.0), Below(0.5)] = 0.05
    min_gain: Fraction = 0.01
    task_margin: Fraction = 0.05
    min_task_problems: PositiveInt = 100
    safety_tasks: tuple[str, ...] = ()
    safety_margin: Fraction = 0.02
    finished_margin: Fraction = 0.02
    length_margin: PositiveFloat = 32.0  # tokens
    min_accuracy: Fraction = 0.0
    max_truncated: Fraction = 1.0
    max_ref_kl: NonNegativeFloat | None = None  # to the reference, nats per token, last iteration; left out: no limit
