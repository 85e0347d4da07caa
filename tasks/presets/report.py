"""Settings of the report that a run ends with."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The price of an hour: of a GPU if the run has one, else of a processor core. 0: the report gives no cost.

    No stage depends on it: with a new price no stage runs again.
    """

    price_per_gpu_hour: NonNegativeFloat = 0.0
    price_per_core_hour: NonNegativeFloat = 0.0
    currency: str = "USD"
