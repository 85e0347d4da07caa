"""Presets: files and overrides, the rules between fields, and what every preset must state."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from rlcore import config
from rlcore.algorithms.kl import KL_LOSSES
from rlcore.config import KlConfig, to_dict
from rlcore.errors import ConfigError
from rlcore.strict_config import build
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.presets.key_reference import describe
from rlcore.tasks.presets.run import RunConfig, load_preset
from tests import strategies

SHIPPED = Path(__file__).resolve().parents[3] / "flows" / "presets"
DATA = """
[data.{name}]
contract = "{contract}"
adapter = "rlcore.examples.arithmetic:ADAPTER"
num_train = 10
num_eval = 5
max_tokens = 64
"""
RL = """
[stages.{name}]
kind = "rl"
init_from = "sft"
prompts = {{ prompts = 1.0 }}
algorithm = "{name}"
num_iterations = 2
prompts_per_iteration = 2
group_size = 4
learning_rate = 1e-3
rewards = [{rewards}]
sampling = {{ max_new_tokens = 8 }}
"""
MATH, LEARNED = '{ kind = "math" }', '{ kind = "reward_model", stage = "reward_model", weight = 0.1 }'
PRESET = f"""
name = "test"
seed = 0

[model]
source = "scratch"

{DATA.format(name="prompts", contract="prompts")}
{DATA.format(name="demonstrations", contract="demonstrations")}
{DATA.format(name="preferences", contract="preference_pairs")}

[stages.sft]
kind = "sft"
init_from = "base"
data = ["demonstrations"]
num_steps = 3
batch_size = 2
learning_rate = 1e-3

[stages.reward_model]
kind = "reward_model"
init_from = "sft"
data = ["preferences"]
num_epochs = 1
batch_size = 2
learning_rate = 1e-3
head_learning_rate = 1e-2

{RL.format(name="grpo", rewards=MATH)}
{RL.format(name="ppo", rewards=f"{MATH}, {LEARNED}")}

