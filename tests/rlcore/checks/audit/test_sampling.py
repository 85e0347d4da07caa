"""Draws come from the distribution that is reported: bets, random numbers of the seed, and features."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlcore.checks.audit.draws import NUM_BETS, SamplingTest
from rlcore.text.packing import TokenSequence
from rlcore.training.audit import features
from rlcore.training.audit.features import FLOORS, GROUPS, LIKELIEST, NUCLEI, POWERS, features_of, rollout_features
from rlcore.training.audit.passes import plain_logprobs
from rlcore.types import Rollout
from tests import strategies

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
    draws = 200  # of the place within a token's mass, on a grid
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


def test_a_correct_sampler_wins_no_bet_with_weights_one_update_old() -> None:
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


def test_a_resumed_test_is_the_same_test() -> None:
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
    [(40, 1.0, False, 0.0, "100%"), (400, 0.05, False, 0.0, "10%"), (150, 1.0, True, 0.05, "100%")],
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


EOS_OF_FEATURES = [2, 3]


def distributions_of_features(vocabulary: int, spread: float, *, has_ties: bool) -> torch.Tensor:
    """Log-probabilities [20, vocabulary]; with ties, most tokens have the probability of others."""
    logits = spread * torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (logits.round() if has_ties else logits).log_softmax(-1)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("vocabulary", [12, 128, 500])
def test_every_feature_is_its_sum_over_the_vocabulary(vocabulary: int, spread: float, has_ties: bool) -> None:
    logprobs = distributions_of_features(vocabulary, spread, has_ties=has_ties)
    p = logprobs.exp()
    tokens = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(1))[:, 0].tolist()
    before = [tokens[:place] for place in range(len(tokens))]
    found = features_of(logprobs, tokens, EOS_OF_FEATURES, before=before, prompt_ids=[5, 7, 7, vocabulary + 3])
    for row, token in enumerate(tokens):
        own, mass = float(logprobs[row, token]), p[row]
        assert float(found.own[row]) == pytest.approx(own)
        assert float(found.above[row]) == pytest.approx(float(mass[logprobs[row] > own].sum()), abs=1e-9)
        assert float(found.equal[row]) == pytest.approx(float(mass[logprobs[row] == own].sum()), abs=1e-9)
        assert float(found.below[row]) == pytest.approx(float(mass[:token].sum()), abs=1e-9)
        assert found.powers[row].tolist() == pytest.approx([float((mass**n).sum().log()) for n in POWERS])
        sets = [set(EOS_OF_FEATURES), set(before[row]), {5, 7, *before[row]}]
        assert found.tilted[row].tolist() == pytest.approx([float(mass[list(each)].sum()) for each in sets], abs=1e-9)
        assert found.is_tilted[row].tolist() == [float(token in each) for each in sets]
        assert found.groups[row].tolist() == pytest.approx([float(mass[n::GROUPS].sum()) for n in range(GROUPS)])
        assert int(found.group[row]) == token % GROUPS


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("vocabulary", [12, 128, 500])
def test_truncated_distributions_keep_every_token_at_their_edge(vocabulary: int, spread: float, has_ties: bool) -> None:
    logprobs = distributions_of_features(vocabulary, spread, has_ties=has_ties)
    tokens = logprobs.argsort(descending=True)[:, 4].tolist()
    found = features_of(logprobs, tokens, EOS_OF_FEATURES)
    for row, token in enumerate(tokens):
        ordered = logprobs[row].sort(descending=True).values
        edges = [float(ordered[min(count, vocabulary) - 1]) for count in LIKELIEST]
        for top_p in NUCLEI:
            reached = (ordered.exp().cumsum(0)[:128] >= top_p).nonzero()
            edges.append(float(ordered[int(reached[0, 0])]) if len(reached) else -torch.inf)
        edges += [float(ordered[0]) + float(torch.tensor(floor, dtype=torch.float64).log()) for floor in FLOORS]
        kept = [float(logprobs[row].exp()[logprobs[row] >= edge].sum()) for edge in edges]
        assert found.kept[row].tolist() == pytest.approx(kept, abs=1e-9)
        assert found.is_kept[row].tolist() == [float(logprobs[row, token] >= edge) for edge in edges]


def test_features_of_a_few_rows_at_a_time_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs, tokens = distributions_of_features(200, 3.0, has_ties=False), list(range(20))
    before = [tokens[:place] for place in tokens]
    whole = features_of(logprobs, tokens, EOS_OF_FEATURES, before=before)
    monkeypatch.setattr(features, "_CHUNK", 3 * 200)
    chunked = features_of(logprobs, tokens, EOS_OF_FEATURES, before=before)
    for name in features.Features.__slots__:
        assert torch.equal(getattr(whole, name), getattr(chunked, name)), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_features_of_rollouts_are_those_of_plain_passes(temperature: float) -> None:
    model = strategies.tiny_llama()
    rollouts: list[Rollout] = [item.rollout for group in strategies.random_groups(model, 3) for item in group]
    sampled = [(each, list(range(len(each.completion_ids)))[::2]) for each in rollouts]
    found = rollout_features(model, sampled, EOS_OF_FEATURES, temperature=temperature, budget=64)
    for (rollout, positions), own in zip(sampled, found, strict=True):
        sequence = TokenSequence(prompt_ids=rollout.prompt.token_ids, completion_ids=rollout.completion_ids)
        with torch.no_grad():
            logprobs = plain_logprobs(model, sequence, positions, temperature)
        before = [rollout.completion_ids[:position] for position in positions]
        targets = [rollout.completion_ids[position] for position in positions]
        expected = features_of(logprobs, targets, EOS_OF_FEATURES, before=before, prompt_ids=rollout.prompt.token_ids)
        for name in ("own", "above", "powers", "tilted", "kept", "groups"):
            assert torch.allclose(getattr(own, name), getattr(expected, name), atol=1e-5), name
    assert rollout_features(model, [], EOS_OF_FEATURES, temperature=1.0, budget=64) == ()
