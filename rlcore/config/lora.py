"""Settings of LoRA."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.config.bounds import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (Hu et al. 2021): ``W + alpha / rank * B A`` with a frozen W. ``rank`` 0 trains all weights instead.

    ``targets``: last names of the linear layers that are changed (``q_proj``); empty: all of the backbone. There is no
    dropout, because it would make the log-probabilities of engine and learner differ.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveInt = 32
    targets: tuple[str, ...] = ()
