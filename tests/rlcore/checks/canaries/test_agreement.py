"""Engine and learner agree on log-probabilities, and the served weights are the learner's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from rlcore.algorithms.agreement import LIMITS, LogprobAgreement, Spread, agreement, check_agreement, tolerance
from rlcore.checks.canaries.served_weights import verify_served_weights
from rlcore.errors import CanaryError, StorageError
from rlcore.models.loading import load_policy, save_model
from rlcore.models.runtime import Runtime
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt

HALF = [torch.bfloat16, torch.float16]

NOISE = {torch.float32: 1e-6, torch.float16: 0.004, torch.bfloat16: 0.03}  # of a logit, nats, as a sound engine has it


def drawn(
    seed: int, *, noise: float, num_tokens: int = 128, factor: float = 1.0, sharpness: float = 3.0, vocabulary: int = 50
) -> LogprobAgreement:
    """An engine whose logits are disturbed by ``noise``, at ``factor`` times the trainer's temperature."""
    draws = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(num_tokens, vocabulary, generator=draws, dtype=torch.float64)
    theirs = ((logits + noise * torch.randn(logits.shape, generator=draws)) / factor).log_softmax(-1)
    ours = logits.log_softmax(-1)
    tokens = torch.multinomial(theirs.exp(), 1, generator=draws)
    entropy = -(ours * ours.exp()).sum(-1)
    return agreement(theirs.gather(1, tokens)[:, 0], ours.gather(1, tokens)[:, 0], entropy)


def test_the_figures_of_two_tokens_worked_by_hand() -> None:
    """p = 1/2 and 1/4 at entropies of 1 and 2 nats, the engine 0.1 above and 0.3 below.

    Log-odds: 0.1 / 0.5 = 0.2 and 0.3 / 0.75 = 0.4; mean 0.3, 95 % quantile 0.2 + 0.95·0.2 = 0.39.
    x = (1 - log 2) / 0.5 = 0.613706, (2 - log 4) / 0.75 = 0.818274; y = 0.2, -0.4.
    slope = (0.122741 - 0.327310) / (0.376635 + 0.669573) = -0.195534; temperature 1 / 0.804466 = 1.243061.
    """
    learner = torch.tensor([0.5, 0.25]).log()
    found = agreement(learner + torch.tensor([0.1, -0.3]), learner, torch.tensor([1.0, 2.0]))
    assert found.num_tokens == 2
    assert found.max_abs == pytest.approx(0.3, abs=1e-6)
    assert found.mean_odds == pytest.approx(0.3, abs=1e-6)
    assert found.high_odds == pytest.approx(0.39, abs=1e-6)
    assert found.temperature == pytest.approx(1.243061, abs=1e-5)


def test_a_sure_policys_rounding_counts_as_much_as_a_doubtful_ones() -> None:
    """One disturbance of the logits: log-probabilities differ far less where the policy is sure, odds do not."""
    sharp, flat = (drawn(0, noise=0.03, num_tokens=2000, sharpness=sharpness) for sharpness in (8.0, 1.0))
    assert sharp.mean_odds == pytest.approx(flat.mean_odds, rel=0.35)


