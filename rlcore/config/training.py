"""Settings of the supervised stages: SFT, DPO and the reward model; LoRA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.errors import ConfigError
from rlcore.strict_config import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
    below,
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (Hu et al. 2021): ``W + alpha / rank * B A`` with a frozen W.

    There is no dropout, because it would make the log-probabilities of engine and learner differ.
    """

    rank: NonNegativeInt = 0  # 0: train all weights instead; 8 to 64 are common
    alpha: PositiveInt = 32  # scale of the update, divided by rank
    # last names of the linear layers that are changed (`q_proj`); empty: all of the backbone
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up, then the named schedule."""

    # `adamw_8bit`: moments of matrices in one byte instead of four (Dettmers et al. 2021); needs the extra `bnb`
    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    weight_decay: NonNegativeFloat = 0.0  # decoupled weight decay
    beta1: Decay = 0.9  # decay of the first moment
    beta2: Decay = 0.95  # decay of the second moment
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    warmup_steps: NonNegativeInt = 0  # optimizer steps of linear warm-up
    # learning rate after warm-up: constant, or to 0 at the last step
    schedule: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations; the loss covers only the assistant's turns."""

    num_steps: PositiveInt  # optimizer steps
    batch_size: PositiveInt  # demonstrations per optimizer step
    learning_rate: PositiveFloat  # peak learning rate
    # tokens of one forward pass, padding included; lower it if memory is short
    tokens_per_microbatch: PositiveInt = 8192
    eval_every: NonNegativeInt = 0  # steps between held-out losses; 0: only at the end
    min_rare_word_match: Fraction = 0.25  # min. fraction of answers that share rare words with their prompt; 0: off
    min_shuffle_gap: NonNegativeFloat = 0.0  # min. increase of held-out loss after other prompts, nats per token
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Direct preference optimization; the reference policy is the checkpoint that the stage starts from."""

    num_epochs: PositiveInt  # passes over the pairs
    batch_size: PositiveInt  # pairs per optimizer step; a ranked list counts as one
    learning_rate: PositiveFloat  # peak learning rate
    beta: PositiveFloat = 0.1  # cost of leaving the reference policy; smaller values allow more (Rafailov et al. 2023)
    # fraction of labels assumed to be wrong (conservative DPO)
    label_smoothing: Annotated[float, at_least(0.0), below(0.5)] = 0.0
    # tokens of one forward pass, padding included; lower it if memory is short
    tokens_per_microbatch: PositiveInt = 8192
    eval_every: NonNegativeInt = 0  # steps between held-out evaluations; 0: only at the end
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """Loss of the reward model."""

    margin: NonNegativeFloat = 0.0  # reward difference that a pair must have, added to the pair's own margin
    label_smoothing: Annotated[float, at_least(0.0), below(0.5)] = 0.0  # fraction of labels assumed to be wrong
    length_debias: bool = False  # remove the effect of length, measured on training pairs, from the scores


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Layers of the starting checkpoint that a reward model keeps, and layers that it trains.

    With ``lora.rank`` > 0 it trains a LoRA on the whole frozen backbone; an RL run whose policy is a LoRA too then
    shares one base.
    """

    layers: NonNegativeInt = 0  # first layers to keep; 0: all
    # last layers to train; -1: all; 0: only the head, whose optimum is computed directly
    trainable_layers: Annotated[int, at_least(-1)] = -1
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if self.lora.rank and self.trainable_layers != -1:
            raise ConfigError("lora.rank > 0 freezes the backbone, so trainable_layers must stay -1")
        if self.lora.rank and self.layers:
            raise ConfigError("lora.rank > 0 keeps the whole backbone, so layers must stay 0")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Bradley-Terry training.

    If only the head is trained (``backbone.trainable_layers = 0``), epochs, batch size and learning rates are not used.
    """

    num_epochs: PositiveInt  # passes over the pairs
    batch_size: PositiveInt  # pairs per optimizer step; a ranked list counts as one
    learning_rate: PositiveFloat  # peak learning rate of the backbone
    head_learning_rate: PositiveFloat  # peak learning rate of the new head
    ensemble: PositiveInt = 1  # members, each trained on its own resample of the prompts
    audit_folds: NonNegativeInt = 5  # folds of the label audit; 0: no audit
    # tokens of one forward pass, padding included; lower it if memory is short
    tokens_per_microbatch: PositiveInt = 8192
    min_accuracy: Fraction = 0.0  # minimum held-out pair accuracy; below, the stage fails
    max_label_noise: Fraction = 1.0  # maximum fraction of suspect labels; above, the stage fails; 0.5: random labels
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.ensemble > 1 and self.backbone.lora.rank:
            raise ConfigError("backbone.lora.rank > 0 trains one reward model, so ensemble must be 1")
