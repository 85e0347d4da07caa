"""What a stage's key hangs on: the code that it runs, and not that of other stages."""

from __future__ import annotations

import pytest

from flows.presets import open_preset
from flows.stages import stages
from tasks.home.code_hash import closure
from tasks.pipeline.keys import function_of

CLOSURES = {stage.name: closure(function_of(stage.run)[0]) for stage in stages(open_preset("tiny"))}
# Of each module, the stages of the preset that a change of it computes again.
RL, EVALUATIONS = {"grpo", "ppo"}, {"evaluate_base", "evaluate_sft", "evaluate_grpo", "evaluate_ppo"}
DEPENDENTS = {
    "rlcore.training.learner": RL,
    "rlcore.sampling.vllm_server": {*RL, *EVALUATIONS, "prepare_preferences"},  # everything that samples
    "rlcore.training.sft": {"sft"},
    "rlcore.training.reward_model": {"reward_model"},
    "rlcore.rewards.math_answer": {
        *RL,
        *EVALUATIONS,
        "prepare_preferences",
    },  # pairs that the policy samples are graded
    "tasks.steps.import_sft": {"import_sft"},
    "tasks.steps.prepare": {"prepare_prompts", "prepare_demonstrations", "prepare_preferences"},
    "tasks.steps.compare": {"compare"},
}


@pytest.mark.parametrize("module", sorted(DEPENDENTS))
def test_a_change_computes_again_the_stages_that_run_the_code_and_no_other(module: str) -> None:
    assert {name for name, modules in CLOSURES.items() if module in modules} == DEPENDENTS[module]


def test_importing_a_model_and_reading_data_hang_on_no_training_code() -> None:
    for name in ("import_sft", "prepare_prompts", "prepare_demonstrations"):
        assert not {module for module in CLOSURES[name] if module.startswith("rlcore.rewards.")}, name
