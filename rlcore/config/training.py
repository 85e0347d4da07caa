"""Settings of the supervised stages: SFT and the reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.config.adapter import AdapterConfig
from rlcore.config.bounds import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict import AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up, then the named schedule.

    ``kind``: ``adamw_8bit`` holds the two moments of matrices in one byte a number (Dettmers et al. 2021, block-wise
    quantisation) where ``adamw`` takes four, and needs the extra ``bnb``.
    """

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    weight_decay: NonNegativeFloat = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations; the loss is on the assistant's turns alone."""

    num_steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    tokens_per_microbatch: PositiveInt = 8192
    eval_every: NonNegativeInt = 0
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """``margin`` is added to each pair's own; ``label_smoothing``: share of labels taken to be wrong at random.

    ``length_debias``: take the effect of length, measured on training pairs, out of the scores.
    """

    margin: NonNegativeFloat = 0.0
    label_smoothing: Annotated[float, AtLeast(0.0), Below(0.5)] = 0.0
    length_debias: bool = False


@dataclass(frozen=True, kw_only=True)
class TrunkConfig:
    """What of its starting checkpoint a reward model keeps, and what of it learns beside the head.

    ``layers``: how many of its first layers are kept (0: all). ``trainable_layers``: how many of the last ones learn
    (-1: all); at 0 the head alone learns, and its optimum is computed at once. With ``adapter.rank`` > 0 an adapter
    learns on the whole trunk, frozen: an RL run whose policy is an adapter too holds the two on one base.
    """

    layers: NonNegativeInt = 0
    trainable_layers: Annotated[int, AtLeast(-1)] = -1
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        if self.adapter.rank and self.trainable_layers != -1:
            raise ConfigError("adapter.rank > 0 freezes the trunk, so trainable_layers must stay -1")
        if self.adapter.rank and self.layers:
            raise ConfigError("adapter.rank > 0 keeps the whole trunk, the policy's base, so layers must stay 0")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Bradley-Terry training. ``ensemble``: number of members, each on its own resample of the prompts.

    Where the head alone learns (``trunk.trainable_layers = 0``), epochs, batch size and learning rates are not used.
    ``audit_folds``: labels are audited in so many folds (0: not at all).
    """

    num_epochs: PositiveInt
    batch_size: PositiveInt  # pairs per optimizer step; a ranked list, with all of its pairs, is one
    learning_rate: PositiveFloat
    head_learning_rate: PositiveFloat
    ensemble: PositiveInt = 1
    audit_folds: NonNegativeInt = 5
    tokens_per_microbatch: PositiveInt = 8192
    min_accuracy: Fraction = 0.0  # the stage fails below this held-out pair accuracy
    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.ensemble > 1 and self.trunk.adapter.rank:
            raise ConfigError("trunk.adapter.rank > 0 makes one reward model, so ensemble must be 1")
