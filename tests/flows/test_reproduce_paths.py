"""A run in the folder of its own preset, with paths relative to it and adapters, and the same run once more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.conftest import environment
from tests.flows.homes import folder
from tests.flows.micro import ONE_LAYER
from tests.flows.retraining import write_files
from tests.flows.warm import run_warm

SMALL = (
    *ONE_LAYER,
    "hardware.num_threads=1",
    "stages.sft.num_steps=5",
    "stages.sft.optim.warmup_steps=1",
    "stages.grpo.num_iterations=1",
    "stages.grpo.prompts_per_iteration=2",
    "stages.grpo.group_size=2",
    "stages.grpo.eval_every=0",
    "stages.grpo.sampling.max_new_tokens=4",
    "stages.grpo.update.lora.rank=2",
    "evaluation.num_problems=8",
    "evaluation.num_samples=0",
    "evaluation.max_new_tokens=4",
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a preset that names the data beside it."""
    made = tmp_path / "mine"
    write_files(made)
    named = "".join(
        f'[data.{name}]\nadapter = "{name}"\npath = "{name}.jsonl"\nnum_train = 150\nnum_eval = 100\n'
        for name in ("prompts", "demonstrations")
    )
    gone = '"stages.ppo", "stages.reward_model", "data.preferences", "data.demonstrations.options"'
    text = f'extends = "tiny"\nname = "mine"\nwithout = [{gone}]\n{named}'
    (made / "mine.toml").write_text(text, encoding="utf-8")
    return made


def run(cwd: Path, home: Path, *words: str) -> str:
    done = run_warm([*words], environment(home), cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_from_relative_paths_with_an_adapter_is_reproduced_byte_for_byte(place: Path, tmp_path: Path) -> None:
    home, overrides = tmp_path / "home", [word for each in SMALL for word in ("--set", each)]
    run(place, home, "run", "mine.toml", *overrides)
    assert "every file of the model is the same" in run(
        place, home, "reproduce", "mine-grpo/1", "--preset", "mine.toml"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = tmp_path / "other"
    run(elsewhere, other, "run", str(place / "mine.toml"), *overrides)
    for stage in ("prepare_prompts", "prepare_demonstrations", "import_sft", "sft"):
        assert folder(home, stage).name == folder(other, stage).name, stage
    adapter = "model/adapter/adapter_model.safetensors"
    assert (folder(home, "grpo") / adapter).read_bytes() == (folder(other, "grpo") / adapter).read_bytes()
