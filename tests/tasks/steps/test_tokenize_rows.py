"""Texts as the token sequences that SFT and the reward model train on."""

from __future__ import annotations

from rlcore.tasks.steps.rows import DemonstrationRow, PairRow
from rlcore.tasks.steps.tokenize_rows import tokenize_demonstrations, tokenize_pairs
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message

QUESTION = (Message(role="user", content="3+4"),)
PAIR = PairRow(
    pair_id="p", set_id="s", messages=QUESTION, chosen="7", rejected="It is 8",
    margin=0.5, probability=0.9, weight=2.0, source="test",
)  # fmt: skip


def test_a_demonstration_trains_its_answer_and_not_its_question(tokenizer: ChatTokenizer) -> None:
    row = DemonstrationRow(demonstration_id="d", messages=QUESTION, completion="7", reference="7", task="sums")
    (shown,) = tokenize_demonstrations([row], tokenizer)
    prompt_ids, completion_ids = tokenizer.render_demonstration(QUESTION, "7")
    assert (shown.sequence.prompt_ids, shown.sequence.completion_ids) == (prompt_ids, completion_ids)
    assert all(shown.loss_mask)


def test_a_pair_keeps_its_label_and_has_both_sides_under_one_prompt(tokenizer: ChatTokenizer) -> None:
    (pair,) = tokenize_pairs([PAIR], tokenizer, max_tokens=200)
    assert pair.prompt_ids == tokenizer.render_prompt(QUESTION)
    assert pair.chosen_ids == tokenizer.render_demonstration(QUESTION, "7")[1]
    assert pair.rejected_ids == tokenizer.render_demonstration(QUESTION, "It is 8")[1]
    assert (pair.set_id, pair.margin, pair.probability, pair.weight) == ("s", 0.5, 0.9, 2.0)


def test_each_side_is_cut_to_the_budget_with_its_prompt(tokenizer: ChatTokenizer) -> None:
    (whole,) = tokenize_pairs([PAIR], tokenizer, max_tokens=200)
    budget = len(whole.prompt_ids) + 2
    (cut,) = tokenize_pairs([PAIR], tokenizer, max_tokens=budget)
    assert cut.rejected_ids == whole.rejected_ids[:2]
    assert cut.chosen_ids == whole.chosen_ids[:2]
