"""Canaries: run-time checks that stop a run with silent errors, such as stale weights or a masked EOS."""

from rlcore.checks.canaries.known_answers import known_answer
from rlcore.checks.canaries.masks import mask_canary, sample_canary
from rlcore.checks.canaries.rewards import (
    check_probes,
    known_answers_canary,
    reward_canary,
    reward_probes,
    terms_canary,
)
from rlcore.checks.canaries.sync import (
    EngineCalibration,
    ExpectedWeights,
    calibrate_engine,
    require_version,
    rollouts_canary,
    sample_probes,
    sync_canary,
    weights_canary,
)

__all__ = [
    "EngineCalibration",
    "ExpectedWeights",
    "calibrate_engine",
    "check_probes",
    "known_answer",
    "known_answers_canary",
    "mask_canary",
    "require_version",
    "reward_canary",
    "reward_probes",
    "rollouts_canary",
    "sample_canary",
    "sample_probes",
    "sync_canary",
    "terms_canary",
    "weights_canary",
]
