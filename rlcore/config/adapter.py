"""Settings of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (Hu et al. 2021): ``W + alpha / rank * B A`` on a frozen W. ``rank`` 0: all weights learn, no adapter.

    ``targets``: last names of the linear layers with an adapter (``q_proj``); none named: all of the trunk.
    There is no dropout: it would make the log-probabilities of engine and trainer differ.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveInt = 32
    targets: tuple[str, ...] = ()
