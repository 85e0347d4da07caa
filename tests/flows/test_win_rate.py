"""A win rate as a stage of a run, by each kind of judge, from answers whose winner is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.flows.presets import open_preset
from rlcore.flows.stages import stages
from rlcore.metrics import check_names
from rlcore.tasks.presets.graph import checkpoints, required_by
from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import environment
from tests.flows.homes import folder, record
from tests.flows.test_recipes import comparison, overrides_of
from tests.flows.warm import run_warm
from tests.judge_server import serving
from tests.rlcore.rewards.test_pair_judge import longer_wins

PRESET = "win_rate"
JUDGES = """
def front(pairs):
    return [1.0] * len(pairs)

def silent(pairs):
    raise ValueError("I refuse")
"""


def arguments(*overrides: str) -> list[str]:
    settings = (*overrides_of(PRESET), *overrides)
    return ["run", "--preset", PRESET, *(part for each in settings for part in ("--set", each))]


def run(home: Path, *overrides: str) -> Any:
    return run_warm(arguments(*overrides), environment(home), home)  # from where a judge of one's own lies


def account(home: Path) -> dict[str, Any]:
    """The newest account of the stage."""
    paths = sorted(home.glob("artifacts/win_rate/*/win_rate.json"), key=lambda path: path.stat().st_mtime)
    found: dict[str, Any] = json.loads(paths[-1].read_text())
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose judge is its reward model."""
    made = tmp_path_factory.mktemp("win_rate")
    done = run(made)
    assert done.returncode == 0, done.stderr
    return made


def again(home: Path, copy: Path, *overrides: str) -> Path:
    """The same run with another judge."""
    shutil.copytree(home, copy, dirs_exist_ok=True)
    shutil.rmtree(copy / "artifacts" / "win_rate")
    (copy / "own_judge.py").write_text(JUDGES, encoding="utf-8")
    done = run(copy, *overrides)
    assert done.returncode == 0, done.stderr
    return copy


def test_a_reward_model_judges_and_is_audited_and_the_pages_say_so(home: Path) -> None:
    assert list((home / "work").iterdir()) == []  # nothing of the work is left
    metrics = record(home, "win_rate")["metrics"]
    check_names(metrics)
    assert metrics["win_rate/prompts"] == 8.0
    assert metrics["win_rate/order_flip_rate"] == metrics["judge/order_flip_rate"] == 0.0
    assert metrics["judge/pairs"] == 8.0
    assert metrics["win_rate/rate_low"] <= metrics["win_rate/rate"] <= metrics["win_rate/rate_high"]
    found = account(home)
    assert (found["policy"], found["reference"], found["judge"]) == ("grpo", "sft", "reward_model reward_model")
    assert metrics["win_rate/trusted"] == float(not found["distrust"])
    assert "## win_rate: win rate" in comparison(home)
    (page,) = home.glob("pages/*/win_rate/*/win_rate.md")
    assert "held-out human pairs" in page.read_text()
    (report,) = home.glob("reports/*/report.html")
    assert "Win rates" in report.read_text()


def test_every_verdict_is_kept_beside_its_answers_and_equal_answers_are_half(home: Path) -> None:
    table = read_table(folder(home, "win_rate") / "verdicts.parquet")
    assert len(table) == 8
    same = table["first"] == table["second"]
    assert set(table["forward"][same]) <= {0.5}
    assert table["asked"].tolist() == (~same).tolist()


def test_a_checkpoint_against_itself_is_half_exactly_and_nobody_is_asked(home: Path, tmp_path: Path) -> None:
    found = account(again(home, tmp_path, "stages.win_rate.policy=sft", "stages.win_rate.human_pairs=[]"))
    assert (found["found"]["rate"]["mean"], found["found"]["ties"], found["identical"], found["calls"]) == (
        0.5,
        8,
        8,
        0,
    )
    assert found["distrust"] == ["the judge was not audited: name human_pairs"]


def sampled(kind: str) -> tuple[str, ...]:
    """Answers that differ, and one of one's own judges."""
    return (f"stages.win_rate.judge={{kind='own_judge:{kind}'}}", "stages.win_rate.greedy=false")


def test_a_judge_that_takes_the_first_gives_half_and_is_not_trusted(home: Path, tmp_path: Path) -> None:
    found = account(again(home, tmp_path, *sampled("front")))
    assert found["found"]["rate"]["mean"] == 0.5
    assert found["calls"] > 16  # the audit's eight pairs in both orders, and the answers'
    assert found["audit"]["order_dependent"]["mean"] == found["audit"]["first"] == 1.0
    assert any("depend on the order" in reason for reason in found["distrust"])
    assert any("NOT TRUSTED" in page.read_text() for page in tmp_path.glob("pages/*/win_rate/*/win_rate.md"))


def test_a_judge_that_refuses_ends_the_stage_with_its_reason(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    (tmp_path / "own_judge.py").write_text(JUDGES, encoding="utf-8")
    done = run(tmp_path, *sampled("silent"))
    assert done.returncode != 0
    assert "pairs (limit 0.8)" in done.stderr
    assert "raised ValueError: I refuse" in done.stderr


def test_an_endpoint_judges_and_its_tokens_are_priced(home: Path, tmp_path: Path) -> None:
    with serving(longer_wins) as (state, url):
        state.usage = {"prompt_tokens": 100, "completion_tokens": 5}
        options = f"{{base_url='{url}',model='m',prompt_price=1.0}}"
        judge = f"stages.win_rate.judge={{kind='judge',options={options}}}"
        found = account(again(home, tmp_path, judge, "stages.win_rate.greedy=false"))
    assert found["calls"] == len(state.bodies) > 16
    assert found["tokens"] == 105 * found["calls"]
    assert found["cost"] == pytest.approx(1e-4 * found["calls"])
    assert found["failed_calls"] == 0


def test_the_graph_knows_both_sides_the_judge_and_its_pairs() -> None:
    config = open_preset(PRESET)
    (stage,) = (each for each in stages(config) if each.name == "win_rate")
    assert set(stage.inputs) == {"grpo", "prepare_prompts", "prepare_preferences", "reward_model", "sft"}
    assert "win_rate" not in checkpoints(config)
    assert "preferences" in required_by(config, ["win_rate"])[1]
    other = open_preset(PRESET, ["stages.win_rate.baseline=models:/mine@champion"])
    (stage,) = (each for each in stages(other) if each.name == "win_rate")
    assert "reference_win_rate" in stage.inputs


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("stages.win_rate.baseline=sfd", "stages.win_rate.baseline = 'sfd': no such checkpoint"),
        ("stages.win_rate.data=['preferences']", "stages.win_rate.data = 'preferences': has no prompts"),
        (
            "stages.win_rate.human_pairs=['prompts']",
            "stages.win_rate.human_pairs = 'prompts': no dataset of human",
        ),
        (
            "stages.win_rate.judge.stage=grpo",
            "stages.win_rate.judge.stage = 'grpo': not a stage of the kind reward_model",
        ),
        ("stages.win_rate.judge={kind='math'}", "must be 'judge', 'reward_model' or module:function"),
        ("stages.win_rate.max_unjudged=2.0", "stages.win_rate.max_unjudged"),
        ("stages.sft.init_from=win_rate", "init_from = 'win_rate': this stage makes measurements, no policy"),
    ],
)
def test_what_a_preset_cannot_mean_is_refused_with_its_key(override: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_preset(PRESET, [override])
    assert fault in caught.value.what
