"""Presets: files, overrides, paths and licences; every fault with its full key before anything runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rlcore import config
from rlcore.errors import ConfigError
from rlcore.flows.presets import FOLDER, open_preset
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.presets.key_reference import describe
from rlcore.tasks.presets.run import RunConfig, apply_override, load_preset, read_preset
from rlcore.tasks.store.passwords import has_secret
from rlcore.tasks.store.settings import Home, configure_environment

SECRET = "hunter2secret"
JUDGE = "stages.grpo.rewards=[{{kind='judge',options={{base_url='{}',model='m'}}}}]"
LORA, LORA_CRITIC = "stages.reward_model.backbone.lora.rank=2", "stages.ppo.critic.architecture=lora"
OF_ADAPTER = ("stages.ppo.update.lora.rank=2", LORA_CRITIC, "stages.ppo.critic.init_from=reward_model")
NO_KL = "stages.grpo.kl.coefficient=0.0"
CUT = "stages.ppo.critic.gae.bootstrap_truncated=true"


def written(folder: Path, text: str) -> Path:
    """Write a preset, which extends ``tiny`` if it names no other base."""
    path = folder / "mine.toml"
    path.write_text(text if "extends" in text else f'extends = "tiny"\n{text}', encoding="utf-8")
    return path


def read(path: Path, *overrides: str) -> RunConfig:
    return load_preset(path, overrides, library=FOLDER)


def test_overrides_reach_nested_fields_and_items_of_lists() -> None:
    changes = ["stages.grpo.learning_rate=2e-6", "stages.ppo.rewards.0.weight=0.5", "data.prompts.path=my.jsonl"]
    run = open_preset("tiny", [*changes, 'without=["promotion"]', "data.prompts.adapter=prompts"])
    assert run.stages["grpo"].settings.learning_rate == 2e-6
    assert [term.weight for term in run.stages["ppo"].settings.rewards] == [0.5, 0.1]
    assert (run.data["prompts"].path, run.promotion) == ("my.jsonl", None)
    assert run.stages["grpo"].settings.update.rollout_correction.mode == "truncate"  # on by default


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ("stages.grpo.learning_rat=1e-6", "grpo.learning_rat: unknown key; did you mean stages.grpo.learning_rate?"),
        ("stage.grpo.num_iterations=2", "stage: unknown key; did you mean stages?"),
        ("stages.grpo.learning_rate=-1.0", "stages.grpo.learning_rate = -1.0: must be greater than 0.0"),
        ("stages.sft.optim.beta1=1.0", "stages.sft.optim.beta1 = 1.0: must be less than 1.0"),
        ("stages.ppo.critic.lam=1.1", "stages.ppo.critic.lam = 1.1: must be between 0.0 and 1.0"),
        ("stages.ppo.critic.gae.lam_value=2.0", "stages.ppo.critic.gae.lam_value = 2.0: must be between 0.0 and 1.0"),
        ((NO_KL, "stages.grpo.kl.target=0.1"), "stages.grpo.kl: target > 0 needs a starting coefficient > 0"),
        ("stages.grpo.update.objective.dual_clip=0.9", "stages.grpo.update.objective: dual_clip must be above 1"),
        ("stages.grpo.update.objective.clip_low=-0.1", "objective.clip_low = -0.1: must be at least 0.0"),
        ("stages.grpo.update.objective.scale=std", "objective.scale = 'std': must be one of 'group', "),
        (
            (NO_KL, "stages.grpo.update.early_stop_ref_kl=0.1"),
            "stages.grpo: update.early_stop_ref_kl needs kl.coefficient",
        ),
        ("stages.reward_model.trainable_layers=0", "stages.reward_model.trainable_layers: unknown key"),
        ("stages.grpo.update.rollout_correction.high=0.1", "update.rollout_correction: low must not be above high"),
        ("hardware.num_threads=100000", "hardware.num_threads = 100000: must be between 0 and 1024"),
        ("distributed.timeout_minutes=1e300", "distributed.timeout_minutes = 1e+300: must be less than 1000000.0"),
        ("model.shape.num_heads=5", "model.shape: hidden_size must be a multiple of 2 * num_heads"),
        ("model.shape.num_kv_heads=4", "model.shape: num_heads must be a multiple of num_kv_heads"),
        ("model.chat_template_kwargs={messages=true}", "model: chat_template_kwargs.messages: presets cannot set this"),
        ("model.chat_template_kwargs={'two words'=true}", "chat_template_kwargs.two words: presets cannot set this"),
        ("model.template_date=today", "model: template_date = 'today' must be a date such as"),
        ("model.template_date='2026-02-30'", "model: template_date = '2026-02-30' must be a date such as"),
        ("data.prompts.eval_path=test.jsonl", "data.prompts: eval_path names the held-out rows"),
        ((LORA, "stages.reward_model.backbone.trainable_layers=0"), "backbone: lora.rank > 0 freezes the backbone"),
        ((LORA, "stages.reward_model.backbone.layers=1"), "backbone: lora.rank > 0 keeps the whole backbone"),
        ((LORA, "stages.reward_model.ensemble=2"), "reward_model: backbone.lora.rank > 0 trains one reward model"),
        (OF_ADAPTER, "set stages.reward_model.backbone.lora.rank > 0"),
        ((CUT, "stages.ppo.update.truncated_completions=mask"), "ppo: critic.gae.bootstrap_truncated values the end"),
        ((CUT, "stages.ppo.update.truncated_completions=zero"), "ppo: critic.gae.bootstrap_truncated values the end"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(overrides: str | tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset("tiny", [overrides] if isinstance(overrides, str) else overrides)
    assert error in caught.value.what
    assert caught.value.where == str(FOLDER / "tiny.toml")


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


def test_a_stage_is_given_by_its_name_and_kind_or_refused_with_those_there_are() -> None:
    run = open_preset("tiny")
    assert run.stage("grpo", RlStage) is run.stages["grpo"]
    with pytest.raises(ConfigError, match=r"no stage 'sft' of this kind(?s:.*)name one of grpo, ppo"):
        run.stage("sft", RlStage)


def test_every_section_is_frozen_documented_and_small() -> None:
    of_the_library: set[Any] = {kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)}
    for kind in of_the_library | {section.kind for section in describe()}:
        assert kind.__dataclass_params__.frozen
        assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")  # the one that dataclass writes
        assert len(dataclasses.fields(kind)) <= 14 or kind is RunConfig  # a preset is a list of sections


def overridden(*overrides: str) -> dict[str, Any]:
    """Return a small document after overrides."""
    document: dict[str, Any] = {"a": {"b": 1}, "items": [{"kind": "x"}, {"kind": "y"}]}
    for override in overrides:
        apply_override(document, override)
    return document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("2", 2), ("2e-6", 2e-6), ("true", True), ('"two words"', "two words"), ("x=y", "x=y"), ("", "")),
        *(("data/my.jsonl", "data/my.jsonl"), ("hub:org/name@main", "hub:org/name@main"), ("[1, 2]", [1, 2])),
    ],
)
def test_an_override_is_read_as_toml_and_else_as_a_bare_word(text: str, value: object) -> None:
    assert overridden("a.b=0", f" a.b = {text}")["a"]["b"] == overridden(f"a.b={text}")["a"]["b"] == value


def test_an_override_reaches_into_lists_by_number_and_makes_missing_sections() -> None:
    document = overridden("items.1.weight=0.5", "new.deep.key=1")
    assert document["items"] == [{"kind": "x"}, {"kind": "y", "weight": 0.5}]
    assert document["new"] == {"deep": {"key": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.b", "not of the form path.to.key=value"),
        ("=3", "not of the form path.to.key=value"),
        ("a.b.c=3", "'b' is a value, not a section"),
        ("items.7.kind=x", "'7' is not a number below 2"),
        ("items.first.kind=x", "'first' is not a number below 2"),
        ("items.0=x", "name an item of the list by its number, then its key"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overridden(override)


def test_a_preset_that_extends_another_changes_only_what_it_names(tmp_path: Path) -> None:
    path = written(tmp_path, 'name = "mine"\n[stages.grpo.kl]\ncoefficient = 0.25\n')
    tiny = open_preset("tiny", ["name=mine", "stages.grpo.kl.coefficient=0.25"])
    assert read(path) == tiny
    kl = read(path, "stages.grpo.kl.coefficient=0.5").stages["grpo"].settings.kl  # which comes after what is extended
    assert kl.coefficient == 0.5


def test_a_preset_may_leave_out_sections_of_its_base_and_replaces_a_list_as_a_whole(tmp_path: Path) -> None:
    text = 'without = ["data.preferences", "stages.ppo", "stages.reward_model"]\n'
    mine = read(written(tmp_path, f'{text}[stages.grpo]\nrewards = [{{ kind = "format", weight = 2.0 }}]\n'))
    assert (set(mine.data), set(mine.stages)) == ({"prompts", "demonstrations"}, {"sft", "grpo"})
    assert [term.kind for term in mine.stages["grpo"].settings.rewards] == ["format"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('without = ["stages.reward_model"]\n', r"rewards\.1\.stage = 'reward_model': not a stage"),
        ('without = ["nothing"]\n', "'nothing', which the extended preset does not have"),
        ('extends = "tny"\n', r"extends = 'tny': there is no such preset\n.*mine.toml\n.*did you mean tiny\?"),
        ('extends = "tiny.toml"\n', r"did you mean tiny\?"),
        ('extends = "../tiny"\n', "not the name of a preset"),
        ("extends = 3\n", "not the name of a preset"),
        ('extends = "mine"\n', "in a circle"),
    ],
)
def test_a_base_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, text))


FILES = """
model = { source = "folder", path = "weights/qwen", license = "MIT", chat_template = "chat.jinja" }
[data]
prompts = { adapter = "prompts", path = "rows.jsonl", eval_path = "../test.jsonl" }
preferences = { path = "hub:a/b@0" }
[stages.grpo]
rewards = [{ kind = "judge", options = { template = "judge.txt" } }]
[stages.grpo.sampling]
episodes = { tools = ["search"], search_corpus = "/data/passages.jsonl", max_turn_tokens = 8 }
[stages.ppo.sampling]
episodes = { tools = ["search"], search_corpus = "/data/passages.jsonl", max_turn_tokens = 8 }
"""


def test_relative_paths_start_at_the_preset_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    path = written(tmp_path / "mine", FILES)
    monkeypatch.chdir(tmp_path)
    run = read(path, "data.demonstrations.path=here.jsonl")
    assert (run.model.path, run.model.chat_template) == ("mine/weights/qwen", "mine/chat.jinja")
    assert (run.data["prompts"].path, run.data["prompts"].eval_path) == ("mine/rows.jsonl", "test.jsonl")
    assert run.data["preferences"].path == "hub:a/b@0"
    assert run.data["demonstrations"].path == "here.jsonl"  # of the command line
    grpo = run.stages["grpo"].settings
    assert grpo.rewards[0].options["template"] == "mine/judge.txt"
    assert grpo.sampling.episodes.search_corpus == "/data/passages.jsonl"
    monkeypatch.chdir(tmp_path / "mine")
    run = read(path)
    assert (run.data["prompts"].path, run.data["prompts"].eval_path) == ("rows.jsonl", str(tmp_path / "test.jsonl"))


def test_the_paths_of_a_library_s_presets_start_at_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text((FOLDER / "tiny.toml").read_text())
    assert load_preset(written(tmp_path, FILES), library=tmp_path).data["prompts"].path == "rows.jsonl"


OTHER = 'source = "hub"\npath = "org/name"\n'


@pytest.mark.parametrize(
    ("text", "overrides", "licence"),
    [
        ("", (), "Apache-2.0"),
        (OTHER, (), ""),
        (f'{OTHER}license = "CC0"\n', (), "CC0"),
        ("", ("model.source=hub", "model.path=org/name"), ""),
        ("", ("model.source=hub", "model.path=org/name", "model.license=MIT"), "MIT"),
        ("system_prompt = 'Be brief.'\n", (), "Apache-2.0"),
    ],
)
def test_no_other_model_inherits_a_license(tmp_path: Path, text: str, overrides: tuple[str, ...], licence: str) -> None:
    model = read(written(tmp_path, f"[model]\n{text}"), *overrides).model
    assert (model.license, model.path) == (licence, "org/name" if "hub" in f"{text}{overrides}" else "")


def test_what_a_preset_leaves_to_others_is_named_all_at_once(tmp_path: Path) -> None:
    keys = 'requires = ["model.license", "data.prompts.path", "seed"]\n'
    base = (FOLDER / "tiny.toml").read_text().replace('license = "Apache-2.0"', "")
    (tmp_path / "base.toml").write_text(f"{keys}{base}")
    path = written(tmp_path, 'extends = "base"\n')
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.what.splitlines()[1:] == [
        "    model.license: missing; it has no default",
        "    data.prompts.path: missing; it has no default",
    ]
    assert read(path, "model.license=MIT", "data.prompts.path=a.jsonl").model.license == "MIT"


def test_a_model_from_scratch_needs_no_path(tmp_path: Path) -> None:
    text = '[model]\nsource = "scratch"\nlicense = "MIT"\n[data.prompts]\nadapter = "prompts"\npath = "a.jsonl"\n'
    path = written(tmp_path, f'extends = "chat"\nname = "mine"\n{text}')
    assert read(path).model.path == ""
    path.write_text(path.read_text().replace("scratch", "folder"))
    with pytest.raises(ConfigError, match=r"model\.path: missing; it has no default"):
        read(path)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (JUDGE.format(f"https://me:{SECRET}@judge/v1"), "stages.grpo.rewards.0.options.base_url"),
        (JUDGE.format(f"https://judge/v1?api_key={SECRET}"), "stages.grpo.rewards.0.options.base_url"),
        (f"data.prompts.path=s3://key:{SECRET}@bucket/rows.jsonl", "data.prompts.path"),
        (f"data.prompts.path=https://host/rows?X-Amz-Signature={SECRET}", "data.prompts.path"),
        (f"model.path=https://user:{SECRET}@hub/model", "model.path"),
        (f"engine.urls=['http://u:{SECRET}@engine:8000']", "engine.urls.0"),
        (f"seed=https://me:{SECRET}@host", "seed"),  # before its other errors could repeat the value
    ],
)
def test_an_address_with_a_secret_is_refused_by_its_key_and_not_repeated(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_preset(FOLDER / "tiny.toml", [override])
    words = str(raised.value)
    assert f"{key}: the address has a password or a key; name a variable of the environment" in words
    assert SECRET not in words


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1",
        "https://host/path@2/file?version=3",
        "sqlite:////state/mlflow.db",
        "s3://bucket/key=1/rows.parquet",
        "postgresql+psycopg2://mlflow@postgres:5432/mlflow",
        "answer: 3:4@5",
        "https://host/monkey?page=2",
    ],
)
def test_addresses_without_a_secret_are_let_through(text: str) -> None:
    assert not has_secret(text)


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "PREFECT_API_URL"])
def test_an_address_with_a_password_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, f"https://me:{SECRET}@host/api")
    with pytest.raises(ConfigError) as raised:
        configure_environment(Home(tmp_path / "home"))
    assert raised.value.where == name
    assert SECRET not in str(raised.value)
