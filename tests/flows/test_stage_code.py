"""Content of the key of a stage: its code and its settings, the machine if it computes, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.flows.run import run_targets
from rlcore.flows.stages import stages
from rlcore.tasks.keys.cache_keys import function_of, key_of
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.promotion.kind import promote_stages
from rlcore.tasks.store import code_hash
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.code_hash import closure_digests
from rlcore.tasks.store.settings import Home
from tests import known_sources
from tests.flows.conftest import ROOT, environment, flows_command, run_flows
from tests.flows.micro import MICRO, PRESETS
from tests.flows.warm import run_warm
from tests.flows.watched import CALL

SAMPLED = ("data.preferences.adapter=policy", "data.preferences.policy=sft")
MOST = 132  # modules that a key of an RL stage counts; a fifth of them read answers to problems of mathematics
TOOLS = "stages.{}.sampling.episodes={{tools=['calculator'],max_turn_tokens=20}}"


def modules_of(stage: Stage, config: RunConfig) -> frozenset[str]:
    return frozenset(closure_digests(function_of(stage.run)[0], chosen=stage.chosen(stage.sections(config))))


def closures(preset: str, *overrides: str) -> dict[str, frozenset[str]]:
    config = open_preset(preset, overrides)
    return {stage.name: modules_of(stage, config) for stage in stages(config)}


def keys_of(preset: str, *overrides: str) -> dict[str, str]:
    """The key of each stage, as for inputs that stay."""
    config = open_preset(preset, overrides)
    made = {stage.name: ArtifactRef(kind="", uri="", sha256=stage.name, bytes=0) for stage in stages(config)}
    return {stage.name: key_of(key_inputs(stage, config, made)) for stage in stages(config)}


def changed(*overrides: str, start: tuple[str, ...] = ()) -> set[str]:
    before, after = keys_of("tiny", *start), keys_of("tiny", *start, *overrides)
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
    assert {"rlcore.sampling.rejection", "rlcore.tasks.kinds.rl.curriculum"} <= found["grpo"]
    assert not {"rlcore.sampling.rejection", "rlcore.tasks.kinds.rl.curriculum"} & found["uniform"]
    assert "rlcore.tasks.kinds.difficulty.step" not in found["grpo"]


def test_a_recipe_that_runs_code_counts_the_sandbox() -> None:
    assert "rlcore.sandbox.box" in closures("rlvr_code")["grpo"]


@pytest.mark.parametrize(
    ("override", "modules"),
    [
        (TOOLS, {"rlcore.environments.episodes", "rlcore.environments.base"}),
        ("stages.{}.sampling.agent={{command=['sh']}}", {"rlcore.agents.sampler", "rlcore.agents.gateway"}),
        ("stages.{}.sampling.engine.kind=vllm", {"rlcore.sampling.replicas", "rlcore.sampling.vllm.client"}),
        ("stages.{}.rewards=[{{kind='format',weight=1.0}}]", {"rlcore.rewards.format"}),
        ("stages.{}.rewards=[{{kind='language',weight=1.0}}]", {"rlcore.rewards.text_rewards"}),
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
    before, after = keys_of(preset), keys_of(preset, "evaluation.confidence=0.9")
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
    assert {name for name, modules in found.items() if "rlcore.distributed.rank" in modules} == {
        *RL,
        "sft",
        "reward_model",
    }
    assert not any("rlcore.distributed.rank_pool" in modules for modules in closures("tiny").values())
    assert not any("rlcore.distributed.cluster.ray_cluster" in modules for modules in found.values())
    on_ray = closures("tiny", "distributed.backend=ray")
    assert {name for name, modules in on_ray.items() if "rlcore.distributed.cluster.ray_cluster" in modules} == {
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
    before = keys_of("tiny")
    replaced(copied / "rlcore/metrics.toml", "rises, then levels off", "rises, then stays")
    replaced(copied / "rlcore/tasks/drawing/plots.py", "dpi=110", "dpi=220")
    replaced(copied / "rlcore/tasks/kinds/compare/page.py", "results by stage", "what it was worth")
    assert keys_of("tiny") == before
    replaced(copied / "rlcore/algorithms/surrogates.py", "1.0", "1.5")
    after = keys_of("tiny")
    assert {name for name in before if before[name] != after[name]} == RL


ON_CPU = ("hardware.device=cpu", "hardware.num_threads=1")


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    return (*stages(config), *(promote_stages(config, None) if config.promotion else ()))


def machine_keys(config: RunConfig) -> Mapping[str, tuple[str, bool]]:
    """Key of each stage, apart from its inputs and files outside, and whether it has a machine."""
    found = {}
    for stage in stages(config):
        ingredients = {**key_inputs(stage, config, {}), "external": ""}
        found[stage.name] = (key_of(ingredients), bool(ingredients["machine"]))
    return found


def reasons(plan: str) -> dict[str, tuple[str, str]]:
    lines = [line for line in plan.splitlines() if not line.startswith("memory:")]
    rows = [line.split(maxsplit=2) for line in lines]
    return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}


@pytest.mark.parametrize("name", PRESETS)
def test_every_stage_that_loads_a_model_to_compute_has_the_machine_in_its_key(name: str) -> None:
    config = open_preset(name)
    computing = {
        stage.name
        for stage in stages_of(config)
        if "rlcore.tasks.steps.runtime" in closure_digests(function_of(stage.run)[0])
    }
    with_machine = {stage.name for stage in stages_of(config) if "hardware" in stage.sections(config).declared}
    assert with_machine - {"import_sft"} == computing
    assert ("import_sft" in with_machine) == (config.model.source == "scratch")


def test_two_configurations_of_different_precision_share_no_key_of_a_stage_that_computes() -> None:
    found = {
        dtype: machine_keys(open_preset("tiny", [*ON_CPU, f"hardware.dtype={dtype}"]))
        for dtype in ("auto", "float32", "bfloat16", "float16")
    }
    assert found["auto"] == found["float32"]
    for name, (key, has_machine) in found["float32"].items():
        others = {found[dtype][name][0] for dtype in ("bfloat16", "float16")}
        assert len({key, *others}) == (3 if has_machine else 1), name


def test_nothing_of_a_finished_run_is_taken_over_in_another_precision(micro_home: Path) -> None:
    same = reasons(run_flows("plan", micro_home, "hardware.dtype=float32").stdout)
    assert {state for state, _ in same.values()} == {"cached"}
    other = reasons(run_flows("plan", micro_home, "hardware.dtype=bfloat16").stdout)
    assert "cached" not in {state for state, _ in other.values()}
    computing = [name for name, (_, has_machine) in machine_keys(open_preset("tiny")).items() if has_machine]
    assert {"sft", "reward_model", "grpo", "ppo", "evaluate_grpo"} <= set(computing)
    for name in computing:
        assert other[name][1].startswith("machine changed: precision float32 -> bfloat16"), name


@pytest.mark.slow
def test_another_instruction_set_takes_nothing_over_either(
    micro_home: Path,
) -> None:
    """In a process of its own: torch chooses its instruction set once."""
    lowered = environment(micro_home) | {"ATEN_CPU_CAPABILITY": "default"}
    command = flows_command("plan", "hardware.dtype=float32")
    done = subprocess.run(command, capture_output=True, text=True, env=lowered, cwd=ROOT, check=True)
    plan = reasons(done.stdout)
    expected = "cached" if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else "run"
    assert (plan["sft"][0], plan["evaluate_sft"][0]) == (expected, expected)
    assert expected == "cached" or " -> DEFAULT" in plan["grpo"][1]


LOOKED_AT = ("grpo", "ppo", "evaluate_sft")
SMALL = (
    *(*MICRO, "evaluation.num_problems=8"),
    *(f"stages.{name}.{setting}=1" for name in ("grpo", "ppo") for setting in ("num_iterations", "eval_every")),
)


@pytest.fixture(scope="module")
def called(micro_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the modules of which each stage called a function."""
    folder = tmp_path_factory.mktemp("called")
    shutil.copytree(micro_home, folder / "home")  # it has what the stages read
    arguments = [json.dumps(SMALL), json.dumps(LOOKED_AT), str(folder / "called.json")]
    done = run_warm(arguments, environment(folder / "home"), ROOT, call=CALL)
    assert done.returncode == 0, done.stderr
    return {name: set(modules) for name, modules in json.loads((folder / "called.json").read_text()).items()}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_no_function_is_called_that_the_key_of_a_stage_does_not_count(name: str, called: dict[str, set[str]]) -> None:
    config = open_preset("tiny", SMALL)
    stage = next(stage for stage in stages(config) if stage.name == name)
    module, _ = function_of(stage.run)
    left_out = closure_digests(module).keys() - modules_of(stage, config)
    assert "rlcore.sampling.native" in called[name]
    assert sorted(called[name] & left_out) == []


