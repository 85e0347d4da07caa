"""Stages that train or promote a model: rl, reward_model and promote."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from rlcore.config import RlConfig
from rlcore.errors import ConfigError, StorageError, TrainingError
from rlcore.evaluation.promotion import Check, PromotionDecision
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.loop import HeldOut
from rlcore.loop.prompt_schedule import PromptSchedule
from rlcore.loop.rollouts import evaluate_held_out
from rlcore.metrics import check_names
from rlcore.rewards.base import failed_score, scored
from rlcore.sampling.base import SamplingParams
from rlcore.tasks.kinds.evaluate.step import Grader, answers, log_line, summarise
from rlcore.tasks.kinds.reward_model.kind import render as reward_page
from rlcore.tasks.kinds.reward_model.step import HeldOut as HeldOutPairs
from rlcore.tasks.kinds.reward_model.step import _require_accuracy, held_out_figures, run_reward_model, suspects_table
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.kinds.rl.step import seed_after
from rlcore.tasks.presets.settings import EvaluationConfig
from rlcore.tasks.promotion.kind import render as promote_page
from rlcore.tasks.steps.external import needed_reward_models
from rlcore.tasks.steps.rows import PairRow
from rlcore.training.label_audit import SuspectLabel
from rlcore.training.preferences import TokenPair, different_sequences
from rlcore.types import FailedRollout, Message, Prompt, Rollout, Score
from tests import strategies


def test_an_rl_stage_that_builds_on_another_draws_prompts_in_another_order_and_the_first_as_ever() -> None:
    template = strategies.scored_rollout(0.0).rollout.prompt
    prompts = [dataclasses.replace(template, prompt_id=str(number)) for number in range(50)]
    orders = [
        [prompt.prompt_id for prompt in PromptSchedule(prompts, 50, seed=seed_after(3, earlier)).prompts_for(1)]
        for earlier in range(3)
    ]
    assert orders[0] == [prompt.prompt_id for prompt in PromptSchedule(prompts, 50, seed=3).prompts_for(1)]
    assert len(set(map(tuple, orders))) == 3
    assert [sorted(order) for order in orders] == [sorted(orders[0])] * 3


class HalfDeadEngine:
    """Answers a prompt with its own name; produces nothing for those named ``failed``."""

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int
    ) -> list[list[Rollout | FailedRollout]]:
        return [[self._answer(prompt)] for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Rollout | FailedRollout:
        if prompt.task == "failed":
            return FailedRollout(prompt=prompt, reason="the engine died")
        rollout = strategies.scored_rollout(0.0).rollout
        return dataclasses.replace(rollout, prompt=prompt, text=prompt.task)


def grade(rollouts: Sequence[Rollout]) -> list[Score]:
    """Right, wrong, or not judged, as the text says."""
    return [
        failed_score("timeout") if r.text == "unjudged" else scored("math", float(r.text == "right")) for r in rollouts
    ]


@pytest.mark.parametrize(
    ("kinds", "accuracy", "failed"),
    [
        (("right", "wrong", "right", "right"), 0.75, 0),
        (("failed", "right", "failed", "right"), 0.5, 2),  # the answers stay with their prompts
        (("right", "unjudged", "failed", "wrong"), 0.25, 2),
        (("failed", "failed"), 0.0, 2),
    ],
)
def test_the_monitor_counts_failures_as_wrong_answers(kinds: tuple[str, ...], accuracy: float, failed: int) -> None:
    template = strategies.scored_rollout(0.0).rollout.prompt
    prompts = [
        dataclasses.replace(template, prompt_id=str(number), task=kind, reference="7")
        for number, kind in enumerate(kinds)
    ]
    words: list[str] = []
    held_out = HeldOut(prompts=prompts, verifier=grade)  # type: ignore[arg-type]
    engine: Any = HalfDeadEngine()
    figures = evaluate_held_out(engine, held_out, max_new_tokens=8, log=words.append)
    check_names(figures)
    assert (figures["eval/accuracy"], figures["eval/failed"]) == (accuracy, failed)
    assert ["counted as wrong" in text for text in words] == [True] * bool(failed)
    params = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=1, greedy=True)
    config = EvaluationConfig(num_problems=4, max_new_tokens=8)
    table = answers(engine, prompts, params, Grader(config, grade), seed=0)  # type: ignore[arg-type]
    summary = summarise(table, config, seed=0)
    assert {name: summary[name] for name in figures} == figures


def test_accuracy_counts_problems_with_a_reference_and_is_absent_where_none_has_one() -> None:
    template = strategies.scored_rollout(0.0).rollout.prompt
    engine: Any = HalfDeadEngine()
    params = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=1, greedy=True)
    config = EvaluationConfig(num_problems=4, max_new_tokens=8)

    def evaluated(*references: str) -> dict[str, float]:
        kinds = zip(("right", "wrong", "right", "wrong"), references, strict=True)
        prompts = [
            dataclasses.replace(template, prompt_id=str(number), task=kind, reference=reference)
            for number, (kind, reference) in enumerate(kinds)
        ]
        graded = Grader(config, grade)  # type: ignore[arg-type]
        return summarise(answers(engine, prompts, params, graded, seed=0), config, seed=0)

    some = evaluated("7", "7", "", " ")
    check_names(some)
    assert (some["eval/accuracy"], some["eval/problems"], some["eval/no_reference"]) == (0.5, 2, 2)
    assert log_line(some, 0.95).endswith(" n=2 no_reference=2")
    none = evaluated("", "", "", "")
    assert not [name for name in none if "accuracy" in name or "pass" in name]
    assert (none["eval/problems"], none["eval/no_reference"], none["eval/failed"]) == (0, 4, 0)
    assert log_line(none, 0.95) == "no_reference=4"


def settings(preset: str, stage: str, *overrides: str) -> RlConfig:
    return open_preset(preset, overrides).stage(stage, RlStage).settings


def test_a_constant_without_a_meaning_is_refused_before_any_stage_is_made() -> None:
    config = open_preset("tiny", ["stages.grpo.algorithm=sapo", "stages.grpo.update.objective.clip_low=0.1"])
    with pytest.raises(ConfigError, match="sapo does not use clip_low"):
        stages(config)


def test_a_reward_model_is_an_input_where_a_reward_or_the_critic_needs_it() -> None:
    grpo, ppo = settings("tiny", "grpo"), settings("tiny", "ppo")
    assert needed_reward_models(grpo) == ()
    assert needed_reward_models(ppo) == ("reward_model",)
    without = dataclasses.replace(ppo, rewards=grpo.rewards)
    critic = dataclasses.replace(without.critic, init_from="taste")
    assert needed_reward_models(without) == ()
    assert needed_reward_models(dataclasses.replace(without, critic=critic)) == ("taste",)
    assert needed_reward_models(dataclasses.replace(ppo, critic=critic)) == ("reward_model", "taste")


def test_a_start_that_is_not_the_sealed_one_is_not_trained_on(tmp_path: Path) -> None:
    config = SimpleNamespace(stage=SimpleNamespace(settings=None, half="all"))
    context: Any = SimpleNamespace(inputs={"sft": tmp_path}, config=config)
    with pytest.raises(StorageError, match="digests of the model are unreadable"):
        run_reward_model(context, start="sft")


@pytest.mark.parametrize("found", [0.59, float("nan")])
def test_an_accuracy_below_the_bound_or_that_is_no_number_fails_the_stage(found: float) -> None:
    _require_accuracy(0.6, 0.6, where="")
    with pytest.raises(TrainingError, match=r"the preset requires 0\.600"):
        _require_accuracy(found, 0.6, where="")


def held_out(scores: list[tuple[float, float]]) -> HeldOutPairs:
    """Pairs with the given scores of their sides; the chosen side has 1, 2, 3, … tokens, the rejected one 2."""
    pairs = [
        TokenPair(set_id=str(n), prompt_ids=(n,), chosen_ids=(3,) * (1 + n % 3), rejected_ids=(4, 4))
        for n in range(len(scores))
    ]
    flat = torch.tensor([score for sides in scores for score in sides])
    return HeldOutPairs(
        pairs=pairs, sequences=different_sequences(pairs), scores=flat, rewards=torch.stack([flat, flat + 0.2])
    )


def test_the_figures_of_six_pairs() -> None:
    # Margins 1, 1, 1, 1, -1, 1: five of six right. Longer in two of six, equal in two: the heuristic scores 3 / 6.
    found = held_out_figures(held_out([(1, 0), (1, 0), (1, 0), (1, 0), (0, 1), (1, 0)]), seed=0, confidence=0.95)
    metrics = found.metrics
    check_names(metrics)
    assert abs(metrics["rm/eval_accuracy"] - 5 / 6) < 1e-9
    assert metrics["rm/length_accuracy"] == 0.5
    assert abs(metrics["rm/gain_over_length"] - 1 / 3) < 1e-9
    assert metrics["rm/gain_over_length_low"] <= metrics["rm/gain_over_length"] <= metrics["rm/gain_over_length_high"]
    assert [metrics[f"rm/pairs_when_{name}"] for name in ("longer", "shorter", "equal")] == [2.0, 2.0, 2.0]
    assert metrics["rm/accuracy_when_equal"] == 0.5
    assert abs(metrics["rm/disagreement"] - 0.1) < 1e-6
    assert [row["num_pairs"] for row in found.reliability] == [6]
    page = reward_page(metrics, found.reliability, confidence=0.9)
    assert "0.833 [" in page.splitlines()[0]
    assert "| accuracy if the chosen answer is shorter | 1.000 [" in page


def test_suspects_are_written_with_their_row_margin_and_an_excerpt() -> None:
    messages = (Message(role="user", content="q" * 500),)
    rows = [
        PairRow(
            pair_id=f"p{n}",
            set_id=f"p{n}",
            messages=messages,
            chosen=f"yes {n}",
            rejected="no",
            margin=0.0,
            probability=1.0,
            weight=1.0,
            source="me",
        )
        for n in range(3)
    ]
    table = suspects_table([SuspectLabel(row=2, margin=-3.0), SuspectLabel(row=0, margin=1.0)], rows)
    assert table[["row", "pair_id", "margin", "chosen"]].to_dict("records") == [
        {"row": 2, "pair_id": "p2", "margin": -3.0, "chosen": "yes 2"},
        {"row": 0, "pair_id": "p0", "margin": 1.0, "chosen": "yes 0"},
    ]
    assert table["prompt"].str.len().max() == 160
    assert isinstance(suspects_table([], rows), pd.DataFrame)


ACCURACY = Check(
    name="accuracy", estimate=0.05, low=0.01, high=0.09, p_value=0.00213, limit=0.0, passed=True, sentence=""
)
LENGTH = Check(
    name="completion/length", estimate=80.0, low=80.0, high=80.0, p_value=None, limit=60.0, passed=False, sentence=""
)


def verdict(*checks: Check) -> PromotionDecision:
    return PromotionDecision(promote=False, look=2, alpha=0.0125, checks=checks, sentence="Refused: too long.")


def promote_page_answers(**correct: bool) -> pd.DataFrame:
    rows = [{"prompt_id": name, "correct": right, "completion": f"{name}|\n{right}"} for name, right in correct.items()]
    return pd.DataFrame(rows)


def test_every_check_is_a_row_and_what_is_no_estimate_has_no_interval() -> None:
    page = promote_page(
        "tiny-grpo", verdict(ACCURACY, LENGTH), {"challenger": promote_page_answers(a=True)}, champion="3"
    )
    assert page.startswith("# tiny-grpo: against version 3\n")
    assert "Look 2 at these held-out prompts, level 0.0125." in page
    # Two sides of 0.0125 leave 97.5 %.
    assert "| check | estimate | 97.5 % interval | limit | p | passed |" in page
    assert "| accuracy | 0.050 | [0.010, 0.090] | 0.000 | 0.0021 | yes |" in page
    assert "| completion/length | 80.000 | – | 60.000 | – | **no** |" in page
