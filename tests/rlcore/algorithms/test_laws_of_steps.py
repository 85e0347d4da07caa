"""Laws of a whole optimizer step, for every row of the table: splitting, packing, padding, order, ranks; in float64.

The policy is a table of logits, one row per token. What the update sees are the flat tokens of a step and the weights
that the row's weighting gives them.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms.objective import Coefficients, LossInputs, policy_loss
from rlcore.algorithms.table import ALGORITHMS
from rlcore.algorithms.weighting import WEIGHTINGS
from rlcore.config import RolloutCorrectionConfig
from tests import strategies

EVERY_ROW = pytest.mark.parametrize("name", sorted(ALGORITHMS))
COEFFICIENTS = Coefficients(
    kl=0.05, kl_estimator="k3_ratio", entropy=0.01, mismatch=RolloutCorrectionConfig(high=3.0), penalty=0.7
)
BARE = Coefficients(kl=0.0, kl_estimator="k2", entropy=0.0, mismatch=RolloutCorrectionConfig(mode="off"))
VOCABULARY = 5
law = settings(max_examples=min(12, settings.default.max_examples), deadline=None)


@dataclasses.dataclass(frozen=True)
class Step:
    """Sequences of one optimizer step. ``fields``: per sequence [T] tensors by name; the logits carry the gradient."""

    logits: list[torch.Tensor]
    targets: list[torch.Tensor]
    masks: list[torch.Tensor]
    fields: dict[str, list[torch.Tensor]]

    def __len__(self) -> int:
        return len(self.masks)


@st.composite
def steps(draw: st.DrawFn, *, min_sequences: int = 2) -> Step:
    """Up to five sequences of up to five tokens, each with at least one that trains."""
    masks = []
    for _ in range(draw(st.integers(min_sequences, 5))):
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=5))
        mask[draw(st.integers(0, len(mask) - 1))] = True
        masks.append(torch.tensor(mask))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def noise(length: int, scale: float) -> torch.Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64) * scale

    lengths = [len(mask) for mask in masks]
    logits = [noise(n * VOCABULARY, 1.0).reshape(n, VOCABULARY).requires_grad_() for n in lengths]
    targets = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    now = [
        rows.detach().log_softmax(1).gather(1, t[:, None]).squeeze(1) for rows, t in zip(logits, targets, strict=True)
    ]
    fields = {
        "old_logprobs": [p + noise(len(p), 0.3) for p in now],
        "sampler_logprobs": [p + noise(len(p), 0.2) for p in now],
        "ref_logprobs": [p + noise(len(p), 0.5) for p in now],
        "advantages": [noise(1, 1.0).expand(n).clone() for n in lengths],
    }
    return Step(logits, targets, masks, fields)


def weights_of(step: Step, name: str, *, extra_rows: int = 0, extra_columns: int = 0) -> list[torch.Tensor]:
    """Return the weight of each token over the whole step, with padding of any size."""
    width = max(map(len, step.masks)) + extra_columns
    mask = torch.zeros(len(step) + extra_rows, width, dtype=torch.bool)
    for row, own in enumerate(step.masks):
        mask[row, : len(own)] = own
    with strategies.double_precision():
        weights = ALGORITHMS[name].weighting(mask, strategies.one_each(mask))
    assert weights.dtype == torch.float64
    return [weights[row, : len(own)] for row, own in enumerate(step.masks)]


def flat(step: Step, weights: list[torch.Tensor], chosen: list[int]) -> LossInputs:
    """One micro-batch: the tokens of some sequences, in that order."""

    def join(columns: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([columns[i] for i in chosen])

    logprobs = join(step.logits).log_softmax(1)
    return LossInputs(
        policy_logprobs=logprobs.gather(1, join(step.targets)[:, None]).squeeze(1),
        entropy=-(logprobs.exp() * logprobs).sum(1),
        weights=join(weights),
        loss_mask=join(step.masks),
        sequence_index=torch.cat([torch.full((len(step.masks[i]),), place) for place, i in enumerate(chosen)]),
        **{name: join(columns) for name, columns in step.fields.items()},
    )


def gradients(step: Step, loss: torch.Tensor) -> torch.Tensor:
    """With respect to every logit of the step."""
    found = torch.autograd.grad(loss, step.logits, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(x) if g is None else g).flatten() for g, x in zip(found, step.logits, strict=True)]
    )


def run(name: str, step: Step, *micro_batches: list[int], weights: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The gradient of a step, accumulated over micro-batches."""
    weights = weights_of(step, name) if weights is None else weights
    parts = [
        gradients(step, policy_loss(flat(step, weights, chosen), ALGORITHMS[name], COEFFICIENTS).loss)
        for chosen in micro_batches
    ]
    return torch.stack(parts).sum(0)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@EVERY_ROW