[evaluation]
num_problems = 5
max_new_tokens = 8
"""


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    """A small preset on disk."""
    path = tmp_path / "test.toml"
    path.write_text(PRESET, encoding="utf-8")
    return path


def test_a_preset_is_read_with_its_defaults(preset: Path) -> None:
    run = load_preset(preset)
    assert (run.name, run.stages["grpo"].settings.group_size, run.stages["grpo"].settings.update.num_epochs) == (
        "test",
        4,
        1,
    )
    assert run.stages["grpo"].settings.update.rollout_correction.mode == "truncate"  # the correction is on by default


def test_overrides_reach_nested_fields_and_items_of_lists(preset: Path) -> None:
    overrides = ["stages.grpo.learning_rate=2e-6", "stages.ppo.rewards.0.weight=0.5", "stages.sft.optim.beta1=0.0"]
    run = load_preset(preset, [*overrides, "data.prompts.path=data/my.jsonl"])
    assert run.stages["grpo"].settings.learning_rate == 2e-6
    assert [term.weight for term in run.stages["ppo"].settings.rewards] == [0.5, 0.1]
    assert run.stages["sft"].settings.optim.beta1 == 0.0
    assert run.data["prompts"].path == "data/my.jsonl"
    assert set(load_preset(preset, ['without=["stages.ppo"]']).stages) == {"sft", "reward_model", "grpo"}


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "stages.grpo.learning_rat=1e-6",
            "stages.grpo.learning_rat: unknown key; did you mean stages.grpo.learning_rate?",
        ),
        ("stage.grpo.num_iterations=2", "stage: unknown key; did you mean stages?"),
        ("stages.grpo.learning_rate=-1.0", "stages.grpo.learning_rate = -1.0: must be greater than 0.0"),
        ("stages.grpo.update.num_epochs=0", "stages.grpo.update.num_epochs = 0: must be at least 1"),
        ("stages.grpo.group_size=four", "stages.grpo.group_size = 'four': must be an integer, not a string"),
        ("stages.sft.optim.beta1=1.0", "stages.sft.optim.beta1 = 1.0: must be less than 1.0"),
        ("stages.ppo.critic.lam=1.1", "stages.ppo.critic.lam = 1.1: must be between 0.0 and 1.0"),
        ("stages.ppo.critic.gae.lam_value=2.0", "stages.ppo.critic.gae.lam_value = 2.0: must be between 0.0 and 1.0"),
        ("stages.ppo.critic.optim.beta1=1.0", "stages.ppo.critic.optim.beta1 = 1.0: must be less than 1.0"),
        ("stages.ppo.rewards.1.kind=3", "stages.ppo.rewards.1.kind = 3: must be a string, not an integer"),
        ("stages.grpo.kl.coefficient=nan", "stages.grpo.kl.coefficient = nan: must be a finite number"),
        ("stages.grpo.kl.target=0.1", "stages.grpo.kl: target > 0 needs a starting coefficient > 0"),
        ("stages.grpo.update.objective.dual_clip=0.9", "stages.grpo.update.objective: dual_clip must be above 1"),
        (
            "stages.grpo.update.objective.clip_low=-0.1",
            "stages.grpo.update.objective.clip_low = -0.1: must be at least 0.0",
        ),
        (
            "stages.grpo.update.objective.scale=std",
            "stages.grpo.update.objective.scale = 'std': must be one of 'group', ",
        ),
        ("stages.grpo.update.early_stop_ref_kl=0.1", "stages.grpo: update.early_stop_ref_kl needs kl.coefficient > 0"),
        ("stages.reward_model.trainable_layers=0", "stages.reward_model.trainable_layers: unknown key"),
        (
            "stages.grpo.update.rollout_correction.high=0.1",
            "stages.grpo.update.rollout_correction: low must not be above high",
        ),
        ("hardware.num_threads=100000", "hardware.num_threads = 100000: must be between 0 and 1024"),
        ("distributed.timeout_minutes=1e300", "distributed.timeout_minutes = 1e+300: must be less than 1000000.0"),
        ("model.shape.num_heads=5", "model.shape: hidden_size must be a multiple of 2 * num_heads"),
        ("model.shape.num_kv_heads=4", "model.shape: num_heads must be a multiple of num_kv_heads"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_before_anything_runs(preset: Path, override: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_preset(preset, [override])
    assert fault in caught.value.what
    assert caught.value.where == str(preset)


def test_all_faults_of_a_preset_are_listed_at_once(preset: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_preset(preset, ["seed=-1", "stages.sft.num_steps=0", "stages.grpo.kl.apply_to=nowhere", "extra=1"])
    assert len(caught.value.what.splitlines()) == 1 + 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name = ", "not valid TOML"),
        ("name = 'é'".encode("utf-16"), "not written in UTF-8: byte 0xff in line 1"),
        (b"name = 'a'\n# \xe9", "not written in UTF-8: byte 0xe9 in line 2"),
        (b"#" * 2_000_000, "more than 1 MiB"),
        (b"".join(b"k%d = 1\n" % number for number in range(8_000)), "more than 2,000 keys and values"),
        (b"a = " + b"[" * 320 + b"]" * 320, "nested in more than 32 levels"),
        (b"[" + b".".join([b"a"] * 320) + b"]", "nested in more than 32 levels"),
        (None, "cannot read"),
    ],
)
def test_an_unreadable_preset_is_refused_with_its_path(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_preset(path)
    assert caught.value.where == str(path)


def test_the_plain_values_of_a_preset_build_it_again(preset: Path) -> None:
    run = load_preset(preset, ["stages.grpo.kl.coefficient=0.1"])
    assert build(RunConfig, to_dict(run)) == run


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_adaptive_coefficient_is_accepted_in_the_reward_and_in_the_loss(placement: Any) -> None:
    assert KlConfig(target=1.0, coefficient=0.1, apply_to=placement).target == 1.0


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["backbone.trainable_layers=0"], "stages.reward_model.backbone: lora.rank > 0 freezes the backbone"),
        (["backbone.trainable_layers=2"], "stages.reward_model.backbone: lora.rank > 0 freezes the backbone"),
        (["backbone.layers=1"], "stages.reward_model.backbone: lora.rank > 0 keeps the whole backbone"),
        (["ensemble=2"], "stages.reward_model: backbone.lora.rank > 0 trains one reward model, so ensemble must be 1"),
    ],
)
def test_what_makes_no_sense_with_an_adapter_of_the_reward_model_is_refused(
    preset: Path, overrides: list[str], fault: str
) -> None:
    adapted = "stages.reward_model.backbone.lora.rank=2"
    changed = [f"stages.reward_model.{override}" for override in overrides]
    assert load_preset(preset, changed)  # without an adapter
    assert load_preset(preset, [adapted])
    with pytest.raises(ConfigError) as caught:
        load_preset(preset, [adapted, *changed])
    assert fault in caught.value.what


def test_a_stage_is_given_by_its_name_and_kind_or_refused_with_those_there_are(preset: Path) -> None:
    run = load_preset(preset)
    assert run.stage("grpo", RlStage) is run.stages["grpo"]
    with pytest.raises(ConfigError, match=r"no such stage 'sft'(?s:.*)name one of grpo, ppo"):
        run.stage("sft", RlStage)


def test_a_critic_that_is_an_adapter_of_the_reward_model_needs_one_that_is_an_adapter(preset: Path) -> None:
    overrides = [
        "stages.ppo.update.lora.rank=2",
        "stages.ppo.critic.architecture=lora",
        "stages.ppo.critic.init_from=reward_model",
    ]
    with pytest.raises(ConfigError, match=r"stages\.ppo\.critic .* set stages\.reward_model\.backbone\.lora\.rank > 0"):
        load_preset(preset, overrides)
    assert load_preset(preset, [*overrides, "stages.reward_model.backbone.lora.rank=4"])


def test_every_kl_estimator_that_can_be_configured_exists() -> None:
    assert set(typing.get_args(typing.get_type_hints(KlConfig)["estimator"])) == set(KL_LOSSES)


OF_THE_LIBRARY = {kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)}
SECTIONS = OF_THE_LIBRARY | {section.kind for section in describe()}


@pytest.mark.parametrize("kind", sorted(SECTIONS, key=lambda kind: kind.__name__))
def test_every_section_is_frozen_documented_and_small(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # the one that dataclass writes
    assert len(dataclasses.fields(kind)) <= 14 or kind is RunConfig  # a preset is a list of sections


def extended(folder: Path, text: str) -> Path:
    (folder / "base.toml").write_text(PRESET)
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_preset_that_extends_another_changes_only_what_it_names(tmp_path: Path) -> None:
    path = extended(tmp_path, 'extends = "base"\nname = "mine"\n[stages.grpo.kl]\ncoefficient = 0.25\n')
    base, grpo = load_preset(tmp_path / "base.toml"), load_preset(tmp_path / "base.toml").stages["grpo"]
    kl = dataclasses.replace(grpo.settings.kl, coefficient=0.25)
    changed = dataclasses.replace(grpo, settings=dataclasses.replace(grpo.settings, kl=kl))
    assert load_preset(path) == dataclasses.replace(base, name="mine", stages={**base.stages, "grpo": changed})
    overridden = load_preset(path, ["stages.grpo.kl.coefficient=0.5"])  # which comes after what is extended
    assert overridden.stages["grpo"].settings.kl.coefficient == 0.5


def test_a_preset_may_leave_out_sections_of_its_base_and_replaces_a_list_as_a_whole(tmp_path: Path) -> None:
    text = 'extends = "base"\nwithout = ["data.preferences", "stages.ppo", "stages.reward_model"]\n'
    mine = load_preset(extended(tmp_path, f'{text}[stages.grpo]\nrewards = [{{ kind = "format", weight = 2.0 }}]\n'))
    assert (set(mine.data), set(mine.stages)) == ({"prompts", "demonstrations"}, {"sft", "grpo"})
    assert [term.kind for term in mine.stages["grpo"].settings.rewards] == ["format"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "base"\nwithout = ["stages.reward_model"]\n', r"rewards\.1\.stage = 'reward_model': not a stage"),
        ('extends = "base"\nwithout = ["nothing"]\n', "'nothing', which the extended preset does not have"),
        ('extends = "bse"\n', r"extends = 'bse': there is no such preset\n.*mine.toml\n.*name one of base$"),
        ('extends = "base.toml"\n', "name one of base$"),
        ('extends = "../base"\n', "not the name of a preset"),
        ("extends = 3\n", "not the name of a preset"),
        ('extends = "mine"\n', "in a circle"),
    ],
)
def test_a_base_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_preset(extended(tmp_path, text))


FILES = """
extends = "base"
[model]
source = "folder"
path = "weights/qwen"
license = "MIT"
chat_template = "chat.jinja"
[data.prompts]
adapter = "prompts"
path = "rows.jsonl"
eval_path = "../test.jsonl"
[data.preferences]
path = "hub:a/b@0"
[promotion]
challenger = "grpo"
[stages.grpo]
rewards = [{ kind = "judge", options = { template = "judge.txt" } }]
[stages.grpo.sampling.episodes]
tools = ["search"]
search_corpus = "/data/passages.jsonl"
max_turn_tokens = 8
[stages.ppo.sampling.episodes]
tools = ["search"]
search_corpus = "/data/passages.jsonl"
max_turn_tokens = 8
"""


def test_relative_paths_start_at_the_preset_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    path = extended(tmp_path / "mine", FILES)
    monkeypatch.chdir(tmp_path)
    run = load_preset(path, ["data.demonstrations.path=here.jsonl"])
    assert (run.model.path, run.model.chat_template) == ("mine/weights/qwen", "mine/chat.jinja")
    assert (run.data["prompts"].path, run.data["prompts"].eval_path) == ("mine/rows.jsonl", "test.jsonl")
    assert run.data["preferences"].path == "hub:a/b@0"
    assert run.data["demonstrations"].path == "here.jsonl"  # of the command line
    grpo = run.stages["grpo"].settings
    assert grpo.rewards[0].options["template"] == "mine/judge.txt"
    assert grpo.sampling.episodes.search_corpus == "/data/passages.jsonl"
    monkeypatch.chdir(tmp_path / "mine")
    run = load_preset(path)
    assert (run.data["prompts"].path, run.data["prompts"].eval_path) == ("rows.jsonl", str(tmp_path / "test.jsonl"))


def test_the_paths_of_a_library_s_presets_start_at_the_current_folder(tmp_path: Path) -> None:
    path = extended(tmp_path, FILES)
    assert load_preset(path, library=tmp_path).data["prompts"].path == "rows.jsonl"


def test_a_path_that_is_no_file_s_is_left_as_it_is(tmp_path: Path) -> None:
    text = 'extends = "base"\n[model]\nsource = "hub"\npath = "org/name"\nrevision = "0"\n'
    assert load_preset(extended(tmp_path, text)).model.path == "org/name"


@pytest.mark.parametrize(
    ("text", "overrides", "licence"),
    [
        ("", (), "CC0"),
        ('[model]\nsource = "hub"\npath = "org/name"\n', (), ""),
        ('[model]\nsource = "hub"\npath = "org/name"\nlicense = "CC0"\n', (), "CC0"),
        ("", ("model.source=hub", "model.path=org/name"), ""),
        ("", ("model.source=hub", "model.path=org/name", "model.license=MIT"), "MIT"),
        ("[model]\nsystem_prompt = 'Be brief.'\n", (), "CC0"),
    ],
)
def test_a_licence_is_that_of_the_model_and_no_other_model_inherits_it(
    tmp_path: Path, text: str, overrides: tuple[str, ...], licence: str
) -> None:
    (tmp_path / "base.toml").write_text(PRESET.replace("[model]\n", '[model]\nlicense = "CC0"\n'))
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "base"\n{text}')
    assert load_preset(path, overrides).model.license == licence


def test_what_a_preset_leaves_to_others_is_named_all_at_once(tmp_path: Path) -> None:
    keys = '["model.license", "data.prompts.path", "seed"]'
    (tmp_path / "base.toml").write_text(f"requires = {keys}\n{PRESET}")
    path = tmp_path / "mine.toml"
    path.write_text('extends = "base"\n')
    with pytest.raises(ConfigError) as caught:
        load_preset(path)
    assert caught.value.what.splitlines()[1:] == [
        "    model.license: missing; it has no default",
        "    data.prompts.path: missing; it has no default",
    ]
    assert load_preset(path, ["model.license=MIT", "data.prompts.path=a.jsonl"]).model.license == "MIT"


def test_a_model_from_scratch_needs_no_path(tmp_path: Path) -> None:
    text = '[model]\nsource = "scratch"\nlicense = "MIT"\n[data.prompts]\nadapter = "prompts"\npath = "a.jsonl"\n'
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "chat"\nname = "mine"\n{text}')
    assert load_preset(path, library=SHIPPED).model.path == ""
    path.write_text(path.read_text().replace("scratch", "folder"))
    with pytest.raises(ConfigError, match=r"model\.path: missing; it has no default"):
        load_preset(path, library=SHIPPED)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "two words"])
def test_what_the_pipeline_gives_a_chat_template_no_preset_sets(name: str) -> None:
    with pytest.raises(ConfigError, match="presets cannot set this variable"):
        config.ModelConfig(source="scratch", chat_template_kwargs={name: True})


@pytest.mark.parametrize("day", ["today", "2026-02-30", "25.11.2026"])
def test_the_date_of_a_template_is_a_day(day: str) -> None:
    with pytest.raises(ConfigError, match="must be a date such as"):
        config.ModelConfig(source="scratch", template_date=day)


def test_held_out_rows_of_their_own_need_training_rows_of_their_own(preset: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.prompts: eval_path names the held-out rows"):
        load_preset(preset, ["data.prompts.eval_path=test.jsonl"])


@pytest.mark.parametrize("truncated", ["mask", "zero"])
def test_a_cut_completion_cannot_both_go_on_and_end_with_nothing(truncated: Any) -> None:
    critic = config.CriticConfig(gae=config.GaeConfig(bootstrap_truncated=True))
    strategies.rl_config("ppo", critic=critic)
    with pytest.raises(ConfigError, match="bootstrap_truncated values the end"):
        strategies.rl_config("ppo", critic=critic, update=config.UpdateConfig(truncated_completions=truncated))
