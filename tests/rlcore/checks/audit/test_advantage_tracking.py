from __future__ import annotations

import torch

from rlcore.checks.audit.advantage_tracking import MIN_UPDATES, WINDOW, AdvantageTracker


def after(count: int, *, follows: float, seed: int = 0) -> AdvantageTracker:
    """A window of updates whose changes are ``follows`` times the advantages, and noise."""
    generator, direction = torch.Generator().manual_seed(seed), AdvantageTracker()
    for _ in range(count):
        advantages = torch.randn(20, generator=generator)
        direction.add(advantages, follows * advantages + torch.randn(20, generator=generator))
    return direction


def test_an_agreement_is_the_correlation_about_zero() -> None:
    direction = AdvantageTracker()
    direction.add(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.0]))
    assert direction.values == [2.0 / (2.0**0.5 * 2.0)]  # (1*2 - 1*0) / (sqrt(2) * 2)


def test_updates_that_follow_are_neither_backwards_nor_unrelated() -> None:
    direction = after(3 * WINDOW, follows=0.3)
    assert direction.stats is not None
    assert direction.stats.count == WINDOW
    assert not direction.is_backwards and not direction.is_unrelated
    assert "over 64 updates" in str(direction.stats)


def test_updates_that_oppose_are_backwards_as_soon_as_anything_is_said() -> None:
    assert after(MIN_UPDATES - 1, follows=-2.0).stats is None
    assert not after(MIN_UPDATES - 1, follows=-2.0).is_backwards
    assert after(MIN_UPDATES, follows=-2.0).is_backwards


def test_updates_that_follow_nothing_are_not_backwards_and_unrelated_after_a_whole_window() -> None:
    assert not any(after(count, follows=0.0, seed=7).is_backwards for count in range(MIN_UPDATES, WINDOW))
    quiet = after(WINDOW, follows=-0.15, seed=1)
    assert quiet.is_unrelated


def test_nothing_is_learned_from_tokens_that_did_not_change() -> None:
    direction = AdvantageTracker()
    direction.add(torch.tensor([1.0, -1.0]), torch.zeros(2))
    direction.add(torch.zeros(2), torch.ones(2))
    assert direction.values == []
