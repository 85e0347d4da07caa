"""Judges that know the training pairs of the policy's reward model, found before a run."""

from __future__ import annotations

import pytest

from rlcore.flows.presets import open_preset
from rlcore.tasks.kinds.win_rate.kind import WinRateStage, rewards_behind, shared_pairs, win_rate_stage
from rlcore.tasks.preflight.config_warnings import unusual_values
from rlcore.tasks.preflight.reference_checks import promotion_reference_errors
from rlcore.tasks.presets.run import RunConfig

GIVEN = (
    "name=own",
    "model={source='folder',path='m',license='-'}",
    "data.pairs.adapter=hh",
    "data.pairs.path=pairs.jsonl",
    "data.prompts.adapter=hh",
    "data.prompts.path=pairs.jsonl",
)
COPY = "data.others={contract='preference_pairs',adapter='hh',path='%s',num_train=9,num_eval=9,max_tokens=9}"
TWIN = "the judge judge_model is a twin of the reward model reward_model: they share training pairs"
LATER = "stages.next={kind='sft',init_from='grpo',data=['shown'],num_steps=1,batch_size=1,learning_rate=1e-3}"
SHOWN = "data.shown={contract='demonstrations',adapter='hh',path='d.jsonl',num_train=9,num_eval=9,max_tokens=9}"


def preset(*overrides: str) -> RunConfig:
    return open_preset("preferences", (*GIVEN, *overrides))


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        ((), []),
        (("stages.judge_model.half=all",), [TWIN]),
        (("stages.judge_model.half=first",), [TWIN]),
        (("stages.reward_model.half=all", "stages.judge_model.half=all"), [TWIN]),
        ((COPY % "pairs.jsonl", "stages.judge_model.data=['others']", "stages.judge_model.half=all"), [TWIN]),
        ((COPY % "own.jsonl", "stages.judge_model.data=['others']", "stages.judge_model.half=all"), []),
        (
            ("stages.win_rate.judge.stage=reward_model",),
            ["the judge reward_model is the reward model that trained grpo"],
        ),
        ((SHOWN, LATER, "stages.win_rate.policy=next", "stages.judge_model.half=all"), [TWIN]),
        (("stages.win_rate.judge={kind='own:judge'}",), []),
    ],
)
def test_a_judge_that_shares_training_pairs_is_planned_as_such(overrides: tuple[str, ...], reasons: list[str]) -> None:
    config = preset(*overrides)
    own = config.stage("win_rate", WinRateStage)
    assert list(shared_pairs(config, own)) == reasons
    assert win_rate_stage("win_rate", config).run.keywords["shared"] == tuple(reasons)  # type: ignore[attr-defined]
    warned = [line for line in unusual_values(config, tuple(config.stages)) if "stages.win_rate.judge" in line]
    assert [reason in line for reason, line in zip(reasons, warned, strict=True)] == [True] * len(reasons)
    refused = list(promotion_reference_errors(config))
    assert len(refused) == len(reasons)
    assert all(line.startswith("promotion.win_rate = 'win_rate': the judge ") for line in refused)


def test_the_reward_models_of_the_policy_are_inputs_of_its_win_rate() -> None:
    config = preset()
    assert rewards_behind(config, config.stage("win_rate", WinRateStage)) == ("reward_model",)
    assert {"judge_model", "reward_model"} <= {*win_rate_stage("win_rate", config).inputs}
    verified = open_preset("win_rate")  # its policy was trained by a verifier
    assert rewards_behind(verified, verified.stage("win_rate", WinRateStage)) == ()
