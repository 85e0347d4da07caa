"""Settings of the budget of a run."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """Limits of one run of the preset, from its first attempt until an attempt completes.

    They are compared before each stage and each RL iteration that is computed. A reached limit stops the run there, and
    the same command with a higher limit resumes it. No stage depends on them. ``tokens`` counts the completions of RL
    after each iteration, and those of evaluations, rejection and difficulty at the end of their stage.
    """

    hours: PositiveFloat | None = None  # wall-clock hours of all attempts; default: no limit
    cost: PositiveFloat | None = None  # hours times the price of this kind of machine in prices.toml; default: no limit
    judge_cost: PositiveFloat | None = None  # tokens of the judges of win rates times their prices; default: no limit
    tokens: PositiveInt | None = None  # sampled completion tokens; default: no limit