def test_rounding_is_of_one_size_at_any_temperature() -> None:
    """Logits divided by T have their noise divided too: at T = 0.1 log-odds differ by ten times as much."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 50, generator=draws, dtype=torch.float64)
    disturbed = logits + 0.03 * torch.randn(logits.shape, generator=draws)
    found = []
    for temperature in (1.0, 0.1):
        ours, theirs = ((values / temperature).log_softmax(-1) for values in (logits, disturbed))
        tokens = torch.multinomial(ours.exp(), 1, generator=draws)
        figures = agreement(
            theirs.gather(1, tokens)[:, 0],
            ours.gather(1, tokens)[:, 0],
            -(ours * ours.exp()).sum(-1),
            temperature=temperature,
        )
        found.append(figures.mean_odds)
    assert found[1] == pytest.approx(found[0], rel=0.35)


@pytest.mark.parametrize("factor", [0.9, 1.1, 1.0 / 0.7])
def test_the_engines_temperature_is_found(factor: float) -> None:
    assert drawn(1, noise=0.03, factor=factor, sharpness=1.0).temperature == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("dtype", list(NOISE))
def test_rounding_raises_no_alarm_and_a_temperature_off_by_a_tenth_always_does(dtype: torch.dtype) -> None:
    """The null distribution at the size of a probe: not one alarm in 2,000, and not one miss in 200.

    A tenth is found before the first update, a fifth always: after updates half precision drifts.
    """
    small = partial(drawn, noise=NOISE[dtype], vocabulary=16)
    baseline = small(99)
    later = Spread(baseline.mean_odds, baseline.high_odds)
    alarms = sum(is_alarm(small(seed), dtype, later) for seed in range(2000))
    misses = sum(
        not is_alarm(small(seed, factor=factor), dtype, noise)
        for seed in range(200)
        for factor, noise in ((1.1, None), (1.2, later))
    )
    assert (alarms, misses) == (0, 0)


def is_alarm(found: LogprobAgreement, dtype: torch.dtype, noise: Spread | None) -> bool:
    try:
        check_agreement(found, noise=noise, dtype=dtype)
    except CanaryError:
        return True
    return False


def test_the_bound_is_four_times_the_noise_within_what_the_precision_allows() -> None:
    limits = LIMITS[torch.bfloat16]
    assert tolerance(Spread(0.075, 0.275), limits) == Spread(mean=0.3, high=2.0)
    assert tolerance(Spread(0.001, 0.003), limits) == limits.least
    assert tolerance(Spread(0.3, 1.2), limits) == limits.most
    assert tolerance(None, limits) == limits.most


def figures(**changes: float) -> LogprobAgreement:
    found = {"max_abs": 0.1, "mean_odds": 0.02, "high_odds": 0.06, "temperature": 1.0, "temperature_error": 0.002}
    return LogprobAgreement(num_tokens=100, **({"entropy": 1.0} | found | changes))


@pytest.mark.parametrize(
    ("changes", "is_fault"),
    [
        ({}, False),
        ({"temperature": 1.09}, False),  # within a tenth, however sure that is
        ({"temperature": 1.11}, True),
        ({"temperature": 0.89}, True),
        ({"temperature": 1.15, "temperature_error": 0.03}, False),  # five standard errors
        ({"temperature": 1.19, "temperature_error": 0.03}, True),
        ({"mean_odds": 0.26}, True),
        ({"high_odds": 2.01}, True),  # of the mean alone nothing is seen
        ({"max_abs": 2.0}, False),  # tails are long in half precision
    ],
)
def test_each_figure_has_its_bound(changes: dict[str, float], is_fault: bool) -> None:
    if is_fault:
        with pytest.raises(CanaryError):
            check_agreement(figures(**changes), noise=Spread(0.02, 0.06), dtype=torch.bfloat16)
    else:
        check_agreement(figures(**changes), noise=Spread(0.02, 0.06), dtype=torch.bfloat16)


def test_before_the_first_update_half_precision_may_not_drift() -> None:
    with pytest.raises(CanaryError, match=r"1\.050 times the trainer's temperature"):
        check_agreement(figures(temperature=1.05), noise=None, dtype=torch.bfloat16)


def test_ppo_on_a_real_model_is_no_error_in_half_precision() -> None:
    """SmolLM2-135M-Instruct after ten updates of all weights in bfloat16."""
    measured = figures(mean_odds=0.045, high_odds=0.2, temperature=1.047, temperature_error=0.006, max_abs=0.9)
    check_agreement(measured, noise=Spread(0.04, 0.2), dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", HALF)
def test_a_few_completions_that_are_computed_otherwise_are_seen_at_the_quantile(dtype: torch.dtype) -> None:
    """One in eight off by 2 nats, as where a cache of old weights serves one prompt: the mean alone might pass."""
    draws = torch.Generator().manual_seed(0)
    learner = -torch.rand(128, generator=draws, dtype=torch.float64) - 0.1
    engine = learner + 1e-3 * torch.randn(128, generator=draws)
    engine[:16] += 2.0 * torch.randn(16, generator=draws)
    with pytest.raises(CanaryError, match="differ from the learner's"):
        check_agreement(agreement(engine, learner, -learner), noise=Spread(1e-3, 2e-3), dtype=dtype)


def test_float32_keeps_a_bound_on_every_single_token() -> None:
    learner = torch.full((100,), -1.0, dtype=torch.float64)
    engine = learner.clone()
    engine[3] += 2e-3
    with pytest.raises(CanaryError, match=r"0.002 nats \(limit 0.001\)"):
        check_agreement(agreement(engine, learner, -learner), noise=None, dtype=torch.float32)


def test_nan_is_an_error() -> None:
    learner = torch.tensor([-1.0, -2.0])
    for engine in (torch.tensor([math.nan, -2.0]), torch.tensor([-1.0, math.inf])):
        with pytest.raises(CanaryError):
            check_agreement(agreement(engine, learner, -learner), noise=None, dtype=torch.bfloat16)


def test_tokens_without_a_partner_are_an_error() -> None:
    with pytest.raises(CanaryError, match="2 tokens for the learner and 1 for the engine"):
        agreement(torch.zeros(1), torch.zeros(2), torch.zeros(2))
    with pytest.raises(CanaryError, match="0 tokens"):
        agreement(torch.zeros(0), torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize(
    ("changes", "symptom"),
    [
        ({"temperature": 5326.0}, "the engine samples at 5326.000 times the trainer's temperature"),
        ({"mean_odds": 9.0}, "the engine's log-probabilities differ from the learner's by 9 of log-odds"),
    ],
)
def test_a_collapsed_policy_is_named_before_the_engine(changes: dict[str, float], symptom: str) -> None:
    for entropy, begin, fix in (
        (
            1e-5,
            "the policy has collapsed to an entropy of 1e-05 nats per token, so the last update",
            "lower learning_rate",
        ),
        (0.3, symptom, "c"),
    ):
        with pytest.raises(CanaryError, match=re.escape(symptom)) as caught:
            check_agreement(figures(**changes, entropy=entropy), noise=None, dtype=torch.bfloat16)
        assert caught.value.what.startswith(begin) and caught.value.fix.startswith(fix)


def test_where_every_token_was_certain_nothing_is_known_of_the_temperature() -> None:
    certain = torch.zeros(5)
    found = agreement(certain, certain, certain)
    assert (found.temperature, found.temperature_error) == (1.0, math.inf)
    check_agreement(found, noise=None, dtype=torch.float32)


RUNTIME = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)

HEAD = "lm_head.weight"


class Hides(NativeSampler):
    """An engine whose layer 0 can never be compared."""

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return sorted({*super().differing_parts(state), "layer 0"})


class HasAHead(NativeSampler):
    """An engine that reports a tied head as a matrix of its own."""

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return [] if HEAD in state else ["head"]


class HasNone(NativeSampler):
    """An engine whose tied head is its embedding."""

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return ["head"] if HEAD in state else []


def engine_of(kind: type[NativeSampler], folder: Path) -> NativeSampler:
    model = load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)
    return kind(model, ChatTokenizer.load(folder))


def prompts_for(folder: Path) -> list[Prompt]:
    tokenizer = ChatTokenizer.load(folder)
    turns = [(Message(role="user", content=text),) for text in ("3+4", "12-5", "1")]
    return [
        Prompt(prompt_id=str(n), messages=turn, token_ids=tokenizer.render_prompt(turn), reference="", task="")
        for n, turn in enumerate(turns)
    ]


def changed(folder: Path, made: Path, name: str) -> Path:
    """A copy of a model in which the tensors of that name are larger by half."""
    model = load_policy(folder, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if name in key:
                tensor *= 1.5
    save_model(model, folder, made)
    return made


@pytest.mark.parametrize("kind", [NativeSampler, Hides, HasAHead, HasNone])
def test_an_engine_that_serves_the_model_passes(start: Path, kind: type[NativeSampler]) -> None:
    verify_served_weights(engine_of(kind, start), start, prompts_for(start), RUNTIME, seed=0)


@pytest.mark.parametrize("kind", [NativeSampler, Hides])
@pytest.mark.parametrize("name", ["embed", "layers.0.", ""])
def test_an_engine_of_another_model_is_found(start: Path, tmp_path: Path, kind: type[NativeSampler], name: str) -> None:
    # Where no part agrees, log-probabilities are not asked: they might not tell a policy from its start.
    other = changed(start, tmp_path / "other", name)
    says = "the engine serves other weights than the model's in" + ("" if name else ".*: no module is equal")
    with pytest.raises(StorageError, match=says):
        verify_served_weights(engine_of(kind, start), other, prompts_for(start), RUNTIME, seed=0)
