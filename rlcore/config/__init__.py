"""Settings that the library reads: frozen dataclasses, built strictly from nested values; a wrong key is an error.

A field without a default is required. Bounds stand in the type and are checked by :func:`rlcore.strict.build`, which
names the path of every error (``stages.grpo.learning_rate``) before anything runs. Those that only the pipeline reads,
and a preset as a whole, are in ``tasks/presets``.
"""

from rlcore.config.adapter import LoraConfig
from rlcore.config.bounds import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.data import HardwareConfig, ModelConfig, ShapeConfig
from rlcore.config.engine import DeadlineConfig, EngineConfig, GpuConfig, TransferKind
from rlcore.config.episodes import EpisodeConfig
from rlcore.config.health import LIMITS, AuditConfig, HealthConfig, Limit, LimitConfig
from rlcore.config.placement import PlacementConfig, RayConfig
from rlcore.config.rejection import AnswersConfig, RejectionConfig
from rlcore.config.rl import (
    CheckpointConfig,
    CriticConfig,
    GaeConfig,
    KlConfig,
    MismatchConfig,
    ObjectiveConfig,
    RewardTerm,
    RlConfig,
    SamplingConfig,
    UpdateConfig,
)
from rlcore.config.training import (
    DpoConfig,
    OptimConfig,
    PreferenceLossConfig,
    RewardModelConfig,
    SftConfig,
    TrunkConfig,
)
from rlcore.config.win_rate import JudgeBounds, JudgeConfig, WinRateConfig
from rlcore.strict import to_dict

__all__ = [
    "LIMITS",
    "AnswersConfig",
    "AuditConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DeadlineConfig",
    "Decay",
    "DpoConfig",
    "EngineConfig",
    "EpisodeConfig",
    "Fraction",
    "GaeConfig",
    "GpuConfig",
    "HardwareConfig",
    "HealthConfig",
    "JudgeBounds",
    "JudgeConfig",
    "KlConfig",
    "Limit",
    "LimitConfig",
    "LoraConfig",
    "MismatchConfig",
    "ModelConfig",
    "NonNegativeFloat",
    "NonNegativeInt",
    "ObjectiveConfig",
    "OptimConfig",
    "PlacementConfig",
    "PositiveFloat",
    "PositiveInt",
    "PreferenceLossConfig",
    "RayConfig",
    "RejectionConfig",
    "RewardModelConfig",
    "RewardTerm",
    "RlConfig",
    "SamplingConfig",
    "Scalar",
    "SftConfig",
    "ShapeConfig",
    "TransferKind",
    "TrunkConfig",
    "UpdateConfig",
    "WinRateConfig",
    "to_dict",
]
