"""Settings of the report at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Price of an hour: of a GPU if the run has one, else of a processor core. 0: no cost in the report.

    No stage depends on it: a new price reruns nothing.
    """

    price_per_gpu_hour: NonNegativeFloat = 0.0
    price_per_core_hour: NonNegativeFloat = 0.0
    currency: str = "USD"
