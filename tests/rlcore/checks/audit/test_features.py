"""Features of tokens against their definitions, computed over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from rlcore.checks.audit import features
from rlcore.checks.audit.features import FLOORS, GROUPS, LIKELIEST, NUCLEI, POWERS, features_of, rollout_features
from rlcore.checks.audit.passes import plain_logprobs
from rlcore.text.packing import TokenSequence
from rlcore.types import Rollout
from tests import strategies

EOS = [2, 3]


def distributions(vocabulary: int, spread: float, *, has_ties: bool) -> torch.Tensor:
    """Log-probabilities [20, vocabulary]; with ties, most tokens have the probability of others."""
    logits = spread * torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (logits.round() if has_ties else logits).log_softmax(-1)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("vocabulary", [12, 128, 500])
def test_every_feature_is_its_sum_over_the_vocabulary(vocabulary: int, spread: float, has_ties: bool) -> None:
    logprobs = distributions(vocabulary, spread, has_ties=has_ties)
    p = logprobs.exp()
    tokens = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(1))[:, 0].tolist()
    before = [tokens[:place] for place in range(len(tokens))]
    found = features_of(logprobs, tokens, EOS, before=before, prompt_ids=[5, 7, 7, vocabulary + 3])
    for row, token in enumerate(tokens):
        own, mass = float(logprobs[row, token]), p[row]
        assert float(found.own[row]) == pytest.approx(own)
        assert float(found.above[row]) == pytest.approx(float(mass[logprobs[row] > own].sum()), abs=1e-9)
        assert float(found.equal[row]) == pytest.approx(float(mass[logprobs[row] == own].sum()), abs=1e-9)
        assert float(found.below[row]) == pytest.approx(float(mass[:token].sum()), abs=1e-9)
        assert found.powers[row].tolist() == pytest.approx([float((mass**n).sum().log()) for n in POWERS])
        sets = [set(EOS), set(before[row]), {5, 7, *before[row]}]
        assert found.tilted[row].tolist() == pytest.approx([float(mass[list(each)].sum()) for each in sets], abs=1e-9)
        assert found.is_tilted[row].tolist() == [float(token in each) for each in sets]
        assert found.groups[row].tolist() == pytest.approx([float(mass[n::GROUPS].sum()) for n in range(GROUPS)])
        assert int(found.group[row]) == token % GROUPS


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("vocabulary", [12, 128, 500])
def test_truncated_distributions_keep_every_token_at_their_edge(vocabulary: int, spread: float, has_ties: bool) -> None:
    logprobs = distributions(vocabulary, spread, has_ties=has_ties)
    tokens = logprobs.argsort(descending=True)[:, 4].tolist()
    found = features_of(logprobs, tokens, EOS)
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
    logprobs, tokens = distributions(200, 3.0, has_ties=False), list(range(20))
    before = [tokens[:place] for place in tokens]
    whole = features_of(logprobs, tokens, EOS, before=before)
    monkeypatch.setattr(features, "_CHUNK", 3 * 200)
    chunked = features_of(logprobs, tokens, EOS, before=before)
    for name in features.Features.__slots__:
        assert torch.equal(getattr(whole, name), getattr(chunked, name)), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_features_of_rollouts_are_those_of_plain_passes(temperature: float) -> None:
    model = strategies.tiny_llama()
    rollouts: list[Rollout] = [item.rollout for group in strategies.random_groups(model, 3) for item in group]
    sampled = [(each, list(range(len(each.completion_ids)))[::2]) for each in rollouts]
    found = rollout_features(model, sampled, EOS, temperature=temperature, budget=64)
    for (rollout, positions), own in zip(sampled, found, strict=True):
        sequence = TokenSequence(prompt_ids=rollout.prompt.token_ids, completion_ids=rollout.completion_ids)
        with torch.no_grad():
            logprobs = plain_logprobs(model, sequence, positions, temperature)
        before = [rollout.completion_ids[:position] for position in positions]
        targets = [rollout.completion_ids[position] for position in positions]
        expected = features_of(logprobs, targets, EOS, before=before, prompt_ids=rollout.prompt.token_ids)
        for name in ("own", "above", "powers", "tilted", "kept", "groups"):
            assert torch.allclose(getattr(own, name), getattr(expected, name), atol=1e-5), name
    assert rollout_features(model, [], EOS, temperature=1.0, budget=64) == ()