OWN_KIND = """
from dataclasses import dataclass, field
from typing import ClassVar

from rlcore.tasks.store.storage import read_table
from rlcore.strict_config import INLINE
from rlcore.tasks.kinds import Product, Rows
from rlcore.tasks.kinds.kind import Stage, StageKind, own_sections, stages_of_data
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import StageContext, StageResult


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    at_least: int = 0


@dataclass(frozen=True, kw_only=True)
class LengthStage:
    produces: ClassVar[Product] = "measurements"
    consumes: ClassVar[Rows] = "prompts"
    data_key: ClassVar[str] = "data"
    is_compared: ClassVar[bool] = False
    kind: str
    policy: str
    data: tuple[str, ...]
    settings: LengthSettings = field(metadata=INLINE)


def measure(context: StageContext) -> StageResult:
    (rows,) = (read_table(next(folder.glob("train*.parquet"))) for folder in context.inputs.values())
    lengths = [len(reference) for reference in rows["reference"]]
    found = sum(length >= context.config.stage.settings.at_least for length in lengths)
    (context.folder / "long.txt").write_text(str(found))
    return StageResult(metrics={"long": found}, rows=len(lengths))


def stage(name: str, config: RunConfig) -> Stage:
    inputs = stages_of_data(config, config.stages[name].data)
    return Stage(name=name, artifact="lengths", run=measure, inputs=inputs, sections=own_sections(name))


KIND = StageKind(stage=stage)
"""
OWN_STAGE = ("stages.long.kind='own_kind:LengthStage'", "stages.long.policy='base'", "stages.long.data=['prompts']")


