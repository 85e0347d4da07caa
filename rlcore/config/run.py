"""A preset: one run, whole; read from TOML and overrides, and checked before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlcore.config.bounds import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.data import DatasetConfig, HardwareConfig, ModelConfig
from rlcore.config.rl import RlConfig
from rlcore.config.training import RewardModelConfig, SftConfig
from rlcore.errors import ConfigError
from rlcore.strict import apply_override, build


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
