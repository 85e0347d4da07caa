"""The same run once more from a version's records: equal bytes, and what is said before any work when it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from rlcore.errors import ModelError
from rlcore.flows.cli.app import main
from rlcore.flows.reproduce import run_reproduce
from rlcore.flows.run import run_targets
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.settings import Home
from tests.flows.conftest import environment
from tests.flows.homes import folder
from tests.flows.micro import ONE_LAYER
from tests.flows.retraining import write_data, write_files
from tests.flows.warm import run_warm


def edit_records(home: Home, stage: str, old: str, new: str) -> None:
    cache = StageCache(home.cache)
    for record in cache.records(stage):
        ingredients = json.loads(json.dumps(record.ingredients).replace(old, new))
        cache.write(stage, replace(record, ingredients=ingredients))


def scratch_homes(home: Home) -> list[Path]:
    return list(home.work.glob("reproduce-*"))


@pytest.mark.slow
def test_a_run_is_reproduced_and_changes_are_named_before_any_work(
    tracked_home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_targets("retrain", write_data(tmp_path / "data"), ["grpo"])

    assert main(["reproduce", "retrain-grpo/1"]) == 0
    output = capsys.readouterr().out
    assert "every file of the model is the same" in output
    assert output.startswith("machine: device=cpu precision=float32 instructions=")
    assert output.splitlines()[0].endswith(" (unchanged)")
    assert not scratch_homes(tracked_home)

    weights = folder(tracked_home.root, "grpo") / "model" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1])
    assert run_reproduce("retrain-grpo/1").lines[1:] == (
        "gone: grpo: model/model.safetensors is damaged",
        "nothing was run",
    )
    weights.write_bytes(kept)

    edit_records(tracked_home, "sft", '"torch": "', '"torch": "0.')
    versions = run_reproduce("retrain-grpo/1")
    assert not versions.is_equal
    assert versions.lines[1] == "changed: sft: versions changed: torch"
    edit_records(tracked_home, "sft", '"torch": "0.', '"torch": "')

    edit_records(tracked_home, "grpo", '"instructions": "', '"instructions": "NEON and ')
    machine = run_reproduce("retrain-grpo/1").lines
    assert machine[0].startswith('machine changed: device=cpu precision=float32 instructions="NEON and ')
    assert machine[0].endswith("; results may differ in bits")
    assert machine[1].startswith("changed: grpo: machine changed: instructions NEON and ")
    assert machine[-1] == "nothing was run"
    edit_records(tracked_home, "grpo", '"instructions": "NEON and ', '"instructions": "')

    edit_records(tracked_home, "sft", '"learning_rate": 0.005', '"learning_rate": 0.004')
    other = run_reproduce("retrain-grpo/1")  # as if the run had been another: its records say so, and the bytes do
    assert other.lines[1].startswith("sft: ")
    assert "model/model.safetensors" in other.lines[1]
    (scratch,) = scratch_homes(tracked_home)
    assert other.lines[-1] == f"both are kept: {scratch}"

    (tmp_path / "data" / "prompts.jsonl").unlink()
    assert main(["reproduce", "retrain-grpo/1"]) == 1
    assert "gone: prepare_prompts: cannot read the dataset" in capsys.readouterr().out
    assert scratch_homes(tracked_home) == [scratch]

    with pytest.raises(ModelError, match="no registered model"):
        run_reproduce("retrain-grpo/7")


DATED = (
    "{{ 'Today: ' ~ strftime_now('%d %b %Y') }}{% for m in messages %}"
    "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Tomorrow(datetime):
    """The clock of the day after."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Tomorrow:
        return cls.fromtimestamp(datetime.now(tz).timestamp() + 86_400, tz)


class DayAfter(date):
    """The calendar of the day after."""

    @classmethod
    def today(cls) -> date:
        return date.today() + timedelta(days=1)


@pytest.mark.slow
def test_a_run_whose_template_writes_the_date_goes_on_and_comes_out_the_same_on_the_day_after(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dated.jinja").write_text(DATED, encoding="utf-8")
    overrides = (*write_data(tmp_path / "data"), f"model.chat_template={tmp_path / 'dated.jinja'}")
    run_targets("retrain", overrides, ["sft"])
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    monkeypatch.setattr("rlcore.models.importing.date", DayAfter)
    run_targets("retrain", overrides, ["grpo"])
    assert main(["reproduce", "retrain-grpo/1"]) == 0
    assert "every file of the model is the same" in capsys.readouterr().out
    assert (folder(tracked_home.root, "grpo") / "model" / "chat_template.jinja").read_text("utf-8") == DATED


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
