"""``rlcore migrate-preset``: old keys of a file are rewritten in place; everywhere else an old key is an error."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rlcore.flows.cli.app import main
from rlcore.flows.presets import FOLDER, open_preset
from rlcore.tasks.presets.renamed import KEYS, VALUES, new_path

OLD = """\
# mine: where the keys are old.
extends = "tiny"   # a committed one
name = "mine"
requires = ["model.licence"]
without = ["stages.grpo.critic.placement"]

model.licence = "MIT"          # of the base
placement = { backend = "processes", 'narrow' = true, ray = { samplers = 0 } }

[data.prompts]
near_duplicates = 'apart'
"system" = "a # in a text = [x]"

[stages.grpo]                  # its kind is that of tiny
start = "sft"
sampling.revisit = 0.5         # half
update = { epochs = 2, adapter.rank = 0, truncated = "mask" }

[stages.grpo.draw]
difficulty = "asked"
weight = "learnable"

[[stages.grpo.rewards]]
kind = "judge"
deadline_minutes = 3
options = { enforce_form = true, model = '''
start = "no key"
''' }

[[stages.grpo.rewards]]
kind = "own:function"
[stages.grpo.rewards.options]
enforce_form = true

[stages.asked]
start = "sft"
kind = "difficulty"
"""
NEW = """\
# mine: where the keys are old.
extends = "tiny"   # a committed one
name = "mine"
requires = ["model.license"]
without = ["stages.grpo.critic.architecture"]

model.license = "MIT"          # of the base
distributed = { backend = "processes", gather_in_compute_dtype = true, ray = { num_rollout_workers = 0 } }

[data.prompts]
near_duplicates = "exclude"
system_prompt = "a # in a text = [x]"

[stages.grpo]                  # its kind is that of tiny
init_from = "sft"
sampling.zero_signal_keep_prob = 0.5 # half
update = { num_epochs = 2, lora.rank = 0, truncated_completions = "mask" }

[stages.grpo.curriculum]
pass_rates = "asked"
weighting = "learnability"

[[stages.grpo.rewards]]
kind = "judge"
timeout_minutes = 3
options = { structured_output = true, model = '''
start = "no key"
''' }

[[stages.grpo.rewards]]
kind = "own:function"
[stages.grpo.rewards.options]
enforce_form = true

[stages.asked]
policy = "sft"
kind = "difficulty"
"""


def test_old_keys_are_rewritten_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OLD)
    assert main(["migrate-preset", str(path)]) == 0
    assert path.read_text() == NEW
    said = capsys.readouterr().out.splitlines()
    assert "line 7: model.licence is now model.license" in said
    assert "line 16: stages.grpo.sampling.revisit is now stages.grpo.sampling.zero_signal_keep_prob" in said
    assert said[-1] == f"{path}: {len(said) - 1} changes"
    before = path.stat()
    assert main(["migrate-preset", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: up to date\n"
    assert path.read_text() == NEW and path.stat().st_mtime_ns == before.st_mtime_ns
    assert [each.name for each in tmp_path.iterdir()] == ["mine.toml"]


def test_the_kind_of_a_stage_may_be_that_of_a_preset_that_is_old_itself(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text('[stages.a]\nkind = "rejection"\nstart = "base"\n')
    path = tmp_path / "second.toml"
    text = b'\xef\xbb\xbfextends = "first"\r\n[stages.a]\r\nstart = "sft"\r\n'
    path.write_bytes(text)
    path.chmod(0o600)
    assert main(["migrate-preset", str(path)]) == 0
    assert path.read_bytes() == text.replace(b"start", b"policy")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text("hardware.recompute_layers = true\n")
    (tmp_path / "link.toml").symlink_to("real.toml")
    assert main(["migrate-preset", str(tmp_path / "link.toml")]) == 0
    assert (tmp_path / "link.toml").is_symlink()
    assert (tmp_path / "real.toml").read_text() == "hardware.gradient_checkpointing = true\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model", "not valid TOML"),
        ('extends = "nothing"', "cannot read the preset"),
        ("[placement]\nnarrow = true\n[distributed]\nshard = 'full'", "an old key and its new name"),
        ("[health]\ngaming = {}\nreward_hacking = {}", "an old key and its new name"),
    ],
)
def test_a_file_that_cannot_be_rewritten_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert main(["migrate-preset", str(path)]) == 2
    assert said in capsys.readouterr().err
    assert path.read_text() == text


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate-preset", str(tmp_path / "none.toml")]) == 2
    assert f"{tmp_path / 'none.toml'}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "run", "config"])
def test_an_old_key_of_a_file_is_an_error_that_names_the_new_one_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "tiny"\nname = "mine"\n[stages.grpo]\nsampling = { revisit = 0.5 }\nstart = "base"\n')
    assert main([command, str(path)]) == 2
    said = capsys.readouterr().err
    assert "stages.grpo.sampling.revisit is now stages.grpo.sampling.zero_signal_keep_prob" in said
    assert "stages.grpo.start is now stages.grpo.init_from" in said
    assert f"rlcore migrate-preset {path}" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("placement.narrow=true", "placement.narrow is now distributed.gather_in_compute_dtype"),
        ("stages.grpo.update={epochs=2}", "stages.grpo.update.epochs is now stages.grpo.update.num_epochs"),
        ("stages.rejection.start=base", "stages.rejection.start is now stages.rejection.policy"),
        ("data.prompts.near_duplicates=apart", "data.prompts.near_duplicates = 'apart' is now 'exclude'"),
        ("without=['stages.grpo.draw']", "without.0 = 'stages.grpo.draw' is now 'stages.grpo.curriculum'"),
    ],
)
def test_an_old_key_of_an_override_is_an_error(capsys: pytest.CaptureFixture[str], override: str, said: str) -> None:
    assert main(["plan", "reasoning", "--set", override]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "--set" in shown and "migrate-preset" not in shown


def test_no_committed_preset_has_an_old_key() -> None:
    for path in FOLDER.glob("*.toml"):
        before = path.read_bytes()
        assert main(["migrate-preset", str(path)]) == 0
        assert path.read_bytes() == before


def test_the_table_names_each_key_once_and_no_new_name_is_an_old_one() -> None:
    for pattern, new in KEYS.items():
        assert new != pattern.rpartition(".")[2]
        assert ".".join((*pattern.split(".")[:-1], new)) not in KEYS
    for forms in VALUES.values():
        assert not forms.keys() & set(forms.values())
    path = ["stages", "grpo", "sampling", "engine", "deadlines", "start_seconds"]
    assert new_path(path, {"stages.grpo": "rl"})[-2:] == ("timeouts", "startup_seconds")


def test_a_migrated_preset_is_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "tiny"\nname = "mine"\n[stages.grpo]\nstart = "sft"\nupdate.minibatches = 2\n')
    assert main(["migrate-preset", str(path)]) == 0
    assert tomllib.loads(path.read_text())["stages"]["grpo"] == {"init_from": "sft", "update": {"num_minibatches": 2}}
    assert open_preset(str(path)).stages["grpo"].settings.update.num_minibatches == 2
