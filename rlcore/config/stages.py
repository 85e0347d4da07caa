"""The kinds of stages that a preset may name: what each reads, its settings, and what it makes.

A kind's own keys stand beside those of its settings: ``[stages.grpo]`` has ``start`` and ``learning_rate``. A new kind
is a dataclass here, a line in ``STAGE_KINDS``, its step, and a line in ``flows/kinds.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from rlcore.config.bounds import PositiveFloat
from rlcore.config.rejection import RejectionConfig
from rlcore.config.rl import RewardTerm, RlConfig, SamplingConfig
from rlcore.config.training import RewardModelConfig, SftConfig
from rlcore.strict import INLINE, OneOf

BASE = "base"
"""The checkpoint that a run begins with, as ``start`` names it."""

Product = Literal["checkpoint", "reward_model", "demonstrations"]


@dataclass(frozen=True, kw_only=True)
class SftStage:
    """Supervised fine-tuning. ``data``: data sets of demonstrations, or stages that make some."""

    makes: ClassVar[Product] = "checkpoint"
    kind: Literal["sft"]
    start: str
    data: tuple[str, ...]
    settings: SftConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class RewardModelStage:
    """Training of a reward model. ``data``: data sets of preference pairs."""

    makes: ClassVar[Product] = "reward_model"
    kind: Literal["reward_model"]
    start: str
    data: tuple[str, ...]
    settings: RewardModelConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class RlStage:
    """Online RL. ``prompts``: data sets of prompts, each with its share: ``{ gsm8k = 0.7, mbpp = 0.3 }``."""

    makes: ClassVar[Product] = "checkpoint"
    kind: Literal["rl"]
    start: str
    prompts: Mapping[str, PositiveFloat]
    settings: RlConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class RejectionStage:
    """Rejection sampling: the policy ``start`` answers the training prompts of ``data``."""

    makes: ClassVar[Product] = "demonstrations"
    kind: Literal["rejection"]
    start: str
    data: tuple[str, ...]
    settings: RejectionConfig = field(metadata=INLINE)


StageConfig = SftStage | RewardModelStage | RlStage | RejectionStage
STAGE_KINDS: Mapping[str, type] = MappingProxyType(
    {"sft": SftStage, "reward_model": RewardModelStage, "rl": RlStage, "rejection": RejectionStage}
)
AnyStage = Annotated[Any, OneOf("kind", STAGE_KINDS)]
"""A :data:`StageConfig`, as :func:`rlcore.strict.build` chooses it by its kind."""


def data_of(stage: StageConfig) -> tuple[str, ...]:
    """The data sets, and the stages that make some, whose rows a stage reads."""
    return tuple(stage.prompts) if isinstance(stage, RlStage) else stage.data


def sampling_of(stage: StageConfig) -> SamplingConfig | None:
    """How a stage samples completions; None where it samples none."""
    return stage.settings.sampling if isinstance(stage, RlStage | RejectionStage) else None


def rewards_of(stage: StageConfig) -> tuple[RewardTerm, ...]:
    """The reward terms by which a stage scores completions; none where it scores none."""
    return stage.settings.rewards if isinstance(stage, RlStage | RejectionStage) else ()


def reward_models_of(stage: StageConfig) -> tuple[str, ...]:
    """The stages whose reward models a stage needs: as rewards, and to start a critic from."""
    named = [term.stage for term in rewards_of(stage) if term.kind == "reward_model"]
    if isinstance(stage, RlStage) and stage.settings.critic.initialise_from != "policy":
        named.append(stage.settings.critic.initialise_from)
    return tuple(dict.fromkeys(named))
