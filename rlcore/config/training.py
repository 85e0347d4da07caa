"""Settings of the supervised stages: SFT, DPO and the reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.config.adapter import LoraConfig
from rlcore.config.bounds import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict import AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up, then the named schedule.

    ``kind``: ``adamw_8bit`` keeps the two moments of matrices in one byte per number instead of four (Dettmers et al.
    2021, block-wise quantisation), and needs the extra ``bnb``.
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
    min_rare_word_match: Fraction = 0.25  # fraction of answers that repeat rare words of their prompt; 0: no check
    min_shuffle_gap: NonNegativeFloat = 0.0  # nats per token that held-out answers cost more after other prompts
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Direct preference optimization; the reference is the checkpoint that the stage starts from.

    ``beta``: how dear it is to leave the reference; a smaller one allows more (Rafailov et al. 2023).
    ``label_smoothing``: share of labels assumed to be wrong (conservative DPO). With ``lora.rank`` > 0 an adapter
    learns on the frozen checkpoint.
    """

    num_epochs: PositiveInt
    batch_size: PositiveInt  # pairs per optimizer step; a ranked list counts as one
    learning_rate: PositiveFloat
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, AtLeast(0.0), Below(0.5)] = 0.0
    tokens_per_microbatch: PositiveInt = 8192
    eval_every: NonNegativeInt = 0
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """``margin``: added to each pair's own margin. ``label_smoothing``: share of labels assumed to be wrong.

    ``length_debias``: take the effect of length, measured on training pairs, out of the scores.
    """

    margin: NonNegativeFloat = 0.0
    label_smoothing: Annotated[float, AtLeast(0.0), Below(0.5)] = 0.0
    length_debias: bool = False


@dataclass(frozen=True, kw_only=True)
class TrunkConfig:
    """The part of its starting checkpoint that a reward model keeps, and the part that learns beside the head.

    ``layers``: how many of its first layers are kept (0: all). ``trainable_layers``: how many of the last ones learn
    (-1: all); at 0 only the head learns, and its optimum is computed directly. With ``lora.rank`` > 0 an adapter
    learns on the whole frozen backbone: an RL run whose policy is an adapter too keeps both on one base.
    """

    layers: NonNegativeInt = 0
    trainable_layers: Annotated[int, AtLeast(-1)] = -1
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if self.lora.rank and self.trainable_layers != -1:
            raise ConfigError("lora.rank > 0 freezes the backbone, so trainable_layers must stay -1")
        if self.lora.rank and self.layers:
            raise ConfigError("lora.rank > 0 keeps the whole backbone, the policy's base, so layers must stay 0")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Bradley-Terry training. ``ensemble``: number of members, each on its own resample of the prompts.

    If only the head learns (``backbone.trainable_layers = 0``), epochs, batch size and learning rates are not used.
    ``audit_folds``: number of folds of the label audit (0: no audit).
    """

    num_epochs: PositiveInt
    batch_size: PositiveInt  # pairs per optimizer step; a ranked list counts as one
    learning_rate: PositiveFloat
    head_learning_rate: PositiveFloat
    ensemble: PositiveInt = 1
    audit_folds: NonNegativeInt = 5
    tokens_per_microbatch: PositiveInt = 8192
    min_accuracy: Fraction = 0.0  # the stage fails below this held-out pair accuracy
    max_label_noise: Fraction = 1.0  # the stage fails where more labels look wrong to the audit; 0.5: it guesses
    backbone: TrunkConfig = field(default_factory=TrunkConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.ensemble > 1 and self.backbone.lora.rank:
            raise ConfigError("backbone.lora.rank > 0 makes one reward model, so ensemble must be 1")
