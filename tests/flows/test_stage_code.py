from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.keys.cache_keys import function_of, key_of
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store import code_hash
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.code_hash import closure
from tests import known_sources
from tests.flows.conftest import ROOT

SAMPLED = ("data.preferences.adapter=policy", "data.preferences.policy=sft")
MOST = 132  # modules that a key of an RL stage counts; a fifth of them read answers to problems of mathematics
TOOLS = "stages.{}.sampling.episodes={{tools=['calculator'],max_turn_tokens=20}}"


def modules_of(stage: Stage, config: RunConfig) -> frozenset[str]:
    return closure(function_of(stage.run)[0], chosen=stage.chosen(stage.sections(config)))


def closures(preset: str, *overrides: str) -> dict[str, frozenset[str]]:
    config = open_preset(preset, overrides)
    return {stage.name: modules_of(stage, config) for stage in stages(config)}


def keys(preset: str, *overrides: str) -> dict[str, str]:
    """The key of each stage, as for inputs that stay."""
    config = open_preset(preset, overrides)
    made = {stage.name: ArtifactRef(kind="", uri="", sha256=stage.name, bytes=0) for stage in stages(config)}
    return {stage.name: key_of(key_inputs(stage, config, made)) for stage in stages(config)}


def changed(*overrides: str, start: tuple[str, ...] = ()) -> set[str]:
    """The stages that get another key by the overrides."""
    before, after = keys("tiny", *start), keys("tiny", *start, *overrides)
    return {name for name in before if before[name] != after[name]}


# Of each module, the stages of the preset that a change of it computes again.
RL, EVALUATIONS = {"grpo", "ppo"}, {"evaluate_base", "evaluate_sft", "evaluate_grpo", "evaluate_ppo"}
DEPENDENTS = {
    "rlcore.training.learner": RL,
    "rlcore.sampling.native": {*RL, *EVALUATIONS, "prepare_preferences"},  # everything that samples
    "rlcore.sampling.vllm.server": set(),
    "rlcore.training.sft": {"sft"},
    "rlcore.training.reward_model": {"reward_model"},
    # Pairs that are sampled are graded, and references are tried.
    "rlcore.rewards.math_answer": {*RL, *EVALUATIONS, "prepare_preferences", "prepare_prompts"},
    "rlcore.rewards.reward_model": {"ppo"},
    "rlcore.tasks.kinds.base.step": {"import_sft"},
    "rlcore.tasks.kinds.data.step": {"prepare_prompts", "prepare_demonstrations", "prepare_preferences"},
    "rlcore.tasks.kinds.compare.step": {"compare"},
}


@pytest.fixture(scope="module")
def sampled() -> dict[str, frozenset[str]]:
    return closures("tiny", *SAMPLED)


@pytest.mark.parametrize("module", sorted(DEPENDENTS))
def test_a_change_computes_again_the_stages_that_run_the_code_and_no_other(
    module: str, sampled: dict[str, frozenset[str]]
) -> None:
    assert {name for name, modules in sampled.items() if module in modules} == DEPENDENTS[module]


def test_servers_are_counted_where_they_sample() -> None:
    found = closures("tiny", "stages.grpo.sampling.engine.kind=vllm")
    assert {name for name, modules in found.items() if "rlcore.sampling.vllm.server" in modules} == {"grpo"}


def test_importing_a_model_and_reading_data_hang_on_no_training_code(sampled: dict[str, frozenset[str]]) -> None:
    training = ("rlcore.training", "rlcore.loop", "rlcore.algorithms", "rlcore.sampling", "rlcore.models")
    for name in ("prepare_prompts", "prepare_demonstrations"):
        assert not {module for module in sampled[name] if module.startswith(training)}, name
    for name in ("import_sft", "prepare_demonstrations"):  # nobody is graded by what they read
        assert not {module for module in sampled[name] if module.startswith("rlcore.rewards.")}, name


def test_an_rl_stage_counts_the_loop_and_the_mathematics_and_no_words_pictures_or_sandbox(
    sampled: dict[str, frozenset[str]],
) -> None:
    for name in sorted(RL):
        assert len(sampled[name]) <= MOST
        strange = (
            "rlcore.metrics",
            "rlcore.sandbox",
            "rlcore.tasks.report",
            "rlcore.tasks.keys",
            "rlcore.tasks.preflight",
            "rlcore.tasks.promotion",
            "rlcore.tasks.run",
            "rlcore.tasks.tracking",
        )
        assert [module for module in sampled[name] if module.startswith(strange)] == []


def test_a_stage_that_draws_by_pass_rates_counts_how_and_one_that_draws_evenly_does_not() -> None:
    found = closures("curriculum")
    assert {"rlcore.sampling.difficulty", "rlcore.tasks.kinds.rl.curriculum"} <= found["grpo"]
    assert not {"rlcore.sampling.difficulty", "rlcore.tasks.kinds.rl.curriculum"} & found["uniform"]
    assert "rlcore.tasks.kinds.difficulty.step" not in found["grpo"]


def test_a_recipe_that_runs_code_counts_the_sandbox() -> None:
    assert "rlcore.sandbox.box" in closures("rlvr_code")["grpo"]


