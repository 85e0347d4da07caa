"""The graph of a preset: what follows from it, every fault with its full key, and what each stage's key counts."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.presets.graph import (
    STAGE_KINDS,
    checkpoints,
    contrasts,
    needed_stages,
    num_earlier_rl,
    registered_starts,
    required_by,
    same_start_runs,
    stage_order,
)
from rlcore.tasks.presets.run import RunConfig, load_preset
from rlcore.tasks.presets.sections import Sections, stage_sections

ROWS = 'adapter = "rlcore.examples.arithmetic:ADAPTER", num_train = 10, num_eval = 5, max_tokens = 64'
RL = """kind = "rl"
algorithm = "grpo"
num_iterations = 2
prompts_per_iteration = 2
group_size = 4
learning_rate = 1e-3
sampling = { max_new_tokens = 8 }"""
PRESET = f"""
name = "test"
seed = 0
model = {{ source = "scratch" }}
[data]
sums = {{ contract = "prompts", {ROWS} }}
code = {{ contract = "code_tasks", {ROWS} }}
pairs = {{ contract = "preference_pairs", {ROWS} }}

[stages.second]
{RL}
init_from = "first"
prompts = {{ sums = 1.0 }}
rewards = [{{ kind = "math" }}]

[stages.first]
{RL}
init_from = "base"
prompts = {{ sums = 0.7, code = 0.3 }}
rewards = [
  {{ kind = "math", data = ["sums"] }},
  {{ kind = "code", data = ["code"] }},
  {{ kind = "reward_model", stage = "taste", weight = 0.1 }},
]

[stages.taste]
kind = "reward_model"
init_from = "base"
data = ["pairs"]
num_epochs = 1
batch_size = 2
learning_rate = 1e-3
head_learning_rate = 1e-2

[stages.kept]
kind = "rejection"
policy = "second"
data = ["sums"]
num_samples = 2
rewards = [{{ kind = "math" }}]
sampling = {{ max_new_tokens = 8 }}

[stages.copied]
kind = "sft"
init_from = "base"
data = ["kept"]
num_steps = 3
batch_size = 2
learning_rate = 1e-3

