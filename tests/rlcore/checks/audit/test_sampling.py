"""A bet against the engine's reported log-probabilities: fair where they are right, won where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlcore.checks.audit.draws import NUM_BETS, SamplingTest
from rlcore.checks.audit.features import features_of

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
    features = features_of(reported if trainers is None else trainers, drawn.tolist(), [EOS])
    said = reported.gather(-1, drawn[:, None])[:, 0].tolist()
    test.update(features, said, torch.Generator().manual_seed(2))
    return test


def test_no_bet_gains_on_average_where_tokens_come_from_what_is_reported() -> None:
    reported, trainers = distributions(1), distributions(1, seed=5)
    gains = torch.zeros(NUM_BETS, dtype=torch.float64)
    draws = 400  # of the place within a token's mass, on a grid
    for token in range(reported.shape[1]):
        features = features_of(trainers, [token], [EOS], before=[[1, 5]], prompt_ids=[7])
        for number in range(draws):
            test = SamplingTest()
            test._counts = [
                [9, 1, 0, 0, 2, 0, 0, 0, 0, 4],
                [0, 0, 7, 0, 0, 0, 0, 0, 1, 1],
                [1, 2, 3, 0, 0, 0, 0, 0, 0, 9],
            ]
            said, beside = [float(reported[0, token])], {"tokens": [token], "siblings": [[4], [6]]}
            grid = Grid(number / draws)
            test.update(features, said, grid, **beside)  # type: ignore[arg-type]
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


def nucleus(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def cut(p: torch.Tensor) -> torch.Tensor:
        chances, order = p.exp().sort(descending=True)
        dropped = chances.cumsum(-1) - chances > share
        return p.masked_fill(dropped.gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)

    return cut


@pytest.mark.parametrize(
    ("draw_from", "says"),
    [
        (lambda p: (p / 0.5).log_softmax(-1), "0.50 times the temperature"),
        (lambda p: (p / 0.8).log_softmax(-1), "0.83 times the temperature"),
        (lambda p: (p / 1.4).log_softmax(-1), "1.43 times the temperature"),
        (top(4), "ten bins"),
        (top(2), "top_k = 2"),
        (nucleus(0.95), "top_p = 0.95"),
        (lambda p: (p / 0.9).log_softmax(-1), "0.93 times the temperature"),
        (without(EOS), "turns end 0.4 times as often"),
        (without(0), "ids 0, 64, 128 and so on occur 0.5 times as often"),
        (lambda p: torch.full_like(p, -math.log(p.shape[1])), "temperature"),
        (lambda p: tilted(p, 7, 0.7), "ids 7, 71, 135 and so on occur 2.0 times as often"),
        (lambda p: tilted(p, 0, -0.7), "ids 0, 64, 128 and so on occur 0.5 times as often"),
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
        test.update(features_of(reported, drawn.tolist(), [EOS]), said, torch.Generator().manual_seed(number))
    assert test.log_capital > BOUND
    assert f"ids {700 % 64}, {700 % 64 + 64}" in test.best_bet


def test_a_test_that_goes_on_from_its_state_is_the_same_test() -> None:
    test = capital(top(4), 50)
    again = SamplingTest()
    again.restore(test.state())
    assert (again.log_capital, again.best_bet, again.num_tokens) == (test.log_capital, test.best_bet, 50)
    reported = distributions(3)
    for each in (test, again):
        each.update(features_of(reported, [0, 1, 2], [EOS]), [-1.0] * 3, torch.Generator().manual_seed(0))
    assert again.state() == test.state()


def completions(count: int, *, same: Callable[[int], int]) -> SamplingTest:
    """The test after groups of four completions, drawn by inverting; ``same``: whose random numbers each one has."""
    test = SamplingTest()
    for number in range(count):
        reported = distributions(12, seed=number % 3)
        groups = torch.rand(4, 12, generator=torch.Generator().manual_seed(same(number)), dtype=torch.float64)
        seen: list[list[int]] = []
        for sample in range(4):
            uniforms = groups[0] if same(-1) else groups[sample]
            tokens = torch.searchsorted(reported.exp().cumsum(-1), uniforms[:, None])[:, 0].clamp(max=11).tolist()
            said = [float(reported[place, token]) for place, token in enumerate(tokens)]
            features = features_of(reported, tokens, [EOS])
            stream = torch.Generator().manual_seed(number)
            test.update(features, said, stream, tokens=tokens, siblings=seen)
            seen.append(tokens)
    return test


def test_a_group_whose_completions_have_the_same_random_numbers_is_found() -> None:
    test = completions(3, same=lambda number: max(number, 1) if number >= 0 else 1)
    assert test.log_capital > BOUND
    assert "completions of a group repeat each other" in test.best_bet


def numbered(count: int, *, others: float, is_half: bool = False, noise: float = 0.0) -> SamplingTest:
    """The test after tokens that known random numbers chose, and with a chance of ``others`` another one."""
    test, stream = SamplingTest(), torch.Generator().manual_seed(11)
    reported = distributions(count)
    known, drawn, changes = torch.rand(3, count, generator=stream, dtype=torch.float64)
    used = torch.where(changes < others, drawn, known)
    tokens = torch.searchsorted(reported.exp().cumsum(-1), used[:, None])[:, 0].clamp(max=11).tolist()
    seen = (reported + noise * torch.randn(reported.shape, generator=stream, dtype=torch.float64)).log_softmax(-1)
    wrong = torch.rand(count, generator=stream, dtype=torch.float64)
    test.bet_on_numbers(features_of(seen, tokens, [EOS]), range(count), [known, wrong], is_half=is_half)
    return test


@pytest.mark.parametrize(
    ("count", "others", "is_half", "noise", "share"),
    [
        (40, 1.0, False, 0.0, "100%"),
        (400, 0.05, False, 0.0, "10%"),
        (150, 1.0, True, 0.05, "100%"),
    ],
)
def test_tokens_that_the_random_numbers_of_the_seed_do_not_choose_are_found(
    count: int, others: float, is_half: bool, noise: float, share: str
) -> None:
    test = numbered(count, others=others, is_half=is_half, noise=noise)
    assert test.log_capital > BOUND
    assert test.best_bet == f"{share} of the tokens are not those of the seed's random numbers"


@pytest.mark.parametrize(("is_half", "noise"), [(False, 0.0), (False, 1e-4), (True, 0.03)])
def test_tokens_that_they_choose_are_left_alone_whatever_rounding_does(is_half: bool, noise: float) -> None:
    assert numbered(4000, others=0.0, is_half=is_half, noise=noise).log_capital < 1.0


def test_completions_with_random_numbers_of_their_own_are_left_alone() -> None:
    assert completions(40, same=lambda number: number + 10 if number >= 0 else 0).log_capital < 3.0


def test_a_penalty_on_tokens_that_came_before_is_found() -> None:
    test, generator = SamplingTest(), torch.Generator().manual_seed(5)
    for number in range(60):
        reported, tokens = distributions(20, seed=number), list[int]()
        for row in reported:
            drawn = row.clone()
            drawn[list(set(tokens))] -= 1.0
            tokens.append(int(torch.multinomial(drawn.softmax(-1), 1, generator=generator)))
        said = [float(reported[place, token]) for place, token in enumerate(tokens)]
        before = [tokens[:place] for place in range(20)]
        features = features_of(reported, tokens, [EOS], before=before)
        test.update(features, said, torch.Generator().manual_seed(number))
    assert test.log_capital > BOUND
    assert "occur 0.4 times as often" in test.best_bet