def test_a_stage_kind_of_a_users_module_runs_and_its_code_is_in_the_key(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_kind.py").write_text(OWN_KIND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_kind", raising=False)
    ref = run_targets("tiny", (*MICRO, *OWN_STAGE), ["long"])["long"]
    assert int((tracked_home.root / ref.uri / "long.txt").read_text()) == ref.rows > 0
    before = keys_of("tiny", *OWN_STAGE)
    (tmp_path / "own_kind.py").write_text(OWN_KIND.replace("sum(length", "max(length"))
    after = keys_of("tiny", *OWN_STAGE)
    assert {name for name in before if before[name] != after[name]} == {"long"}


NO_TABLE = "is no table of a stage kind; make it a dataclass with produces, consumes, data_key, is_compared, kind,"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("no_kind:Stage", ("", ""), "cannot import the stage kind 'no_kind:Stage': No module named 'no_kind'"),
        ("own_kind:Nothing", ("", ""), "has no attribute 'Nothing'"),
        ("own_kind:LengthStage", ("KIND =", "OTHER ="), "has no attribute 'KIND'"),
        ("own_kind:LengthStage", ("from typing", "raise SystemExit(3)\nfrom typing"), "'own_kind:LengthStage': 3"),
        ("own_kind:LengthStage", ("policy: str", "policy: Nothing"), "name 'Nothing' is not defined"),
        ("own_kind:KIND", ("", ""), NO_TABLE),
        ("own_kind:LengthStage", ("    policy: str\n", ""), NO_TABLE),
        ("own_kind:LengthStage", ("    settings: ", "    others: "), NO_TABLE),
        ("own_kind:LengthStage", ("StageKind(stage=stage)", "StageKind(stage=3)"), NO_TABLE),
        ("own_kind:LengthStage", ('data_key: ClassVar[str] = "data"', 'data_key = "rows"'), "data_key names a field"),
        ("own_kind:LengthStage", ('= "measurements"', '= "figures"'), "produces is one of checkpoint, reward_model,"),
    ],
)
def test_a_name_that_is_no_stage_kind_is_an_error_beside_all_others(
    kind: str, change: tuple[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert change[0] in OWN_KIND
    (tmp_path / "own_kind.py").write_text(OWN_KIND.replace(*change))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_kind", raising=False)
    with pytest.raises(ConfigError) as caught:
        open_preset("tiny", (*OWN_STAGE, f"stages.long.kind='{kind}'", "seed=-1"))
    assert words in caught.value.what and "seed = -1" in caught.value.what
