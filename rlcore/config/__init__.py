"""Settings that the library reads: frozen dataclasses, built strictly from nested values.

A field without a default is required. Types carry their bounds. :func:`rlcore.strict_config.build` checks them and
names the path of every error (``stages.grpo.learning_rate``). ``tasks/presets`` has the settings of the pipeline.
"""

from rlcore.config.answers import AnswersConfig, JudgeBounds, JudgeConfig, RejectionConfig, WinRateConfig
from rlcore.config.data import HardwareConfig, ModelConfig, ShapeConfig
from rlcore.config.distributed import DistributedConfig, RayConfig
from rlcore.config.health import LIMITS, AuditConfig, HealthConfig, Limit, LimitConfig
from rlcore.config.rl import (
    CheckpointConfig,
    CriticConfig,
    GaeConfig,
    KlConfig,
    ObjectiveConfig,
    RewardTerm,
    RlConfig,
    RolloutCorrectionConfig,
    UpdateConfig,
)
from rlcore.config.sampling import (
    AgentConfig,
    EngineConfig,
    EpisodeConfig,
    GpuConfig,
    SamplingConfig,
    TimeoutConfig,
    TransferKind,
    player_of,
)
from rlcore.config.training import (
    BackboneConfig,
    DpoConfig,
    LoraConfig,
    OptimConfig,
    PreferenceLossConfig,
    RewardModelConfig,
    SftConfig,
)
from rlcore.strict_config import (
    Duration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    to_dict,
)

__all__ = [
    "LIMITS",
    "AgentConfig",
    "AnswersConfig",
    "AuditConfig",
    "BackboneConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DistributedConfig",
    "DpoConfig",
    "Duration",
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
    "ModelConfig",
    "NonNegativeFloat",
    "NonNegativeInt",
    "ObjectiveConfig",
    "OptimConfig",
    "PositiveFloat",
    "PositiveInt",
    "PreferenceLossConfig",
    "RayConfig",
    "RejectionConfig",
    "RewardModelConfig",
    "RewardTerm",
    "RlConfig",
    "RolloutCorrectionConfig",
    "SamplingConfig",
    "SftConfig",
    "ShapeConfig",
    "TimeoutConfig",
    "TransferKind",
    "UpdateConfig",
    "WinRateConfig",
    "player_of",
    "to_dict",
]
