"""Pairs that the policy samples: right against wrong, from one prompt, or none at all."""

from __future__ import annotations

from rlcore.tasks.kinds.data.sampled_step import pair_of
from rlcore.types import Message, Prompt, Rollout, Score


def group(*texts: str) -> list[Rollout]:
    prompt = Prompt(
        prompt_id="q", messages=(Message(role="user", content="1+1"),), token_ids=(1,), reference="2", task="t"
    )
    return [
        Rollout(
            prompt=prompt,
            completion_ids=(5,),
            sampler_logprobs=(-0.1,),
            loss_mask=(True,),
            policy_version=0,
            finish_reason="stop",
            text=text,
        )
        for text in texts
    ]


class Equals:
    """Right where the text is the reference; a question mark cannot be judged."""

    name = "equals"

    def __call__(self, rollouts: list[Rollout]) -> list[Score]:
        return [
            Score(value=None, terms={}, error="?")
            if rollout.text == "?"
            else Score(value=float(rollout.text == rollout.prompt.reference), terms={})
            for rollout in rollouts
        ]


def test_the_first_right_answer_is_chosen_over_the_first_wrong_one() -> None:
    pair = pair_of(group("3", "2", "4", "2"), Equals(), "")
    assert pair is not None
    assert (pair["chosen"], pair["rejected"], pair["pair_id"], pair["source"]) == ("2", "3", "q", "policy")


def test_a_group_of_one_kind_gives_no_pair_and_what_could_not_be_judged_is_neither_right_nor_wrong() -> None:
    assert pair_of(group("2", "2"), Equals(), "") is None
    assert pair_of(group("2", "?"), Equals(), "") is None
    assert pair_of(group("3", "?"), Equals(), "") is None


def test_what_the_template_puts_into_the_assistants_mouth_belongs_to_both_answers() -> None:
    pair = pair_of(group("3", "2"), Equals(), "<think>\n")
    assert pair is not None
    assert (pair["chosen"], pair["rejected"]) == ("<think>\n2", "<think>\n3")
