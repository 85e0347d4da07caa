"""Configuration: frozen dataclasses built strictly from a preset (TOML) and overrides; a wrong key is an error.

A field without a default is required. Bounds stand in the type and are checked by :func:`rlcore.strict.build`, which
names the path of every fault (``stages.grpo.learning_rate``) before anything runs.
"""

from rlcore.config.adapter import AdapterConfig
from rlcore.config.bounds import Decay, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Scalar
from rlcore.config.data import DatasetConfig, HardwareConfig, ModelConfig, ShapeConfig
from rlcore.config.engine import DeadlineConfig, EngineConfig, GpuConfig, TransferKind
from rlcore.config.episodes import EpisodeConfig
from rlcore.config.evaluation import EvaluationConfig, VerifierConfig
from rlcore.config.health import LIMITS, HealthConfig, Limit, LimitConfig
from rlcore.config.placement import PlacementConfig
from rlcore.config.promotion import PromotionConfig
from rlcore.config.rejection import RejectionConfig
from rlcore.config.report import ReportConfig
from rlcore.config.retrain import DriftConfig, RetrainConfig
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
from rlcore.config.run import RunConfig, load_preset, read_preset, without_faults
from rlcore.config.stages import (
    BASE,
    AnyStage,
    RejectionStage,
    RewardModelStage,
    RlStage,
    SftStage,
    StageConfig,
)
from rlcore.config.training import OptimConfig, PreferenceLossConfig, RewardModelConfig, SftConfig, TrunkConfig
from rlcore.strict import to_dict

__all__ = [
    "BASE",
    "LIMITS",
    "AdapterConfig",
    "AnyStage",
    "CheckpointConfig",
    "CriticConfig",
    "DatasetConfig",
    "DeadlineConfig",
    "Decay",
    "DriftConfig",
    "EngineConfig",
    "EpisodeConfig",
    "EvaluationConfig",
    "Fraction",
    "GaeConfig",
    "GpuConfig",
    "HardwareConfig",
    "HealthConfig",
    "KlConfig",
    "Limit",
    "LimitConfig",
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
    "PromotionConfig",
    "RejectionConfig",
    "RejectionStage",
    "ReportConfig",
    "RetrainConfig",
    "RewardModelConfig",
    "RewardModelStage",
    "RewardTerm",
    "RlConfig",
    "RlStage",
    "RunConfig",
    "SamplingConfig",
    "Scalar",
    "SftConfig",
    "SftStage",
    "ShapeConfig",
    "StageConfig",
    "TransferKind",
    "TrunkConfig",
    "UpdateConfig",
    "VerifierConfig",
    "load_preset",
    "read_preset",
    "to_dict",
    "without_faults",
]
