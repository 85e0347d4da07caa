"""Settings of the promotion gate: the challenger, and the losses that are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from rlcore.config.bounds import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from rlcore.strict_config import INLINE, Above, Below


@dataclass(frozen=True, kw_only=True)
class OwnLimits:
    """Limits of the challenger itself: ``min_accuracy``, ``max_truncated`` and ``max_ref_kl``.

    A first champion must meet only these.
    """

    min_accuracy: Fraction = 0.0
    max_truncated: Fraction = 1.0
    max_ref_kl: NonNegativeFloat | None = None  # nats per token, last iteration; default: no limit


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """Promotion of the checkpoint ``challenger`` over the champion, both greedy on the same held-out prompts.

    ``alpha``: largest probability of ever promoting a model that is no better, over all looks at one version of the
    prompts. ``min_gain``: smallest gain in accuracy for a promotion. The margins are the largest allowed losses: of
    accuracy within a task, of accuracy on each of ``safety_tasks``, of the fraction of finished answers; and the tokens
    by which answers may grow. A task with fewer than ``min_task_problems`` problems has no guard, unless it is a safety
    task.

    ``win_rate``: a stage of that kind. Its judge, prompts and sampling then compare challenger and champion, whatever
    checkpoints it names itself. The win rate decides instead of accuracy, which remains a guard, and ``min_gain`` is
    the win rate above ½. ``benchmarks``: stages of that kind, each with a margin. Both sides run their tasks, and no
    metric may fall by the margin.
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
    own: OwnLimits = field(default_factory=OwnLimits, metadata=INLINE)
