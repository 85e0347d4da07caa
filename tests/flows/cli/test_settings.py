"""Old keys of a preset: an error that names the new one, in a file and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.flows.cli.app import main
from rlcore.tasks.presets.renamed import KEYS, VALUES, new_path


@pytest.mark.parametrize("command", ["plan", "run", "config"])
def test_an_old_key_of_a_file_is_an_error_that_names_the_new_one_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "tiny"\nname = "mine"\n[stages.grpo]\nsampling = { revisit = 0.5 }\nstart = "base"\n')
    assert main([command, str(path)]) == 2
    said = capsys.readouterr().err
    assert "stages.grpo.sampling.revisit is now stages.grpo.sampling.zero_signal_keep_prob" in said
    assert "stages.grpo.start is now stages.grpo.init_from" in said
    assert f"rename them in {path}" in said


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
    assert "--set" in shown


def test_the_table_names_each_key_once_and_no_new_name_is_an_old_one() -> None:
    for pattern, new in KEYS.items():
        assert new != pattern.rpartition(".")[2]
        assert ".".join((*pattern.split(".")[:-1], new)) not in KEYS
    for forms in VALUES.values():
        assert not forms.keys() & set(forms.values())
    path = ["stages", "grpo", "sampling", "engine", "deadlines", "start_seconds"]
    assert new_path(path, {"stages.grpo": "rl"})[-2:] == ("timeouts", "startup_seconds")
