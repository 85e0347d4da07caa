"""A bet against the engine's reported log-probabilities: fair where they are right, won where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlcore.audit.sampling import POWERS, TILTS, SamplingTest, features_of

EOS = 3
BOUND = math.log(1e6)


def distributions(count: int, seed: int = 0, vocabulary: int = 12) -> torch.Tensor:
    """Log-probabilities [count, vocabulary] of some spread."""
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)).log_softmax(-1)


def capital(
    draw_from: Callable[[torch.Tensor], torch.Tensor], count: int, *, trainers: torch.Tensor | None = None
) -> SamplingTest:
    """The test after ``count`` tokens of ``draw_from(reported)``; ``trainers``: what the bets are made of."""
    reported = distributions(count)
    drawn = torch.multinomial(draw_from(reported).exp(), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    test = SamplingTest()
    features = features_of(reported if trainers is None else trainers, drawn, 1.0, [EOS])
    said = reported.gather(-1, drawn[:, None])[:, 0].tolist()
    test.see(features, said, torch.Generator().manual_seed(2))
    return test


def test_no_bet_gains_on_average_where_tokens_come_from_what_is_reported() -> None:
    reported, trainers = distributions(1), distributions(1, seed=5)
    gains = torch.zeros(len(POWERS) + len(TILTS) + 3, dtype=torch.float64)
    draws = 400  # of the place within a token's mass, on a grid
    for token in range(reported.shape[1]):
        features = features_of(trainers, torch.tensor([token]), 1.0, [EOS])
        for number in range(draws):
            test = SamplingTest()
            test._seen = [[9, 1, 0, 0, 2, 0, 0, 0, 0, 4], [0, 0, 7, 0, 0, 0, 0, 0, 1, 1]]
            test.see(features, [float(reported[0, token])], Grid(number / draws))  # type: ignore[arg-type]
            gains += torch.tensor(test._logs, dtype=torch.float64).exp() * float(reported[0, token].exp()) / draws
    assert gains.tolist() == pytest.approx([1.0] * len(gains), abs=0.02)


class Grid:
    """Stands for a generator; see the fixture below."""

    def __init__(self, value: float) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``torch.rand`` give a grid's value where it is asked with a :class:`Grid`."""
    rand = torch.rand

    def given(*shape: int, generator: object = None, **settings: object) -> torch.Tensor:
        if isinstance(generator, Grid):
            return torch.full(shape, generator.value, dtype=torch.float64)
        return rand(*shape, generator=generator, **settings)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "rand", given)


def test_a_sound_sampler_wins_nothing_and_weights_that_are_one_update_old_change_nothing() -> None:
    assert capital(lambda reported: reported, 4000).log_capital < 3.0
    older = capital(lambda reported: reported, 4000, trainers=distributions(4000, seed=9))
    assert older.log_capital < 3.0


def top(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda p: torch.where(p >= p.topk(count).values[:, -1:], p, -torch.inf).log_softmax(-1)


def without(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda p: p.index_fill(1, torch.tensor([token]), -torch.inf).log_softmax(-1)


def tilted(logprobs: torch.Tensor, token: int, tilt: float) -> torch.Tensor:
    return logprobs.index_add(1, torch.tensor([token]), torch.full((len(logprobs), 1), tilt).to(logprobs)).log_softmax(
        -1
    )


@pytest.mark.parametrize(
    ("draw_from", "says"),
    [
        (lambda p: (p / 0.5).log_softmax(-1), "0.50 times the temperature"),
        (lambda p: (p / 0.8).log_softmax(-1), "0.83 times the temperature"),
        (lambda p: (p / 1.4).log_softmax(-1), "1.43 times the temperature"),
        (top(4), "tenths"),
        (without(EOS), "turns end 0.4 times as often"),
        (without(0), "ids 0, 64, 128 and so on come 0.5 times as often"),
        (lambda p: torch.full_like(p, -math.log(p.shape[1])), "temperature"),
        (lambda p: tilted(p, 7, 0.7), "ids 7, 71, 135 and so on come 2.0 times as often"),
        (lambda p: tilted(p, 0, -0.7), "ids 0, 64, 128 and so on come 0.5 times as often"),
    ],
)
def test_another_distribution_than_is_reported_is_found(
    draw_from: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    test = capital(draw_from, 6000)
    assert test.log_capital > BOUND
    assert says in test.best_bet


def test_one_token_of_a_large_vocabulary_that_comes_twice_as_often_is_found() -> None:
    test, generator = SamplingTest(), torch.Generator().manual_seed(3)
    for number in range(20):
        reported = (3.0 * torch.randn(200, 2000, generator=generator, dtype=torch.float64)).log_softmax(-1)
        reported[:, 700] = reported.max(-1).values  # a common word, of which no rank tells
        reported = reported.log_softmax(-1)
        drawn = torch.multinomial(tilted(reported, 700, 0.7).exp(), 1, generator=generator)[:, 0]
        said = reported.gather(-1, drawn[:, None])[:, 0].tolist()
        test.see(features_of(reported, drawn, 1.0, [EOS]), said, torch.Generator().manual_seed(number))
    assert test.log_capital > BOUND
    assert f"ids {700 % 64}, {700 % 64 + 64}" in test.best_bet


def test_a_test_that_goes_on_from_its_state_is_the_same_test() -> None:
    test = capital(top(4), 50)
    again = SamplingTest()
    again.restore(test.state())
    assert (again.log_capital, again.best_bet, again.num_tokens) == (test.log_capital, test.best_bet, 50)
    reported = distributions(3)
    for each in (test, again):
        each.see(
            features_of(reported, torch.tensor([0, 1, 2]), 1.0, [EOS]), [-1.0] * 3, torch.Generator().manual_seed(0)
        )
    assert again.state() == test.state()
