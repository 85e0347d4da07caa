from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.errors import ConfigError
from rlcore.flows import plan as flow
from rlcore.flows.flows import promote
from rlcore.flows.plan import every_target, plan_run
from rlcore.flows.presets import FOLDER, open_preset
from rlcore.flows.run import run_targets
from rlcore.models.importing import import_model
from rlcore.tasks.preflight import sizes
from rlcore.tasks.store.settings import Home
from tests.flows.micro import MICRO, PRESETS
from tests.quick import within_seconds

OWN = "def brief(rollouts, *, limit=10):\n    return [1.0 for _ in rollouts]\n"


def errors(*overrides: str, preset: str = "tiny", targets: tuple[str, ...] = ("compare",)) -> list[str]:
    """The lines with which a plan is refused, without warnings; empty where it is not."""
    try:
        plan_run(preset, (*MICRO, *overrides) if preset == "tiny" else overrides, targets)
    except ConfigError as error:
        assert error.where == (preset if preset.endswith(".toml") else f"preset {preset}")
        found = [line.strip() for line in error.what.splitlines() if line.startswith("    ")]
        return [line for line in found if not line.startswith("warning: ")]
    return []


def lines(*overrides: str) -> list[str]:
    warmup = "stages.reward_model.optim.warmup_steps=2"  # of few steps
    return list(plan_run("tiny", (*MICRO, warmup, *overrides), ["compare"]).lines)


def math(**more: str) -> str:
    return "stages.grpo.rewards=[{kind='math'" + "".join(f",{name}={value}" for name, value in more.items()) + "}]"