@pytest.mark.parametrize(
    ("override", "modules"),
    [
        (TOOLS, {"rlcore.environments.episodes", "rlcore.environments.base"}),
        ("stages.{}.sampling.agent={{command=['sh']}}", {"rlcore.agents.sampler", "rlcore.agents.gateway"}),
        ("stages.{}.sampling.engine.kind=vllm", {"rlcore.sampling.replicas", "rlcore.sampling.vllm.client"}),
        ("stages.{}.rewards=[{{kind='format',weight=1.0}}]", {"rlcore.rewards.format", "rlcore.rewards.regex_matcher"}),
        ("stages.{}.rewards=[{{kind='language',weight=1.0}}]", {"rlcore.rewards.language"}),
    ],
)
def test_what_a_recipe_chooses_is_counted_and_nothing_of_it_is_without_the_choice(
    override: str, modules: set[str], sampled: dict[str, frozenset[str]]
) -> None:
    chosen = closures("tiny", *(override.format(name) for name in RL))
    for name in sorted(RL):
        assert not modules & sampled[name]
        assert modules <= chosen[name]


ADAPTER = "rlcore.examples.arithmetic:ADAPTER"
OTHERS = (  # another dataset of prompts, and no reward of a model
    f"data.more={{contract='prompts',adapter='{ADAPTER}',num_train=1,num_eval=9,max_tokens=64}}",
    "stages.ppo.rewards=[{kind='math'}]",
    "stages.ppo.critic.init_from=policy",
)


@pytest.mark.parametrize(
    ("look", "start"),
    [
        ("evaluation.confidence=0.9", SAMPLED),
        ("evaluation.num_problems=9", SAMPLED),
        ("evaluation.data=['more']", SAMPLED),
        ("evaluation.verifiers=[{kind='reward_model',stage='reward_model'}]", ()),
        ("evaluation.verifiers=[{kind='judge',options={url='http://judge:8000',model='judge'}}]", ()),
    ],
)
def test_how_checkpoints_are_evaluated_is_in_the_key_of_evaluations_and_of_nothing_that_trains(
    look: str, start: tuple[str, ...]
) -> None:
    assert changed(look, start=(*OTHERS, *start)) - {"compare"} == EVALUATIONS


@pytest.mark.parametrize("preset", ["curriculum", "reasoning", "rlhf_dpo"])  # each measures a stage that another reads
def test_the_level_of_intervals_is_in_the_key_of_no_stage_that_another_trains_from(preset: str) -> None:
    before, after = keys(preset), keys(preset, "evaluation.confidence=0.9")
    found = {name for name in before if before[name] != after[name]}
    assert found == {name for name in before if name.startswith(("evaluate_", "compare"))}


def test_the_machine_that_samples_pairs_is_in_their_key_and_pairs_that_are_read_have_none() -> None:
    assert "prepare_preferences" in changed("hardware.dtype=bfloat16", start=SAMPLED)
    assert "prepare_preferences" not in changed("hardware.dtype=bfloat16")


def test_how_many_ranks_learn_is_in_the_key_of_what_learns_on_them_and_how_long_they_may_take_is_not() -> None:
    two = ("distributed.backend=processes", "distributed.learner_ranks=2")
    assert changed(*two) == {*RL, "sft", "reward_model"}
    assert changed("distributed.timeout_minutes=5.0", "distributed.max_restarts=9", start=two) == set()
    assert changed("distributed.learner_ranks=4", start=two) == {*RL, "sft", "reward_model"}


def test_the_code_of_ranks_is_counted_where_there_are_some() -> None:
    found = closures("tiny", "distributed.backend=processes")
    assert {name for name, modules in found.items() if "rlcore.distributed.rank_process" in modules} == {
        *RL,
        "sft",
        "reward_model",
    }
    assert not any("rlcore.distributed.rank_pool" in modules for modules in closures("tiny").values())
    assert not any("rlcore.distributed.cluster.host" in modules for modules in found.values())
    on_ray = closures("tiny", "distributed.backend=ray")
    assert {name for name, modules in on_ray.items() if "rlcore.distributed.cluster.host" in modules} == {
        *RL,
        "sft",
        "reward_model",
    }


def test_neither_name_nor_tools_nor_budget_of_a_preset_are_in_a_key() -> None:
    assert changed("name=mine") == changed("tracking.also=['wandb']") == changed("budget.hours=1.0") == set()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources, in a folder where they may be edited, as the key function reads them."""
    shutil.copytree(ROOT / "rlcore", tmp_path / "rlcore", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_hash, "_ROOT", tmp_path)
    monkeypatch.setattr(code_hash, "_reach", known_sources.walk)
    return tmp_path


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_word_in_the_glossary_or_a_number_in_a_plot_changes_no_key_and_a_number_in_a_loss_does(copied: Path) -> None:
    before = keys("tiny")
    replaced(copied / "rlcore/metrics.toml", "rises, then levels off", "rises, then stays")
    replaced(copied / "rlcore/tasks/drawing/plots.py", "dpi=110", "dpi=220")
    replaced(copied / "rlcore/tasks/kinds/compare/page.py", "results by stage", "what it was worth")
    assert keys("tiny") == before
    replaced(copied / "rlcore/algorithms/surrogates.py", "1.0", "1.5")
    after = keys("tiny")
    assert {name for name in before if before[name] != after[name]} == RL
