"""Settings of the promotion gate: the challenger, the losses that are allowed, and who must approve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlcore.config.bounds import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict_config import INLINE, Above, Below, keys_of, to_dict


@dataclass(frozen=True, kw_only=True)
class ApprovalConfig:
    """Approval of a promotion by a person. It is no part of the decision: changing it compares nothing again.

    ``approval``: with ``person``, a version that passes becomes the candidate, and champion when `rlcore approve` is
    signed by a key of the file ``approvers``: allowed signers of ssh, a line each of name, key type and key, next to
    the preset. A request ends after ``approval_days``. ``four_eyes``: two approvals, with two names and two keys of the
    file. One rejection is enough in any case.
    """

    approval: Literal["none", "person"] = "none"
    approvers: str = ""
    approval_days: PositiveInt = 7
    four_eyes: bool = False

    def __post_init__(self) -> None:
        if self.approval == "person" and not self.approvers:
            raise ConfigError("approvers is missing: name the file with the ssh keys of those who approve")
        if self.approval == "none" and (self.approvers or self.four_eyes):
            raise ConfigError("approvers and four_eyes have no effect without approval = 'person'")

    @property
    def needed(self) -> int:
        """Number of approvals that a promotion needs."""
        return 0 if self.approval == "none" else 2 if self.four_eyes else 1


@dataclass(frozen=True, kw_only=True)
class OwnLimits:
    """Limits of the challenger itself: ``min_accuracy``, ``max_truncated`` and ``max_ref_kl``.

    A first champion must meet only these.
    """

    min_accuracy: Fraction = 0.0
    max_truncated: Fraction = 1.0
    max_ref_kl: NonNegativeFloat | None = None  # nats per token, last iteration; default: no limit


APPROVAL_KEYS = tuple(keys_of(ApprovalConfig))


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
    sign_off: ApprovalConfig = field(default_factory=ApprovalConfig, metadata=INLINE)

    @property
    def limits(self) -> dict[str, Any]:
        """Keys that the decision depends on, as JSON values."""
        return {key: value for key, value in to_dict(self).items() if key not in APPROVAL_KEYS}
