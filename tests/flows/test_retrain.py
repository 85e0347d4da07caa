"""The flow retrain from the first champion on, inline, in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import ConfigError, DataError
from rlcore.flows.flows import retrain
from rlcore.tasks.operations.rows import find_rows
from rlcore.tasks.run import events
from rlcore.tasks.run.events import PROMOTED, REFUSED
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import find_lineage, tree_text
from rlcore.tasks.tracking.registry import CHALLENGER, CHAMPION, PREVIOUS, find_version, read_tags
from rlcore.tasks.tracking.runs import open_tracker
from tests.flows.retraining import LEARN, NAME, RIGHT, SPOIL, write_data
from tests.judge_server import serving
from tests.rlcore.rewards.test_pair_judge import answers_in


def aliases(home: Home) -> dict[str, int]:
    tracker = open_tracker(home)
    found = {alias: find_version(tracker, NAME, alias) for alias in (CHAMPION, CHALLENGER, PREVIOUS)}
    return {alias: version.version for alias, version in found.items() if version}


def test_a_champion_is_made_trained_on_kept_from_worse_ones_and_from_drifted_data(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: dict[str, tuple[str, str]] = {}  # by key, as the outbox keeps messages

    def tell(home: Home, event: str, about: str, text: str, *, key: str, time: str) -> None:
        notices[key] = (event, about.rpartition("/")[2])

    monkeypatch.setattr(events, "_tell", tell)
    data = write_data(tmp_path / "data")

    first = retrain.fn("retrain", data)
    assert first.outcome.endswith("Passed: the first champion, within every limit.")
    again = retrain.fn("retrain", data)
    assert (again.result, aliases(tracked_home)) == ("unchanged", {CHAMPION: 1})
    assert "version 1 of retrain-grpo was made from these very inputs" in again.outcome

    better = retrain.fn("retrain", (*data, *LEARN))
    assert (better.result, aliases(tracked_home)) == ("judged", {CHAMPION: 2, PREVIOUS: 1})
    assert "the accepted rows, unchanged" in better.page
    assert "It is the champion's reward model" in better.page
    assert "## Problems won: 100" in better.page

    tags, root = find_lineage(tracked_home, f"{NAME}@champion")
    names = {parent.stage for parent in root.parents}
    assert names == {"champion", "prepare_prompts", "reward_model"}
    (start,) = (parent for parent in root.parents if parent.stage == "champion")
    assert [parent.stage for parent in start.parents] == ["grpo"]  # the first champion, and what it comes from
    assert "rows' digest" in tree_text(tags, root)
    tracker = open_tracker(tracked_home)
    one = find_version(tracker, NAME, PREVIOUS)
    two = find_version(tracker, NAME, CHAMPION)
    assert one is not None
    assert two is not None
    assert read_tags(tracker, two)["parents"].startswith("champion:")

    require_models_of_a_row(tracked_home, tmp_path / "rows.jsonl")
    worse = retrain.fn("retrain", (*data, *SPOIL))
    assert (worse.result, "Refused" in worse.outcome) == ("judged", True)
    assert aliases(tracked_home) == {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}
    known = retrain.fn("retrain", (*data, *SPOIL))
    assert (known.result, known.outcome.startswith("nothing new")) == ("unchanged", True)
    acts = [each for each in notices.values() if each[0] in (PROMOTED, REFUSED)]
    assert acts == [(PROMOTED, "1"), (PROMOTED, "2"), (REFUSED, "3")]  # of each act, and once
    assert aliases(tracked_home) == {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}

    newest = tracker.find_runs("retrain", "preset", "retrain")[0]  # as if it had been killed before its last page
    tracker.client.set_terminated(newest, "KILLED")
    page = max(tracked_home.pages.glob("retrain/promote/*/verdict.md"), key=lambda path: path.stat().st_mtime)
    shutil.rmtree(page.parent)
    finished = retrain.fn("retrain", (*data, *SPOIL))
    assert (finished.result, page.is_file()) == ("judged", True)
    assert tracker.client.get_run(newest).info.status == "FINISHED"
    assert aliases(tracked_home) == {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}

    with pytest.raises(DataError, match="drift from the last accepted") as caught:
        retrain.fn("retrain", (*write_data(tmp_path / "long", digits=30), *LEARN))
    page = Path(caught.value.where).read_text(encoding="utf-8")
    assert "## prompts: refuse" in page
    assert "| prompt_tokens | **refuse** |" in page
    assert aliases(tracked_home) == {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}
    require_no_way_around_the_drift_gate(tracked_home, (*write_data(tmp_path / "long", digits=30), *LEARN), monkeypatch)
    assert aliases(tracked_home) == {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}


def require_models_of_a_row(home: Home, path: Path) -> None:
    """A held-out prompt, a training row as its source has it, a prompt that nobody asked, and a line with no prompt."""
    rows = Path(path.with_name("data") / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()
    training = next(row for row in rows if json.loads(row)["split"] == "train")
    path.write_text('{"prompt": "10 "}\n{"prompt": "who?"}\n' + training, encoding="utf-8")
    num_found, lines = find_rows(home, path)
    assert (num_found, lines[-1]) == (2, "in snapshots: 2 of 3 prompts")
    for line in lines[:-1]:
        held, _, models = line.partition("; models: ")
        assert held.endswith("train 1, held out 1")
        assert {f"{NAME}/1", f"{NAME}/2"} <= {*models.split(", ")}
    path.write_text('{"prompt": "12"}\n{"name": "Zoë"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 2 names no row"):
        find_rows(home, path)


def require_no_way_around_the_drift_gate(home: Home, drifted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted rows are gone from the disk, the account is damaged or gone from MLflow, the home is another one."""
    tracker = open_tracker(home)
    champion = find_version(tracker, NAME, CHAMPION)
    assert champion is not None
    account = home.mlartifacts / "retrain" / "models" / champion.model_id / "artifacts" / "past" / "past.json"
    written = account.read_text(encoding="utf-8")
    refused = pytest.raises(DataError, match=r"prompts: .*prompt_tokens \(PSI")
    for damage in (written.replace(":", ": ", 1), ""):
        account.unlink()
        if damage:
            account.write_text(damage, encoding="utf-8")
        with refused:
            retrain.fn("retrain", drifted)
        assert json.loads(account.read_text(encoding="utf-8"))["datasets"].keys() >= {"prepare_prompts"}
    for snapshot in home.artifacts.glob("dataset/*"):
        shutil.rmtree(snapshot)
    unknown = home.root / "unknown.jsonl"
    unknown.write_text('{"prompt": "12"}\n', encoding="utf-8")
    assert any(f"rows unknown: removed; models: {NAME}/1" in line for line in find_rows(home, unknown)[1])
    with pytest.raises(DataError, match=r"prompts: .*prompt_tokens \(PSI"):
        retrain.fn("retrain", drifted)
    account.unlink()
    with pytest.raises(DataError, match=r"cannot be read .* nor made again .its data are gone: prepare_prompts "):
        retrain.fn("retrain", drifted)
    account.write_text(written, encoding="utf-8")
    other = Home(home.root.with_name("other"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", home.tracking_uri)
    monkeypatch.setenv("RLCORE_HOME", str(other.root))
    with pytest.raises(DataError, match=r"prompts: .*prompt_tokens \(PSI"):
        retrain.fn("retrain", drifted)
    tracker.client.delete_model_version_tag(NAME, "2", "past")
    with pytest.raises(DataError, match="it has none"):
        retrain.fn("retrain", drifted)
    monkeypatch.setenv("RLCORE_HOME", str(home.root))


def test_a_preset_without_the_section_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no section \[retrain\]"):
        retrain.fn("tiny", ())


JUDGED = """
extends = "retrain"
name = "retrain"

[promotion]
win_rate = "wins"

[stages.wins]
kind = "win_rate"
policy = "grpo"
baseline = "sft"
data = ["prompts"]
human_pairs = ["preferences"]

[stages.wins.bounds]
max_length_bias = 1.0  # all answers here are equally long

[stages.wins.sampling]
max_new_tokens = 8
"""


def likes_the_right_answer(body: Mapping[str, Any]) -> str:
    nonce, first, second = answers_in(body)
    word = "tie" if (RIGHT in first) == (RIGHT in second) else "1" if RIGHT in first else "2"
    return f"<verdict {nonce}>{word}</verdict>"


@pytest.mark.slow  # test_promote.py has a decision by win rates, test_win_rate.py a judge at an endpoint
def test_a_judge_at_an_endpoint_decides_whether_a_retrained_model_becomes_the_champion(
    tracked_home: Home, tmp_path: Path
) -> None:
    preset = tmp_path / "judged.toml"
    preset.write_text(JUDGED, encoding="utf-8")
    with serving(likes_the_right_answer) as (state, url):
        judge = f"stages.wins.judge={{kind='judge',options={{base_url='{url}',model='m'}}}}"
        data = (*write_data(tmp_path / "data"), judge)
        first = retrain.fn(str(preset), data)
        assert first.outcome.endswith("Passed: the first champion, within every limit.")
        asked = len(state.bodies)
        better = retrain.fn(str(preset), (*data, *LEARN))
        assert (better.result, aliases(tracked_home)) == ("judged", {CHAMPION: 2, PREVIOUS: 1})
        assert "win rate" in better.page
        assert len(state.bodies) > asked + 100  # a hundred pairs, those that are not equal in both orders
        worse = retrain.fn(str(preset), (*data, *SPOIL))
    assert (worse.result, "Refused" in worse.outcome) == ("judged", True)
    assert aliases(tracked_home) == {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}