ERRORS = [
    ("stages.grpo.rewards.0.kind=mth", "stages.grpo.rewards.0.kind: unknown reward 'mth'; did you mean 'math'?"),
    (math(options="{last=true}"), "stages.grpo.rewards.0.options.last: unknown key; known: last_number"),
    (
        math(options="{last_number='much'}"),
        "stages.grpo.rewards.0.options.last_number = 'much': must be a boolean",
    ),
    ("stages.grpo.rewards=[{kind='math'},{kind='math'}]", "stages.grpo.rewards: the reward 'math' is named twice"),
    ("stages.grpo.rewards.0.kind=no_such:f", "stages.grpo.rewards.0.kind: cannot import the function 'no_such:f'"),
    ("stages.grpo.rewards=[{kind='own_reward:long'}]", "stages.grpo.rewards.0.kind: cannot import the function"),
    (
        "stages.grpo.rewards=[{kind='own_reward:brief',options={limt=1}}]",
        "stages.grpo.rewards.0.options: 'own_reward:brief' cannot be called with these options",
    ),
    ("stages.grpo.rewards=[{kind='broken_reward:f'}]", "stages.grpo.rewards.0.kind: cannot import the function"),
    (
        "stages.grpo.rewards=[{kind='own_reward:brief',python='no-such-python'}]",
        "stages.grpo.rewards.0.python: 'no-such-python': no such program",
    ),
    (
        "stages.grpo.rewards=[{kind='own_reward:brief',files=['words.txt']}]",
        "stages.grpo.rewards.0.files.0 = 'words.txt': no such file",
    ),
    (
        "stages.grpo.rewards=[{kind='judge',options={base_url='http://h/v1',model='m',template='no.txt'}}]",
        "stages.grpo.rewards.0: the judge's template cannot be read: ",
    ),
    ("evaluation.verifiers=[{kind='math',options={last=true}}]", "evaluation.verifiers.0.options.last: unknown key"),
    ("data.prompts.adapter=arithmetik", "data.prompts.adapter: unknown adapter 'arithmetik'"),
    (
        "data.prompts={contract='prompts',adapter='gsmk8',path='rows.jsonl',num_train=9,num_eval=9,max_tokens=64}",
        "data.prompts.adapter: unknown adapter 'gsmk8'; did you mean 'gsm8k'?",
    ),
    (
        "data.prompts.path='.'",
        "data.prompts.path = '.': the adapter 'rlcore.examples.arithmetic:ADAPTER' reads no file; set adapter",
    ),
    (
        "data.prompts.options={share=0.5}",
        "data.prompts.options: the adapter 'rlcore.examples.arithmetic:ADAPTER' has no option",
    ),
    ("data.preferences.adapter=preferences", "data.preferences.path = '': no such file"),
    (
        "data.prompts={contract='prompts',adapter='prompts',path='no.jsonl',num_train=9,num_eval=9,max_tokens=64}",
        "data.prompts.path = 'no.jsonl': no such file; correct the path of the adapter 'prompts', or set fallback",
    ),
    (
        "data.prompts={contract='prompts',adapter='gsm8k',path='hub:a/b',num_train=9,num_eval=9,max_tokens=64}",
        "data.prompts.path: the hub path is malformed",
    ),
    (
        "data.prompts={contract='prompts',adapter='gsm8k',path='rows.jsonl',eval_path='hub:a/b',num_train=9,"
        "num_eval=9,max_tokens=64}",
        "data.prompts.eval_path: the hub path is malformed",
    ),
    ("model={source='hub',path='a/b',revision='main'}", "model.revision = 'main': not a commit"),
    ("model={source='folder',path='nothing'}", "model.path = 'nothing': there is no model in this folder"),
    ("model={source='gguf',path='no.gguf'}", "model.path = 'no.gguf': no such file"),
    ("model={source='package',path='json',file='no.gguf'}", "model.file: the package 'json' has no file 'no.gguf'"),
    ("model.chat_template=no.jinja", "model.chat_template = 'no.jinja': no such file"),
    ("hardware.device=cuda", "hardware.device: hardware.device is 'cuda', but no CUDA device is available"),
    ("engine={kind='vllm',python='no-python'}", "engine.python = 'no-python': no such program"),
    (
        "stages.grpo.sampling.engine={kind='vllm',python='no-python'}",
        "stages.grpo.sampling.engine.python = 'no-python': no such program",
    ),
    ("evaluation.engine={kind='vllm',python='no-python'}", "evaluation.engine.python = 'no-python'"),
    ("stages.grpo.group_size=1", "stages.grpo.group_size = 1: grpo compares answers to one prompt"),
    ("stages.grpo.algorithm=grop", "stages.grpo.algorithm: unknown algorithm 'grop'"),
    (
        "stages.grpo.update.objective.gate_positive=1.0",
        "stages.grpo.update.objective.gate_positive: grpo does not use gate_positive",
    ),
    (
        "stages.grpo.init_from=models:/nobody@champion",
        "stages.grpo.init_from = 'models:/nobody@champion': there is no registered",
    ),
    (
        "stages.grpo.sampling.episodes={tools=['search'],search_corpus='no.jsonl',max_turn_tokens=40}",
        "stages.grpo.sampling.episodes.search_corpus = 'no.jsonl': no such file",
    ),
]
LENGTHS = [  # known where nothing else is wrong with the model and its data
    (
        "stages.grpo.sampling.max_new_tokens=60",
        "stages.grpo.sampling.max_new_tokens = 60: with a prompt of data.prompts.",
    ),
    ("evaluation.max_new_tokens=60", "evaluation.max_new_tokens = 60: with a prompt of data.prompts.max_tokens = 88"),
    ("data.demonstrations.max_tokens=200", "data.demonstrations.max_tokens = 200: the model reads 128; lower it"),
]