@law
@given(step=steps(), data=st.data())
def test_any_split_into_micro_batches_in_any_order_has_the_same_gradient(
    name: str, step: Step, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(step))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(step) - 1))))
    pieces = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(step)])]
    close(run(name, step, *pieces), run(name, step, list(range(len(step)))))


@EVERY_ROW
@law
@given(step=steps(), rows=st.integers(0, 3), columns=st.integers(0, 3))
def test_padding_changes_nothing(name: str, step: Step, rows: int, columns: int) -> None:
    padded = weights_of(step, name, extra_rows=rows, extra_columns=columns)
    whole = list(range(len(step)))
    close(run(name, step, whole, weights=padded), run(name, step, whole))


@EVERY_ROW
@law
@given(step=steps())
def test_a_masked_token_does_not_touch_the_gradient_of_any_other(name: str, step: Step) -> None:
    fields = {
        key: [column.masked_fill(~mask, float("nan")) for column, mask in zip(columns, step.masks, strict=True)]
        for key, columns in step.fields.items()
    }
    whole = list(range(len(step)))
    result = run(name, dataclasses.replace(step, fields=fields), whole)
    close(result, run(name, step, whole))
    masked = torch.cat([(~mask).repeat_interleave(VOCABULARY) for mask in step.masks])
    assert not bool(result[masked].any())


@EVERY_ROW
@law
@given(step=steps(min_sequences=3))
def test_a_sequence_that_is_masked_as_a_whole_is_in_neither_numerator_nor_denominator(name: str, step: Step) -> None:
    masked = dataclasses.replace(step, masks=[torch.zeros_like(step.masks[0]), *step.masks[1:]])
    rest = list(range(1, len(step)))
    without = Step(
        step.logits[1:], step.targets[1:], step.masks[1:], {key: column[1:] for key, column in step.fields.items()}
    )
    first = step.logits[0].numel()
    result = run(name, masked, [0, *rest])
    close(result[first:], run(name, without, list(range(len(without)))))
    assert not bool(result[:first].any())


@EVERY_ROW
@law
@given(step=steps(), copies=st.integers(2, 3))
def test_a_step_of_copies_has_the_gradient_of_one(name: str, step: Step, copies: int) -> None:
    # A mean does not grow with the batch: each logit has 1/copies of its gradient in each of its copies.
    repeated = Step(
        step.logits * copies,
        step.targets * copies,
        step.masks * copies,
        {key: column * copies for key, column in step.fields.items()},
    )
    weights = weights_of(repeated, name)
    loss = policy_loss(flat(repeated, weights, list(range(len(repeated)))), ALGORITHMS[name], COEFFICIENTS).loss
    close(gradients(step, loss), run(name, step, list(range(len(step)))))


@EVERY_ROW
@law
@given(step=steps())
def test_without_advantage_and_without_other_terms_nothing_moves(name: str, step: Step) -> None:
    zero = {"advantages": [torch.zeros_like(a) for a in step.fields["advantages"]]}
    still = dataclasses.replace(step, fields=step.fields | zero)
    inputs = flat(still, weights_of(still, name), list(range(len(still))))
    assert not bool(gradients(still, policy_loss(inputs, ALGORITHMS[name], BARE).loss).any())


