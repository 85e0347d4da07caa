"""Settings of the report that a run ends with."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What an hour costs: of a GPU where the run has one, else of a processor core. 0: the report says nothing of cost.

    No stage depends on it: a new price computes nothing anew.
    """

    price_per_gpu_hour: NonNegativeFloat = 0.0
    price_per_core_hour: NonNegativeFloat = 0.0
    currency: str = "USD"