[evaluation]
num_problems = 5
max_new_tokens = 8
verifiers = [{{ kind = "math", data = ["sums"] }}, {{ kind = "code", data = ["code"] }}]
"""


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "test.toml"
    path.write_text(PRESET, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def config(preset: Path) -> RunConfig:
    return load_preset(preset)


def test_stages_come_after_those_that_they_need_whatever_their_order_in_the_file(config: RunConfig) -> None:
    order = stage_order(config)
    for name, needed in needed_stages(config).items():
        assert all(order.index(each) < order.index(name) for each in needed)
    assert needed_stages(config)["first"] == ("taste",)
    assert needed_stages(config)["copied"] == ("kept",)


def test_every_policy_is_compared_with_its_start_teacher_and_siblings(config: RunConfig) -> None:
    assert list(checkpoints(config)) == ["base", "first", "second", "copied"]
    assert contrasts(config) == (
        ("first", "base"),
        ("second", "first"),
        ("copied", "base"),
        ("copied", "second"),
        ("copied", "first"),  # which started from the same
    )
    assert same_start_runs(config) == ()


def test_an_rl_stage_counts_those_that_it_builds_on_however_far_and_siblings_count_the_same(preset: Path) -> None:
    config = load_preset(preset)
    assert {name: num_earlier_rl(config, name) for name in ("first", "second", "copied")} == {
        "first": 0,
        "second": 1,
        "copied": 2,  # by what second answered
    }
    siblings = load_preset(preset, ["stages.second.init_from=base"])
    assert num_earlier_rl(siblings, "first") == num_earlier_rl(siblings, "second") == 0


def test_what_targets_need_are_their_stages_with_all_before_them_and_their_data(config: RunConfig) -> None:
    assert required_by(config, ["taste"]) == (("taste",), ("pairs",))
    assert required_by(config, ["prepare_sums"]) == ((), ("sums",))
    assert required_by(config, ["second"]) == (("second", "first", "taste"), ("sums", "code", "pairs"))
    assert required_by(config, ["evaluate_base"]) == ((), ("sums", "code"))
    assert required_by(config, ["compare"]) == (tuple(config.stages), tuple(config.data))


def test_stages_of_one_start_are_opponents_and_compared_with_each_other(preset: Path) -> None:
    config = load_preset(preset, ["stages.second.init_from=base"])
    assert [sorted(names) for names in same_start_runs(config)] == [["first", "second"]]
    assert {("second", "first"), ("first", "second")} & set(contrasts(config))


def test_a_registered_model_is_a_checkpoint_of_its_own_to_start_from(preset: Path) -> None:
    config = load_preset(preset, ["stages.first.init_from=models:/mine@champion"])
    assert registered_starts(config) == {"start_first": "models:/mine@champion"}
    assert list(checkpoints(config))[:3] == ["base", "start_first", "first"]
    assert ("first", "start_first") in contrasts(config)
    assert isinstance(checkpoints(config)["first"], RlStage)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("stages.first.init_from=second", "stages depend on each other: "),
        ("stages.first.init_from=fist", "stages.first.init_from = 'fist': no such checkpoint; choose one of base, sec"),
        ("stages.first.init_from=taste", "stages.first.init_from = 'taste': this stage makes a reward model, no polic"),
        ("stages.first.init_from=models:/mine", "stages.first.init_from = 'models:/mine': not a registered model; wri"),
        ("stages.first.prompts.cods=1.0", "stages.first.prompts.cods: no such data; choose among sums, code"),
        ("stages.first.prompts.pairs=1.0", "stages.first.prompts.pairs: has no prompts; choose among sums, code"),
        ("stages.first.prompts.code=0.0001", "stages.first.prompts.code = 0.0001: below a thousandth of all"),
        ("stages.first.rewards=[]", "stages.first.rewards: names no reward; add one, such as { kind = 'math' }"),
        ("stages.first.rewards=[{kind='math',weight=0}]", "stages.first.rewards: no weight is positive"),
        ("stages.first.rewards=[{kind='math',weight=-1}]", "stages.first.rewards: no weight is positive"),
        ("stages.kept.sampling.episodes={tools=['calculator'],max_turn_tokens=8}", "stages.kept.sampling.episodes dif"),
        ("stages.first.rewards.0.files=['a.txt']", "stages.first.rewards.0: files is only valid for a custom function"),
        ("stages.first.prompts={}", "stages.first.prompts: names no data"),
        ("stages.taste.data=['sums']", "stages.taste.data = 'sums': has no preference pairs; choose among pairs"),
        ("stages.copied.data=['sums']", "stages.copied.data = 'sums': has no demonstrations; choose among kept"),
        ("stages.taste.gold_pairs=['sums']", "stages.taste.gold_pairs = 'sums': has no preference pairs; choose among"),
        ("stages.taste.gold_pairs=['pairs']", "stages.taste.gold_pairs = 'pairs': is in stages.taste.data too; traini"),
        ("stages.first.rewards.1.data=['cod']", "stages.first.rewards.1.data = 'cod': the stage draws no prompts from"),
        ("stages.second.prompts.code=1.0", ""),
        ("stages.first.rewards.2.data=['sums']", ""),
        ("stages.first.rewards.2.stage=first", "stages.first.rewards.2.stage = 'first': not a stage of the kind"),
        ("stages.first.rewards.2.stage=''", "stages.first.rewards.2.stage = '': not a stage of the kind reward_model"),
        ("stages.first.rewards.0.stage=taste", "stages.first.rewards.0: stage is only valid for kind reward_model"),
        ("stages.first.critic.init_from=tast", "stages.first.critic.init_from = 'tast': not a stage of the"),
        ("stages.first.kind=rel", f"stages.first.kind = 'rel': must be one of {', '.join(map(repr, STAGE_KINDS))}"),
        ("data.pairs.adapter=policy", "data.pairs.policy: required by the adapter 'policy'; name one of base, "),
        ("data.pairs.policy=second", "data.pairs.policy = 'second': neither adapter nor fallback is 'policy'"),
        ("evaluation.data=['pairs']", "evaluation.data = 'pairs': no dataset of prompts; choose among sums, code"),
        ("evaluation.data=['sums','sums','code']", "evaluation.data: names 'sums' twice"),
        ("evaluation.verifiers=[{kind='math',data=['sums']}]", "evaluation.verifiers: 0 decide on the dataset 'code'"),
        ("evaluation.verifiers.0.data=[]", "evaluation.verifiers: 2 decide on the dataset 'code'"),
        ("evaluation.verifiers=[{kind='reward_model',stage='sums'}]", "evaluation.verifiers.0.stage = 'sums': no stag"),
        ("evaluation.verifiers.0.correct_from=0.5", "correct_from is not valid for kind 'math', which decides right"),
        ("promotion={challenger='taste'}", "promotion.challenger = 'taste': no checkpoint of this preset; choose one "),
        ("promotion={challenger='second',max_ref_kl=0.1}", "promotion.max_ref_kl: stages.second.kl.coefficient is 0, "),
        ("promotion={challenger='copied',max_ref_kl=0.1}", "promotion.max_ref_kl: the challenger 'copied' has no KL"),
        ("retrain={}", "retrain: needs [promotion] with a challenger among the RL stages first, second"),
    ],
)
def test_an_error_of_the_graph_is_named_with_its_full_key(preset: Path, override: str, error: str) -> None:
    if not error:
        assert load_preset(preset, [override])
        return
    with pytest.raises(ConfigError) as caught:
        load_preset(preset, [override])
    assert error in caught.value.what
    assert caught.value.where == str(preset)


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", "-x", "a\nb", "a" * 101])
def test_a_preset_whose_name_is_no_name_of_a_folder_or_a_model_is_refused(preset: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="names folders and models"):
        load_preset(preset, [f"name={json.dumps(name)}"])
    assert load_preset(preset, ["name=My run-1.5"]).name == "My run-1.5"


def test_a_data_set_that_no_reward_is_on_is_refused(preset: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages\.first\.rewards: no reward is on the dataset 'code'"):
        load_preset(preset, ["stages.first.rewards=[{kind='math',data=['sums']}]"])


def test_names_that_the_pipeline_uses_or_that_are_used_twice_are_refused(tmp_path: Path) -> None:
    for name, error in (
        ("compare", "not a name"),
        ("evaluate_x", "not a name"),
        ("pairs", "a dataset has this name too"),
    ):
        path = tmp_path / "test.toml"
        path.write_text(PRESET.replace("[stages.copied]", f"[stages.{name}]"))
        with pytest.raises(ConfigError, match=rf"stages\.{name}: {error}"):
            load_preset(path)


def test_pairs_cannot_be_sampled_from_policies_that_call_tools(preset: Path) -> None:
    tools = "sampling.episodes={tools=['calculator'],max_turn_tokens=8}"
    sampled = ["data.pairs.adapter=policy", "data.pairs.policy=base"]
    assert load_preset(preset, sampled)
    with pytest.raises(ConfigError, match=r"data\.pairs\.adapter = 'policy': a pair has two answers and no tool calls"):
        load_preset(preset, [*sampled, *(f"stages.{name}.{tools}" for name in ("first", "second", "kept"))])


VLLM = "engine.kind=vllm"


def changed(*overrides: str, start: tuple[str, ...] = (), preset: str = "tiny") -> set[str]:
    """Stages whose section is another one with the overrides."""
    before, after = (
        {stage.name: stage.sections(config).for_key() for stage in stages(config)}
        for config in (open_preset(preset, start), open_preset(preset, (*start, *overrides)))
    )
    return {name for name in before if before[name] != after[name]}


def test_the_runs_engine_is_in_the_key_of_everything_that_is_sampled_and_of_nothing_else() -> None:
    evaluations = {f"evaluate_{name}" for name in ("base", "sft", "grpo", "ppo")}
    assert changed(VLLM) == {"grpo", "ppo", *evaluations}
    sampled = ("data.preferences.adapter=policy", "data.preferences.policy=sft")
    assert changed(VLLM, start=sampled) == {"prepare_preferences", "grpo", "ppo", *evaluations}
    reasoning = changed(VLLM, preset="reasoning")
    assert {"rejection", "grpo_mixed"} <= reasoning
    assert not {"import_sft", "sft", "sft_kept", "compare"} & reasoning


def test_an_engine_of_an_evaluations_own_changes_no_training() -> None:
    assert {name.partition("_")[0] for name in changed("evaluation.engine.kind=vllm")} == {"evaluate"}
    assert changed("stages.grpo.sampling.engine.kind=vllm") == {"grpo"}
    assert changed(VLLM, start=("evaluation.engine.kind=native",)) == {"grpo", "ppo"}


@pytest.mark.parametrize(
    "override", ["engine.dtype=float16", "engine.gpus.tensor_parallel=2", "engine.enforce_eager=false"]
)
def test_what_changes_the_numbers_is_in_the_key(override: str) -> None:
    assert "evaluate_sft" in changed(override, start=(VLLM,))
    assert changed(override) == set()  # the native engine has no such thing


def test_where_an_engine_runs_is_in_no_key() -> None:
    own = ("python=/opt/engine/bin/python", "weight_dir=/data", "kv_cache_gib=2.0", "timeouts.startup_seconds=60.0")
    where = (*own, "replicas=4", "gpus.devices=[0,1,2,3]", "gpus.gpu_memory_utilization=0.5")
    assert changed(*(f"engine.{each}" for each in where), start=(VLLM,)) == set()


def test_what_was_not_declared_is_no_attribute() -> None:
    found = stage_sections(open_preset("tiny"), "sft")
    assert found.stage.settings.num_steps == 480
    with pytest.raises(AttributeError, match="'hardware', so its key does not count it"):
        _ = found.hardware
    assert copy.copy(found) == found


def test_a_data_set_without_a_system_prompt_has_the_model_s() -> None:
    config = open_preset("tiny", ["model.system_prompt=Be brief.", "data.prompts.system_prompt=Own."])
    found = {stage.name: stage.sections(config) for stage in stages(config)}
    assert found["prepare_prompts"].data["prompts"].system_prompt == "Own."
    assert found["prepare_demonstrations"].data["demonstrations"].system_prompt == "Be brief."
    assert {"prepare_demonstrations", "prepare_preferences"} <= changed("model.system_prompt=Be brief.")


def test_where_a_file_lies_is_in_no_key_and_its_name_is() -> None:
    start = ("data.prompts.adapter=gsm8k", "data.prompts.path=a/rows.jsonl", "data.prompts.eval_path=a/test.jsonl")
    elsewhere = ("data.prompts.path=/b/rows.jsonl", "data.prompts.eval_path=c/test.jsonl")
    assert changed(*elsewhere, start=start) == set()
    assert "prepare_prompts" in changed("data.prompts.path=a/other.jsonl", start=start)
    model = ("model.source=folder", "model.path=weights/qwen", "model.chat_template=a.jinja")
    assert changed("model.path=/data/weights/qwen", "model.chat_template=b/a.jinja", start=model) == set()
    assert "import_sft" in changed("model.source=hub", start=model)


def test_the_files_that_sections_name_are_known_with_their_folders_and_counted_without() -> None:
    data = dataclasses.replace(open_preset("tiny").data["prompts"], adapter="prompts", path="rows.jsonl")
    sections = Sections({"data": {"prompts": data, "pairs": dataclasses.replace(data, path="hub:a/b@0")}})
    assert sections.files() == {"data.prompts.path": str(Path("rows.jsonl").absolute())}
    played = open_preset("towns_agent", ["stages.grpo.sampling.agent.sandbox_read=['/data']"])
    at, named = "stage.sampling.agent", played.stages["grpo"].settings.sampling.agent.files
    assert stage_sections(played, "grpo").files() == {
        **{f"{at}.files.{number}": str(Path(file).absolute()) for number, file in enumerate(named)},
        f"{at}.sandbox_read.0": "/data",
    }
    elsewhere = Sections({"data": {"prompts": dataclasses.replace(data, path="/elsewhere/rows.jsonl")}})
    assert elsewhere.for_key()["data"]["prompts"] == sections.for_key()["data"]["prompts"]