@EVERY_ROW
@law
@given(step=steps(), beta=st.floats(0.001, 2.0), bonus=st.floats(0.001, 1.0))
def test_the_terms_of_the_loss_add_up_with_their_coefficients(name: str, step: Step, beta: float, bonus: float) -> None:
    inputs = flat(step, weights_of(step, name), list(range(len(step))))

    def of(kl: float, entropy: float) -> torch.Tensor:
        return policy_loss(inputs, ALGORITHMS[name], dataclasses.replace(COEFFICIENTS, kl=kl, entropy=entropy)).loss

    surrogate = of(0.0, 0.0)
    expected = surrogate + beta * (of(1.0, 0.0) - surrogate) + bonus * (of(0.0, 1.0) - surrogate)
    torch.testing.assert_close(of(beta, bonus), expected, rtol=1e-9, atol=1e-12)


@EVERY_ROW
@law
@given(step=steps())
def test_the_figures_of_a_step_are_sums_over_its_tokens(name: str, step: Step) -> None:
    weights = weights_of(step, name)
    whole = policy_loss(flat(step, weights, list(range(len(step)))), ALGORITHMS[name], COEFFICIENTS)
    single = [policy_loss(flat(step, weights, [i]), ALGORITHMS[name], COEFFICIENTS) for i in range(len(step))]
    for metric, total in whole.sums.items():
        assert float(total) == pytest.approx(sum(float(one.sums[metric]) for one in single), rel=1e-9, abs=1e-12)
        assert not total.requires_grad
    for metric, largest in whole.maxima.items():
        assert float(largest) == max(float(one.maxima[metric]) for one in single)
    assert whole.num_tokens == sum(one.num_tokens for one in single) == sum(int(mask.sum()) for mask in step.masks)
    assert float(whole.sums["kl/old"]) >= 0.0
    assert float(whole.sums["kl/ref"]) >= 0.0


@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
@law
@given(mask=strategies.masks(), data=st.data())
def test_the_order_of_the_sequences_decides_no_weight(weighting: str, mask: torch.Tensor, data: st.DataObject) -> None:
    order = list(data.draw(st.permutations(range(len(mask)))))
    bound = {"constant_length": 7} if weighting == "constant" else {}
    function = WEIGHTINGS[weighting]
    episodes = data.draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)).map(torch.tensor))
    assert torch.equal(function(mask[order], episodes[order], **bound), function(mask, episodes, **bound)[order])


@law
@given(mask=strategies.masks())
def test_each_weighting_shares_the_step_as_its_formula_says(mask: torch.Tensor) -> None:
    lengths = mask.sum(1).double()
    trained = float((lengths > 0).sum())
    with strategies.double_precision():
        by_token, by_sequence, constant = (
            WEIGHTINGS["token_mean"](mask, strategies.one_each(mask)).sum(1),
            WEIGHTINGS["sequence_mean"](mask, strategies.one_each(mask)).sum(1),
            WEIGHTINGS["constant"](mask, strategies.one_each(mask), constant_length=7).sum(1),
        )
    close(by_token, lengths / max(1.0, float(lengths.sum())))
    close(by_sequence, (lengths > 0).double() / max(1.0, trained))
    close(constant, lengths / (7 * max(1.0, trained)))


@law
@given(step=steps(), repeats=st.integers(2, 4))
def test_a_mismatch_weight_of_a_sequence_does_not_shrink_or_grow_with_its_length(step: Step, repeats: int) -> None:
    # The same differences over and over: the geometric mean stays, a product would be taken to the power of repeats.
    longer = Step(
        [rows.repeat(repeats, 1) for rows in step.logits],
        [column.repeat(repeats) for column in step.targets],
        [column.repeat(repeats) for column in step.masks],
        {key: [column.repeat(repeats) for column in columns] for key, columns in step.fields.items()},
    )
    coefficients = dataclasses.replace(BARE, mismatch=RolloutCorrectionConfig(level="sequence", high=1e6))
    losses = []
    for data in (step, longer):
        inputs = flat(data, weights_of(data, "grpo"), list(range(len(data))))
        losses.append(policy_loss(inputs, ALGORITHMS["grpo"], coefficients).loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-12)
