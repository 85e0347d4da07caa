"""The whole pipeline on the micro run: results, cache, kill and resume, the committed curve, and a name with a dot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.tasks.steps.rows import read_pairs
from tests.flows.conftest import ROOT, environment, flows_command, run_flows, states_of
from tests.flows.golden import GOLDEN, STAGES, machine
from tests.flows.golden import record as golden_record
from tests.flows.homes import folder, kill_when, record, weights
from tests.flows.micro import MICRO
from tests.flows.warm import run_warm
from tests.flows.watched import CALL


def pages(home: Path, stage: str, file: str) -> str:
    (path,) = (home / "pages" / "tiny" / stage).glob(f"*/{file}")
    return path.read_text()


def plan_states(home: Path, *overrides: str, cwd: Path = ROOT) -> dict[str, str]:
    done = run_flows("plan", home, *overrides, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return states_of(done.stdout)


def test_every_stage_leaves_an_artifact_and_the_comparison_names_every_checkpoint(micro_home: Path) -> None:
    page = pages(micro_home, "compare", "comparison.md")
    assert all(f"| {label} |" in page for label in ("base", "sft", "grpo", "ppo"))
    assert (folder(micro_home, "grpo") / "model" / "model.safetensors").is_file()
    assert len(list((folder(micro_home, "grpo") / "rollouts").glob("*.parquet"))) == 4


def test_a_finished_run_is_cached_as_a_whole_and_a_changed_value_reruns_what_depends_on_it(micro_home: Path) -> None:
    assert set(plan_states(micro_home).values()) == {"cached"}
    changed = plan_states(micro_home, "stages.grpo.learning_rate=1e-5")
    assert changed["grpo"] == "run"
    assert {name for name, state in changed.items() if state != "cached"} == {"grpo", "evaluate_grpo", "compare"}


@pytest.mark.slow
def test_a_run_killed_in_rl_goes_on_from_its_checkpoint_and_ends_bit_for_bit_like_an_uninterrupted_one(
    micro_home: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    kill_when(home, "work/*/checkpoints/step-000002", flows_command("run"))
    created = record(home, "sft")["created"]
    assert not list((home / "cache" / "grpo").glob("*.json"))

    done = run_flows("run", home)
    assert done.returncode == 0, done.stderr
    assert "resume: after iteration" in done.stderr
    assert record(home, "sft")["created"] == created
    for stage in ("grpo", "ppo"):
        assert weights(home, stage) == weights(micro_home, stage)
        assert len(json.loads((folder(home, stage) / "history.json").read_text())) == 4


def test_without_preferences_the_policy_samples_pairs_and_the_verifier_judges_them(
    micro_home: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(micro_home, home)
    overrides = (
        *MICRO,
        "data.preferences.adapter=policy",
        "data.preferences.policy=sft",
        "data.preferences.num_train=24",
        "data.preferences.num_eval=8",
    )
    arguments = [json.dumps(overrides), json.dumps(["prepare_preferences"]), str(tmp_path / "called.json")]
    done = run_warm(arguments, environment(home), ROOT, call=CALL)
    assert done.returncode == 0, done.stderr
    newest = max((home / "cache" / "prepare_preferences").glob("*.json"), key=lambda path: path.stat().st_mtime)
    pairs = read_pairs(home / json.loads(newest.read_text())["ref"]["uri"] / "train.parquet")
    assert len(pairs) > 4
    assert all(pair.source == "policy" and pair.chosen != pair.rejected for pair in pairs)


NATS = 1e-4
"""Between the log-probabilities that two machines give one token. Measured: 6e-6 (AVX2, and SSE, against AVX-512)."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text())
    return loaded


@pytest.fixture(scope="module")
def measured(micro_home: Path) -> dict[str, Any]:
    return golden_record({stage: folder(micro_home, stage) for stage in STAGES})


def test_on_the_machine_that_made_it_the_curve_is_the_committed_one_bit_for_bit(
    golden: dict[str, Any], measured: dict[str, Any]
) -> None:
    here = machine()
    if golden["machine"] != here:
        pytest.skip(f"made on {golden['machine']}, this is {here}")
    assert measured == {name: golden[name] for name in measured}


@pytest.mark.parametrize("stage", STAGES)
def test_on_every_machine_the_first_iteration_is_the_committed_one_within_rounding(
    golden: dict[str, Any], measured: dict[str, Any], stage: str
) -> None:
    """Rounding may turn a draw that lies on the edge between two tokens; what was sampled before it has to agree."""
    ours, theirs = measured["first"][stage], golden["first"][stage]
    assert [row["prompt_id"] for row in ours] == [row["prompt_id"] for row in theirs]
    same = [one["tokens"] == other["tokens"] for one, other in zip(ours, theirs, strict=True)]
    assert sum(same) > len(same) / 2
    for one, other in zip(ours, theirs, strict=True):
        shared = common_length(one["tokens"], other["tokens"])
        assert one["logprobs"][:shared] == pytest.approx(other["logprobs"][:shared], abs=NATS)
    if all(same):
        assert measured["curve"][stage][0] == pytest.approx(golden["curve"][stage][0], rel=1e-2, abs=1e-3)


def common_length(one: list[int], other: list[int]) -> int:
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_a_run_with_a_kl_term_has_the_page_and_its_plot(stage: str, micro_home: Path) -> None:
    (page,) = micro_home.glob(f"pages/tiny/{stage}/*/over_optimisation.md")
    assert "Held out: 0." in page.read_text(encoding="utf-8")
    assert page.with_suffix(".png").is_file()


NAME = "tiny-v1.2"


@pytest.mark.slow  # ten seconds of the processor; tests of the registry and of promotion have such names too
def test_a_name_with_a_dot_works_from_the_run_to_the_export(micro_home: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(micro_home, tmp_path / "home"))
    done = run_flows("run", home, f"name={NAME}")
    assert done.returncode == 0, done.stderr
    assert (home / "pages" / NAME / "compare").is_dir()
    overrides = [part for each in (*MICRO, f"name={NAME}") for part in ("--set", each)]
    shown = run_warm(["show", "tiny", *overrides], environment(home), ROOT)
    (report,) = [line.split(maxsplit=1)[1] for line in shown.stdout.splitlines() if line.startswith("report ")]
    assert f"<title>{NAME}: run report</title>" in Path(report).read_text(encoding="utf-8")
    exported = run_warm(["export", f"{NAME}-grpo/1", str(tmp_path / "out")], environment(home), ROOT)
    assert exported.returncode == 0, exported.stderr
    assert f"# `{NAME}-grpo`" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../../X", "/X", "."])
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    home = tmp_path / "deep" / "home"
    done = run_flows("run", home, f"name='{name}'")
    assert done.returncode == 2, done.stderr
    assert f"name = {name!r}: names folders and models" in done.stderr
    made = [path for path in tmp_path.rglob("*") if path.name == "X" or path.suffix == ".json"]
    assert [path for path in made if path != home / "versions.json"] == []  # what opened the home
