"""The policy on packed batches: equal to one sequence at a time, whatever shares a row, a batch or a prompt."""

from __future__ import annotations

import torch

from rlcore.models.policy import completion_logprobs, score_sequences
from rlcore.text.packing import TokenSequence, pack
from tests import strategies
from tests.largest_tensor import LargestTensor
from tests.reference.losses import one_at_a_time
from tests.rlcore.models.packed import BOUNDS, BUDGETS, PRECISIONS, gradient_error, packed_loss


@PRECISIONS
@BUDGETS
def test_packed_log_probabilities_equal_those_of_one_sequence_at_a_time(dtype: torch.dtype, budget: int) -> None:
    model, sequences = strategies.tiny_llama(dtype=dtype), strategies.random_sequences(0, max_tokens=9)
    for batch in pack(sequences, tokens_per_microbatch=budget):
        logprobs, _ = completion_logprobs(model, batch, temperature=0.8)
        for number in batch.sequences.tolist():
            expected = one_at_a_time(model, sequences[number], temperature=0.8)
            ours = logprobs[batch.sequence_index == number]
            torch.testing.assert_close(ours, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@PRECISIONS
@BUDGETS
def test_packed_gradients_equal_those_of_one_sequence_at_a_time(dtype: torch.dtype, budget: int) -> None:
    assert gradient_error(strategies.tiny_llama(dtype=dtype), budget) < BOUNDS[dtype]


def test_the_order_of_the_sequences_changes_nothing() -> None:
    model, sequences = strategies.tiny_llama(dtype=torch.float64), strategies.random_sequences(2)
    forwards = score_sequences(model, sequences, tokens_per_microbatch=40)
    backwards = score_sequences(model, sequences[::-1], tokens_per_microbatch=40)
    for first, second in zip(forwards, backwards[::-1], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_an_untied_head_is_used_and_trained() -> None:
    model = strategies.tiny_llama(tie_word_embeddings=False)
    sequences = strategies.random_sequences(3)
    ours = score_sequences(model, sequences, tokens_per_microbatch=100)[0]
    torch.testing.assert_close(ours, one_at_a_time(model, sequences[0]).detach(), rtol=1e-5, atol=1e-5)
    packed_loss(model, sequences, 100).backward()
    assert model.lm_head.weight.grad is not None


def test_scores_are_float32_on_the_cpu_one_tensor_a_sequence() -> None:
    sequences = strategies.random_sequences(4)
    scores = score_sequences(strategies.tiny_llama(dtype=torch.float64), sequences, tokens_per_microbatch=50)
    assert [len(score) for score in scores] == [len(sequence.completion_ids) for sequence in sequences]
    assert {(score.dtype, score.device.type, score.requires_grad) for score in scores} == {
        (torch.float32, "cpu", False)
    }


def test_prompt_positions_get_no_logits() -> None:
    vocabulary, prompt = 2000, tuple(range(60))
    model = strategies.tiny_llama(vocab_size=vocabulary)
    (batch,) = pack([TokenSequence(prompt_ids=prompt, completion_ids=(5, 2))], tokens_per_microbatch=100)
    with LargestTensor() as largest:
        completion_logprobs(model, batch)[0].sum().backward()
    embeddings = vocabulary * model.config.hidden_size
    assert largest.num_elements == embeddings  # 48,000; logits of all 62 positions would be 124,000
