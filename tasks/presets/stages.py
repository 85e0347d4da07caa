"""The kinds of stages that a preset may name: what each reads, its settings, and what it makes.

A kind's own keys stand beside those of its settings: ``[stages.grpo]`` has ``start`` and ``learning_rate``. What the
graph has to know of a kind are facts of its class: ``makes``, the product; ``reads``, the rows that it needs;
``data_key``, the key under which it names their data sets, a list or a table of shares; ``is_compared``, whether the
comparison tells of it beside its evaluation. What settings have says the rest: ``sampling``, that it samples;
``rewards``, that it scores; ``judge``, that it compares; ``critic``, that it trains one.

A new kind is a dataclass here, a line in ``STAGE_KINDS``, its step, and a line in ``flows/kinds.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from rlcore.config.benchmark import BenchmarkConfig
from rlcore.config.bounds import Fraction, PositiveFloat
from rlcore.config.rejection import AnswersConfig, RejectionConfig
from rlcore.config.rl import CriticConfig, RewardTerm, RlConfig, SamplingConfig
from rlcore.config.training import DpoConfig, RewardModelConfig, SftConfig
from rlcore.config.win_rate import JudgeConfig, WinRateConfig
from rlcore.errors import ConfigError
from rlcore.strict import INLINE, OneOf
from rlcore.tasks.presets.data import POLICY

BASE = "base"
"""The checkpoint that a run begins with, as ``start`` names it."""

Product = Literal["checkpoint", "reward_model", "demonstrations", "win_rate", "difficulty", "benchmark"]
Rows = Literal["demonstrations", "preference pairs", "prompts"]
PRODUCTS: Mapping[Product, str] = MappingProxyType(
    {
        "checkpoint": "a checkpoint",
        "reward_model": "a reward model",
        "demonstrations": "demonstrations",
        "win_rate": "a win rate",
        "difficulty": "pass rates of prompts",
        "benchmark": "a benchmark",
    }
)
"""What stages make, as messages name it."""


@dataclass(frozen=True, kw_only=True)
class SftStage:
    """Supervised fine-tuning. ``data``: data sets of demonstrations, or stages that make some."""

    makes: ClassVar[Product] = "checkpoint"
    reads: ClassVar[Rows] = "demonstrations"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["sft"]
    start: str
    data: tuple[str, ...]
    settings: SftConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class DpoStage:
    """Direct preference optimization. ``data``: data sets of preference pairs."""

    makes: ClassVar[Product] = "checkpoint"
    reads: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["dpo"]
    start: str
    data: tuple[str, ...]
    settings: DpoConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class RewardModelStage:
    """Training of a reward model. ``data``: data sets of preference pairs.

    ``anchors``: data sets of pairs whose winners are known. It trains on none of them, and has to tell them.
    """

    makes: ClassVar[Product] = "reward_model"
    reads: ClassVar[Rows] = "preference pairs"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["reward_model"]
    start: str
    data: tuple[str, ...]
    anchors: tuple[str, ...] = ()
    settings: RewardModelConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """How prompts are drawn by the pass rates that the stage ``difficulty`` has measured.

    Prompts with a pass rate from ``low`` to ``high`` are drawn, and no others; nor those that it did not ask.
    ``weight``: ``even``, each as often as another; ``learnable``, in proportion to p(1 - p) of its pass rate p, as far
    as the number of answers tells it.
    """

    difficulty: str
    low: Fraction = 0.0
    high: Fraction = 1.0
    weight: Literal["even", "learnable"] = "even"

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError("low must not be above high")


@dataclass(frozen=True, kw_only=True)
class RlStage:
    """Online RL. ``prompts``: data sets of prompts, each with its share: ``{ gsm8k = 0.7, mbpp = 0.3 }``.

    ``reference``: the checkpoint that KL is measured to, a teacher or the champion; left out: ``start``. ``draw``: how
    often each prompt of a data set comes; left out: all equally often.
    """

    makes: ClassVar[Product] = "checkpoint"
    reads: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "prompts"
    is_compared: ClassVar[bool] = True
    kind: Literal["rl"]
    start: str
    prompts: Mapping[str, PositiveFloat]
    reference: str = ""
    draw: DrawConfig | None = None
    settings: RlConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class RejectionStage:
    """Rejection sampling: the policy ``start`` answers the training prompts of ``data``."""

    makes: ClassVar[Product] = "demonstrations"
    reads: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["rejection"]
    start: str
    data: tuple[str, ...]
    settings: RejectionConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class DifficultyStage:
    """How often the policy ``start`` solves each training prompt of ``data``: what RL stages can draw by."""

    makes: ClassVar[Product] = "difficulty"
    reads: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: Literal["difficulty"]
    start: str
    data: tuple[str, ...]
    settings: AnswersConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class WinRateStage:
    """How often the answers of ``start`` are preferred to those of ``reference``, on the held-out prompts of ``data``.

    ``human_pairs``: data sets of preference pairs, on whose held-out rows the judge is audited; none: not audited.
    """

    makes: ClassVar[Product] = "win_rate"
    reads: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = True
    kind: Literal["win_rate"]
    start: str
    reference: str
    data: tuple[str, ...]
    human_pairs: tuple[str, ...] = ()
    settings: WinRateConfig = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class BenchmarkStage:
    """What ``start`` makes of tasks of the language model evaluation harness. It reads no data set of the preset."""

    makes: ClassVar[Product] = "benchmark"
    reads: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    data: ClassVar[tuple[str, ...]] = ()
    is_compared: ClassVar[bool] = True
    kind: Literal["benchmark"]
    start: str
    settings: BenchmarkConfig = field(metadata=INLINE)


StageConfig = (
    SftStage | DpoStage | RewardModelStage | RlStage | RejectionStage | DifficultyStage | WinRateStage | BenchmarkStage
)
STAGE_KINDS: Mapping[str, type] = MappingProxyType(
    {
        "sft": SftStage,
        "dpo": DpoStage,
        "reward_model": RewardModelStage,
        "rl": RlStage,
        "rejection": RejectionStage,
        "difficulty": DifficultyStage,
        "win_rate": WinRateStage,
        "benchmark": BenchmarkStage,
    }
)
AnyStage = Annotated[Any, OneOf("kind", STAGE_KINDS)]
"""A :data:`StageConfig`, as :func:`rlcore.strict.build` chooses it by its kind."""


def data_of(stage: StageConfig) -> tuple[str, ...]:
    """The data sets, and the stages that make some, whose rows a stage reads."""
    return tuple(getattr(stage, stage.data_key))


def anchors_of(stage: StageConfig) -> tuple[str, ...]:
    """The data sets that a stage is judged on and does not learn from; none for most kinds."""
    found: tuple[str, ...] = getattr(stage, "anchors", ())
    return found


def shares_of(stage: StageConfig) -> Mapping[str, float]:
    """The share of each data set, where a stage names them with shares; empty where it names a list."""
    named = getattr(stage, stage.data_key)
    return named if isinstance(named, Mapping) else {}


def sampling_of(stage: StageConfig) -> SamplingConfig | None:
    """How a stage samples completions; None where it samples none."""
    found: SamplingConfig | None = getattr(stage.settings, "sampling", None)
    return found


def rewards_of(stage: StageConfig) -> tuple[RewardTerm, ...]:
    """The reward terms by which a stage scores completions; none where it scores none."""
    found: tuple[RewardTerm, ...] = getattr(stage.settings, "rewards", ())
    return found


def judge_of(stage: StageConfig) -> JudgeConfig | None:
    """Who compares the answers that a stage samples; None where nobody does."""
    found: JudgeConfig | None = getattr(stage.settings, "judge", None)
    return found


def terms_of(stage: StageConfig) -> dict[str, RewardTerm]:
    """The reward terms of a stage and its judge, by the keys that name them within the stage."""
    found = {f"rewards.{place}": term for place, term in enumerate(rewards_of(stage))}
    judge = judge_of(stage)
    return found | {"judge": judge.term} if judge else found


def human_pairs_of(stage: StageConfig) -> tuple[str, ...]:
    """The data sets on which a stage's judge is audited."""
    found: tuple[str, ...] = getattr(stage, "human_pairs", ())
    return found


def reference_of(stage: StageConfig) -> str:
    """The checkpoint that a stage holds its own against, where that is not its start; empty otherwise."""
    found: str = getattr(stage, "reference", "")
    return found


def draw_of(stage: StageConfig) -> DrawConfig | None:
    """How a stage draws its prompts; None where all come equally often."""
    found: DrawConfig | None = getattr(stage, "draw", None)
    return found


def critic_of(stage: StageConfig) -> CriticConfig | None:
    """The critic's settings; None where a stage can have no critic."""
    found: CriticConfig | None = getattr(stage.settings, "critic", None)
    return found


def reward_models_of(stage: StageConfig) -> tuple[str, ...]:
    """The stages whose reward models a stage needs: as rewards, as a judge, and to start a critic from."""
    named = [term.stage for term in terms_of(stage).values() if term.kind == "reward_model"]
    critic = critic_of(stage)
    if critic and critic.initialise_from != POLICY:
        named.append(critic.initialise_from)
    return tuple(dict.fromkeys(named))
