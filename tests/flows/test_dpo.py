"""DPO as a stage of a run: learned on pairs whose better side is plain, registered, compared; again the same bytes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.metrics import check_names
from rlcore.tasks.presets.graph import contrasts
from tests.chaos.books import repeated_points
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder, record, weights
from tests.flows.test_recipes import comparison, overrides_of
from tests.flows.warm import run_warm
from tests.processes import wait_for_line

PRESET = "rlhf_dpo"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The preset on pairs of which the better side is always the same word."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {
            "pair_id": f"p{number}",
            "messages": [{"role": "user", "content": f"question {number}"}],
            "chosen": "yes",
            "rejected": "no",
            "source": "test",
        }
        for number in range(64)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = ("adapter=preferences", f"path={path}", "num_train=48", "num_eval=6")
    learning = ("num_epochs=2", "batch_size=8", "learning_rate=0.01", "eval_every=4")
    found = [*overrides_of(PRESET), *(f"data.preferences.{each}" for each in own)]
    return [*found, *(f"stages.dpo.{each}" for each in learning)]


def arguments(settings: list[str], *overrides: str) -> list[str]:
    return ["run", "--preset", PRESET, *(part for each in (*settings, *overrides) for part in ("--set", each))]


def ran(home: Path, settings: list[str], *overrides: str) -> Path:
    done = run_warm(arguments(settings, *overrides), environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture(scope="module")
def home(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("dpo"), settings)


def without_dpo(home: Path, copy: Path) -> Path:
    """A copy of a home in which the stage was never run."""
    shutil.copytree(home, copy, dirs_exist_ok=True)
    shutil.rmtree(copy / "cache" / "dpo")
    shutil.rmtree(copy / folder(home, "dpo").relative_to(home))
    return copy


def test_the_preference_is_learned_and_held_on_unseen_pairs_with_its_interval(home: Path) -> None:
    metrics = record(home, "dpo")["metrics"]
    check_names(metrics)
    assert metrics["dpo/eval_pairs"] == 6.0
    assert metrics["dpo/eval_accuracy"] >= metrics["dpo/eval_accuracy_low"] > 0.5
    assert metrics["dpo/chosen"] > metrics["dpo/rejected"]
    history = json.loads((folder(home, "dpo") / "history.json").read_text())
    assert [row["iteration"] for row in history] == list(range(1, 13))
    assert [row["iteration"] for row in history if "dpo/eval_loss" in row] == [4, 8, 12]
    assert history[-1]["dpo/eval_loss"] == metrics["dpo/eval_loss"] < 0.69
    assert repeated_points(home) == []


def test_it_starts_from_sft_reads_the_pairs_and_is_held_against_its_start(home: Path) -> None:
    assert record(home, "dpo")["ingredients"]["inputs"].keys() == {"sft", "prepare_preferences"}
    assert "| dpo - sft |" in comparison(home)
    assert weights(home, "dpo") != weights(home, "sft")
    assert (folder(home, "dpo") / "seal.json").is_file()
    assert list(home.glob("pages/*/dpo/*/loss.png"))


def test_it_is_compared_with_rl_that_started_from_the_same() -> None:
    both = open_preset(
        "retrain",
        ['stages.dpo={kind="dpo",init_from="sft",data=["preferences"],num_epochs=1,batch_size=4,learning_rate=1e-4}'],
    )
    assert {("dpo", "sft"), ("grpo", "sft")} <= set(contrasts(both))
    assert {("dpo", "grpo"), ("grpo", "dpo")} & set(contrasts(both))


@pytest.mark.slow
def test_run_again_from_nothing_it_ends_with_the_same_bytes(home: Path, settings: list[str], tmp_path: Path) -> None:
    again = ran(without_dpo(home, tmp_path), settings)
    assert weights(again, "dpo") == weights(home, "dpo")


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_checkpoint_and_lies_beside_it(
    home: Path, settings: list[str], tmp_path: Path
) -> None:
    adapted = ran(without_dpo(home, tmp_path), settings, "stages.dpo.lora.rank=4")
    made = folder(adapted, "dpo") / "model"
    assert (made / "adapter" / "adapter_config.json").is_file()
    assert weights(adapted, "dpo") != weights(home, "sft")
    assert record(adapted, "dpo")["metrics"]["dpo/eval_accuracy_low"] > 0.5


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("stages.dpo.data=['prompts']", "stages.dpo.data = 'prompts': has no preference pairs"),
        ("stages.dpo.data=[]", "stages.dpo.data: names no data"),
        ("stages.dpo.init_from=sfd", "stages.dpo.init_from = 'sfd': no such checkpoint"),
        ("stages.dpo.beta=0.0", "stages.dpo.beta"),
        ("stages.dpo.label_smoothing=0.5", "stages.dpo.label_smoothing"),
        ("stages.dpo.sampling={max_new_tokens=8}", "stages.dpo.sampling"),
    ],
)
def test_what_a_preset_cannot_mean_is_refused_with_its_key(override: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset(PRESET, [override])
    assert fault in caught.value.what


@pytest.mark.slow
def test_killed_on_the_way_the_next_run_ends_with_the_same_bytes(
    home: Path, settings: list[str], tmp_path: Path
) -> None:
    copy = without_dpo(home, tmp_path)
    command = [sys.executable, "-m", "rlcore.flows", *arguments(settings)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(copy), cwd=ROOT
    ) as first:
        wait_for_line(first, "dpo: step 3/12")
        first.send_signal(signal.SIGKILL)
    assert not list((copy / "cache").glob("dpo/*.json"))
    assert weights(ran(copy, settings), "dpo") == weights(home, "dpo")


@pytest.mark.scale
def test_on_two_ranks_it_learns_what_one_process_does(home: Path, settings: list[str], tmp_path: Path) -> None:
    copy = without_dpo(home, tmp_path)
    ran(copy, settings, "distributed.backend=processes", "distributed.learner_ranks=2")  # SFT too
    losses = [
        [row["dpo/loss"] for row in json.loads((folder(each, "dpo") / "history.json").read_text())]
        for each in (home, copy)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-4)
    assert record(copy, "dpo")["metrics"]["dpo/eval_accuracy_low"] > 0.5
