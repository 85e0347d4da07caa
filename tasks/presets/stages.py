"""Stages of a preset: the table of each kind, and the names that a stage refers to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from rlcore.config.rl import CriticConfig, KlConfig, RewardTerm, RlConfig, SamplingConfig
from rlcore.config.win_rate import JudgeConfig
from rlcore.strict_config import OneOf
from rlcore.tasks.kinds import KINDS, load
from rlcore.tasks.kinds.facts import StageConfig
from rlcore.tasks.presets.data import POLICY

if TYPE_CHECKING:
    from rlcore.tasks.kinds.rl.kind import DrawConfig


class _Tables(Mapping[str, type]):
    """The tables of all kinds by name, each imported when it is read: kinds import presets."""

    def __getitem__(self, name: str) -> type:
        table: type = load(KINDS[name])
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


STAGE_KINDS: Mapping[str, type] = _Tables()
AnyStage = Annotated[Any, OneOf("kind", STAGE_KINDS)]
"""A :class:`StageConfig`, as :func:`rlcore.strict_config.build` chooses it by its kind."""


def data_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the datasets, and stages that make some, whose rows a stage reads."""
    return tuple(getattr(stage, stage.data_key)) if stage.data_key else ()


def gold_pairs_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the datasets that a stage is tested on but not trained on; empty for most kinds."""
    found: tuple[str, ...] = getattr(stage, "gold_pairs", ())
    return found


def shares_of(stage: StageConfig) -> Mapping[str, float]:
    """Return the mixture weight of each dataset; empty if a stage names a list."""
    named = getattr(stage, stage.data_key) if stage.data_key else {}
    return named if isinstance(named, Mapping) else {}


def sampling_of(stage: StageConfig) -> SamplingConfig | None:
    """Return the sampling settings of a stage; None if it samples nothing."""
    found: SamplingConfig | None = getattr(stage.settings, "sampling", None)
    return found


def rewards_of(stage: StageConfig) -> tuple[RewardTerm, ...]:
    """Return the reward terms by which a stage scores completions; empty if it scores none."""
    found: tuple[RewardTerm, ...] = getattr(stage.settings, "rewards", ())
    return found


def judge_of(stage: StageConfig) -> JudgeConfig | None:
    """Return the judge that compares the answers of a stage; None if it has none."""
    found: JudgeConfig | None = getattr(stage.settings, "judge", None)
    return found


def terms_of(stage: StageConfig) -> dict[str, RewardTerm]:
    """Return the reward terms of a stage and its judge, by their keys within the stage."""
    found = {f"rewards.{place}": term for place, term in enumerate(rewards_of(stage))}
    judge = judge_of(stage)
    return found | {"judge": judge.term} if judge else found


def human_pairs_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the datasets on which a stage's judge is audited."""
    found: tuple[str, ...] = getattr(stage, "human_pairs", ())
    return found


def reference_of(stage: StageConfig) -> str:
    """Return the checkpoint that a stage is compared with, if it is not its start; otherwise empty."""
    found: str = getattr(stage, reference_key(stage), "")
    return found


def reference_key(stage: StageConfig) -> str:
    """Return the key that :func:`reference_of` reads; empty if a stage has none."""
    return next((key for key in ("ref_policy", "baseline") if hasattr(stage, key)), "")


def start_key(stage: StageConfig) -> str:
    """Return the key under which a stage names the checkpoint that it begins with."""
    return "init_from" if hasattr(stage, "init_from") else "policy"


def named_start(stage: StageConfig) -> str:
    """Return the checkpoint that a stage begins with, as its preset names it."""
    found: str = getattr(stage, start_key(stage))
    return found


def curriculum_of(stage: StageConfig) -> DrawConfig | None:
    """Return the curriculum of a stage; None if all prompts are drawn equally often."""
    found: DrawConfig | None = getattr(stage, "curriculum", None)
    return found


def critic_of(stage: StageConfig) -> CriticConfig | None:
    """Return the critic's settings; None if a stage cannot have a critic."""
    found: CriticConfig | None = getattr(stage.settings, "critic", None)
    return found


def kl_of(stage: StageConfig) -> KlConfig | None:
    """Return the KL penalty of a stage, or None."""
    found: KlConfig | None = getattr(stage.settings, "kl", None)
    return found


def rl_of(stage: StageConfig | None) -> RlConfig | None:
    """Return the settings of an RL stage; None for others."""
    return stage.settings if stage is not None and hasattr(stage.settings, "algorithm") else None


def reward_models_of(stage: StageConfig) -> tuple[str, ...]:
    """Return the stages whose reward models a stage needs: as rewards, as a judge, or to start a critic from."""
    named = [term.stage for term in terms_of(stage).values() if term.kind == "reward_model"]
    critic = critic_of(stage)
    if critic and critic.init_from != POLICY:
        named.append(critic.init_from)
    return tuple(dict.fromkeys(named))
