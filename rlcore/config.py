"""Configuration: frozen dataclasses built strictly from a preset (TOML) and overrides; a wrong key is an error.

A field without a default is required. Bounds stand in the type and are checked by :func:`rlcore.strict.build`, which
names the path of every fault (``grpo.learning_rate``) before anything runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from rlcore.errors import ConfigError
from rlcore.strict import Above, AtLeast, Below, Between, apply_override, build
from rlcore.strict import to_dict as to_dict  # part of this module's interface

Scalar = str | int | float | bool


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0.0)]
NonNegativeFloat = Annotated[float, AtLeast(0.0)]
Fraction = Annotated[float, Between(0.0, 1.0)]
Decay = Annotated[float, AtLeast(0.0), Below(1.0)]  # of a running average


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Where and in which precision to compute. ``auto``: CUDA if present; bfloat16 only where the hardware has it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    num_threads: NonNegativeInt = 0  # 0: torch's default


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """Shape of a Llama made from scratch."""

    hidden_size: PositiveInt = 192
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 6
    num_kv_heads: PositiveInt = 6
    intermediate_size: PositiveInt = 512
    max_positions: PositiveInt = 256

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError("hidden_size must be a multiple of 2 * num_heads (rotary positions pair dimensions)")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads must be a multiple of num_kv_heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The starting checkpoint.

    ``source``: ``scratch`` (a new Llama of ``shape``), ``hub`` (``path`` is ``org/name``, ``revision`` a 40-hex
    commit), ``folder`` (``path``), ``gguf`` (``path`` to the file), ``package`` (``path`` is an installed Python
    package that carries ``file``, a GGUF), ``registry`` (``path`` is an MLflow model URI).
    """

    source: Literal["scratch", "hub", "folder", "gguf", "package", "registry"]
    path: str = ""
    revision: str = ""
    file: str = ""
    licence: str = ""
    chat_template: str = ""  # path of a Jinja file; empty: the model's own
    shape: ShapeConfig = field(default_factory=ShapeConfig)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One dataset: where rows come from, how many are kept, and how strict its gate is.

    ``adapter`` names the function that turns the source into contract columns; ``path`` is a JSONL or Parquet file,
    or ``hub:org/name@revision``; empty for adapters that generate their rows or ``policy`` (pairs sampled from the
    SFT policy and graded). When ``path`` does not exist and ``fallback`` is set, that adapter is used instead.
    """

    adapter: str
    path: str = ""
    fallback: str = ""
    num_train: PositiveInt
    num_eval: PositiveInt
    max_tokens: PositiveInt  # token budget of one row (prompt + completion)
    max_quarantined: Fraction = 0.01
    options: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up, then the named schedule."""

    weight_decay: NonNegativeFloat = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations; the loss is on the completion alone."""

    num_steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    tokens_per_microbatch: PositiveInt = 8192
    eval_every: NonNegativeInt = 0
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Bradley-Terry training. ``trainable_layers``: how many of the trunk's last layers learn (-1: all)."""

    num_epochs: PositiveInt
    batch_size: PositiveInt  # pairs per optimizer step
    learning_rate: PositiveFloat
    head_learning_rate: PositiveFloat
    trainable_layers: Annotated[int, AtLeast(-1)] = -1
    margin: NonNegativeFloat = 0.0
    tokens_per_microbatch: PositiveInt = 8192
    min_accuracy: Fraction = 0.0  # the stage fails below this held-out pair accuracy
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How rollouts are drawn. No top-p, top-k or min-p: a filtered distribution biases the ratio."""

    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt
    max_concurrent: PositiveInt = 256  # sequences decoded together


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """KL to the reference policy. ``placement`` ``reward`` uses k1 per token; ``loss`` uses ``estimator``.

    ``target`` > 0 turns on the adaptive controller (``reward`` placement), with ``horizon`` in samples.
    """

    coefficient: NonNegativeFloat = 0.0
    placement: Literal["reward", "loss"] = "loss"
    estimator: Literal["k1_ratio", "k2", "k3_ratio"] = "k3_ratio"
    target: NonNegativeFloat = 0.0
    horizon: PositiveInt = 10_000

    def __post_init__(self) -> None:
        if self.target > 0.0 and (self.placement == "loss" or self.coefficient == 0.0):
            raise ConfigError("target > 0 needs placement = 'reward' and a coefficient > 0 to start from")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of PPO, a trunk of its own."""

    initialise_from: Literal["policy", "reward_model"] = "policy"
    learning_rate: PositiveFloat = 1e-5
    clip_range: NonNegativeFloat = 0.2  # 0: no value clipping
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    warmup_iterations: NonNegativeInt = 0  # iterations in which the critic alone learns


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """Correction of the difference between the engine's and the trainer's log-probabilities."""

    mode: Literal["truncate", "mask", "off"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 2.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError("low must not be above high")


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One component of the reward: ``kind`` is a name of ``rlcore.rewards.REWARDS`` or ``module:function``."""

    kind: str
    weight: float = 1.0
    options: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How one batch of rollouts is turned into optimizer steps."""

    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    tokens_per_microbatch: PositiveInt = 8192
    entropy_coefficient: NonNegativeFloat = 0.0
    max_kl: NonNegativeFloat = 0.0  # early stop of the epochs on the KL to the old policy; 0: never
    truncated: Literal["score", "mask", "zero"] = "score"  # what a completion cut by the limit is worth
    optim: OptimConfig = field(default_factory=OptimConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """One online-RL run. ``algorithm`` is a row of ``rlcore.algorithms.table.ALGORITHMS``."""

    algorithm: str
    num_iterations: PositiveInt
    prompts_per_iteration: PositiveInt
    group_size: PositiveInt
    learning_rate: PositiveFloat
    rewards: tuple[RewardTerm, ...]
    sampling: SamplingConfig
    update: UpdateConfig = field(default_factory=UpdateConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    eval_every: NonNegativeInt = 0
    checkpoint_every: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: greedy, and ``num_samples`` sampled completions for pass@k."""

    num_problems: PositiveInt
    max_new_tokens: PositiveInt
    verifier: Literal["math", "procedural"] = "math"  # what decides right or wrong, whatever the reward mixes in
    verifier_options: Mapping[str, Scalar] = field(default_factory=dict)
    num_samples: NonNegativeInt = 0  # 0: greedy only
    num_sampled_problems: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    num_monitor_problems: PositiveInt = 64  # of the periodic evaluation inside an RL run
    confidence: Fraction = 0.95
    max_concurrent: PositiveInt = 256


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A preset: one run, whole."""

    name: str
    seed: NonNegativeInt
    model: ModelConfig
    prompts: DatasetConfig
    demonstrations: DatasetConfig
    preferences: DatasetConfig
    sft: SftConfig
    reward_model: RewardModelConfig
    grpo: RlConfig
    ppo: RlConfig
    evaluation: EvaluationConfig
    runs: tuple[Literal["grpo", "ppo"], ...] = ("grpo", "ppo")  # the RL runs that post-training does and compares
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


def load_preset(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML preset, apply overrides such as ``grpo.learning_rate=2e-6``, and check all of it.

    Raises:
        ConfigError: unreadable file, malformed TOML or override, unknown key, wrong type, value out of bounds.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the preset: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the preset is not valid TOML: {error}", where=str(path)) from error
    for override in overrides:
        apply_override(document, override)
    return build(RunConfig, document, source=str(path))