@pytest.fixture(autouse=True)
def _folder(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of its own; the user's modules lie in the current folder."""
    (tmp_path / "own_reward.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def together(rows: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Groups of rows in which no override changes what another one is about: a plan names all errors of a group."""
    groups: list[list[tuple[str, str]]] = []
    for row in rows:
        table = ".".join(row[0].partition("=")[0].split(".")[:2])
        for group in groups:
            others = [".".join(override.partition("=")[0].split(".")[:2]) for override, _ in group]
            if not any(table.startswith(other) or other.startswith(table) for other in others):
                group.append(row)
                break
        else:
            groups.append([row])
    yield from groups


@pytest.mark.parametrize("rows", [*together(ERRORS), *([row] for row in LENGTHS)])
def test_an_error_that_can_be_known_is_named_with_its_full_key_before_work(rows: list[tuple[str, str]]) -> None:
    without = ["without=['stages.ppo']"] if any("episodes" in override for override, _ in rows) else []
    found = errors(*(override for override, _ in rows), *without)
    missing = [error for _, error in rows if not any(line.startswith(error) for line in found)]
    assert (missing, len(found)) == ([], len(rows)), found


def test_lora_that_an_engine_would_round_away_is_refused_by_the_plan() -> None:
    engine = "stages.grpo.sampling.engine={kind='vllm',urls=['http://127.0.0.1:1'],dtype='bfloat16'}"
    (found,) = errors(engine, "stages.grpo.update.lora.rank=8")
    assert found.startswith("stages.grpo.update.lora.rank = 8: the engine would get merged weights in bfloat16")


def test_all_errors_are_named_at_once_by_plan_and_run() -> None:
    overrides = (
        *MICRO,
        "model.chat_template=no.jinja",
        "stages.grpo.rewards.0.kind=mth",
        "stages.ppo.algorithm=pop",
        "data.prompts.options={share=0.5}",
        "evaluation.max_new_tokens=60",
    )
    keys = ["model.chat_template", "stages.grpo.rewards.0.kind", "stages.ppo", "data.prompts.options", "evaluation"]
    for refused in (
        lambda: plan_run("tiny", overrides, ["compare"]),
        lambda: run_targets("tiny", overrides, ["compare"]),
        lambda: promote.fn("tiny", overrides),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        named = [line.strip() for line in caught.value.what.splitlines()[1:] if "warning: " not in line]
        assert len(named) == len(keys)
        assert all(line.startswith(key) for line, key in zip(named, keys, strict=True))


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("stages.sft.init_from=grpo", "stages.sft: stages depend on each other: "),
        ("stages.grpo.init_from=nobody", "stages.grpo.init_from = 'nobody': no such checkpoint"),
        ("stages.grpo.prompts.nothing=1.0", "stages.grpo.prompts.nothing: no such data"),
        ("stages.grpo.rewards=[]", "stages.grpo.rewards: names no reward"),
        ("stages.ppo.rewards.1.stage=judge", "stages.ppo.rewards.1.stage = 'judge': not a stage of the kind"),
        ("data.preferences.policy=nobody", "data.preferences.policy = 'nobody': "),
        ("evaluation.data=['nothing']", "evaluation.data = 'nothing': no dataset of prompts"),
        ("name='../../X'", "name = '../../X': names folders and models"),
    ],
)
def test_an_error_of_the_graph_hides_no_other(override: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        every_target("tiny", (*MICRO, override, "model.chat_template=no.jinja"))
    found = [line.strip() for line in caught.value.what.splitlines()[1:] if "warning: " not in line]
    assert found[0].startswith(error)
    assert found[-1].startswith("model.chat_template = 'no.jinja'")


def test_a_flow_of_one_stage_is_refused_for_what_that_stage_needs_alone() -> None:
    broken = ("stages.grpo.rewards.0.kind=mth", "data.preferences.adapter=preferences")
    assert not errors(*broken, targets=("sft",))
    assert [line.partition(":")[0] for line in errors(*broken, targets=("grpo",))] == ["stages.grpo.rewards.0.kind"]
    assert len(errors(*broken, targets=("grpo", "reward_model"))) == 2
    elsewhere = ("hardware.device=cuda", "engine={kind='vllm',python='no-python'}", "evaluation.max_new_tokens=60")
    assert [line.partition(":")[0] for line in errors(*elsewhere, targets=("sft",))] == ["hardware.device"]
    assert not errors(*elsewhere[1:], targets=("prepare_prompts",))


def test_programs_that_no_sandbox_can_hold_are_known_before_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.tasks.preflight.preset_checks.shutil.which", lambda program: None)
    (found,) = errors("stages.grpo.sampling.episodes={tools=['python'],max_turn_tokens=40}", "without=['stages.ppo']")
    assert found.startswith("stages.grpo.sampling.episodes.tools: 'python' runs in a sandbox, and bubblewrap is not")
    keys = [line.partition(":")[0] for line in errors(preset="rlvr_code")]
    assert keys == ["stages.grpo.rewards.0", "evaluation.verifiers.0"]


def test_a_template_that_writes_the_thinking_is_known_to_an_example_that_repeats_it(tmp_path: Path) -> None:
    shape = ShapeConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8)
    import_model(ModelConfig(source="scratch", shape=shape), tmp_path / "model", seed=0)
    assert not errors("model.source=folder", f"model.path={tmp_path / 'model'}")


@pytest.mark.parametrize("presets", [PRESETS[::8], pytest.param(PRESETS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_committed_preset_passes_on_its_own(monkeypatch: pytest.MonkeyPatch, presets: Sequence[str]) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    for preset in presets:
        found = errors(preset=preset)
        assert [
            line
            for line in found
            if not re.search("engine.python|bubblewrap is not|harness is not installed|^disk: |not checked", line)
        ] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.grpo.learning_rate=5.0", "warning: stages.grpo.learning_rate = 5.0: recipes have at most 0.1"),
        ("stages.ppo.critic.learning_rate=5.0", "warning: stages.ppo.critic.learning_rate = 5.0"),
        (
            "stages.grpo.prompts_per_iteration=100000",
            "warning: stages.grpo.prompts_per_iteration = 100000: more than the 200 training rows of prompts",
        ),
        ("stages.sft.batch_size=5000", "warning: stages.sft.batch_size = 5000: more than the 800 training rows"),
        ("stages.grpo.kl={coefficient=0.01,apply_to='reward'}", "warning: stages.grpo.kl.apply_to = 'reward': grpo"),
    ],
)
def test_an_absurd_value_is_a_line_and_no_refusal(override: str, words: str) -> None:
    (found,) = [line for line in lines(override) if line.startswith("warning:")]
    assert found.startswith(words)


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_kl_in_the_reward_is_usual_where_no_group_scales_it(scale: str) -> None:
    kl = "stages.grpo.kl={coefficient=0.01,apply_to='reward'}"
    found = lines(kl, f"stages.grpo.update.objective.scale={scale}")
    assert not [line for line in found if line.startswith("warning:")]


class Disk(NamedTuple):
    free: int
    total: int = 1 << 40


def test_a_run_that_writes_more_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line for line in lines() if line.startswith("disk: the run writes about ")]
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda folder: Disk(free=1_000_000))
    (found,) = errors()
    assert found.startswith("disk: the run writes about ")
    assert "RLCORE_HOME" in found


def test_a_state_directory_below_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLCORE_HOME", str(tmp_path / "file" / "state"))
    (found,) = errors()
    assert f"{tmp_path / 'file'} is no folder; RLCORE_HOME names it" in found


def test_a_file_of_approvers_with_errors_is_named_with_all_others(home: Home) -> None:
    (home.root / "promotion.toml").write_text("approvers = [")
    found = errors("model.chat_template=no.jinja")
    assert found[0].startswith(f"{home.root / 'promotion.toml'}: promotion.toml names who approves promotions: ")
    assert [line.partition(" = ")[0] for line in found[1:]] == ["model.chat_template"]


def test_preflight_is_quick() -> None:
    config, home = open_preset("tiny", MICRO), flow.find_home()
    flow.preflight_lines(
        config, ["compare"], preset="tiny", home=home
    )  # what a plan reads too: the digests of our own code
    with within_seconds():
        flow.preflight_lines(config, ["compare"], preset="tiny", home=home)


def test_a_registered_start_needs_the_same_tokenizer(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry's record names an artifact of this home, whose tokenizer is another one."""
    shape = ShapeConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8)
    base, other = tmp_path / "base", home.artifacts / "checkpoint" / "abc" / "model"
    import_model(ModelConfig(source="scratch", shape=shape), base, seed=0)
    shutil.copytree(base, other)
    overrides = ["model.source=folder", f"model.path={base}", "stages.grpo.init_from=models:/mine@champion"]
    monkeypatch.setattr("rlcore.tasks.preflight.preset_checks.read_version", lambda home, model: {"sha256": "abc"})
    monkeypatch.setattr("rlcore.tasks.kinds.base.kind.registered_version", lambda config, *, model: "mine/1")
    assert not errors(*overrides)
    document = json.loads((other / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    renamed = next(iter(token for token in vocabulary if token not in {e["content"] for e in document["added_tokens"]}))
    vocabulary["zz"] = vocabulary.pop(renamed)
    (other / "tokenizer.json").write_text(json.dumps(document))
    (found,) = errors(*overrides)
    assert found.startswith("stages.grpo.init_from = 'models:/mine@champion': this model has another tokenizer")
