"""The gate's decision on a version, applied to the registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.errors import PromotionError
from rlcore.flows.presets import open_preset
from rlcore.tasks.promotion.promotion import apply_decision, current_champion, take_down
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_json
from rlcore.tasks.tracking.registry import CHALLENGER, CHAMPION, ModelVersion, find_version, read_tags
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.registered import promote, register_versions, roll_back

NAME = "tiny-grpo"
Apply = Callable[[ModelVersion, ModelVersion], str]


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


@pytest.fixture
def versions(tracked_home: Home, tracker: Tracker, tmp_path: Path) -> list[ModelVersion]:
    """Three versions, of which the first is the champion."""
    found = register_versions(tracker, tmp_path / "artifact", NAME)
    promote(tracked_home, tracker, found[0], over=None)
    return found


@pytest.fixture
def apply(tracked_home: Home) -> Apply:
    """Apply the verdict "better" on a version, from a comparison with another one."""
    config, store = open_preset("tiny", ["promotion.challenger=grpo"]), ArtifactStore(tracked_home.root)

    def applied(version: ModelVersion, over: ModelVersion) -> str:
        folder = tracked_home.work / f"verdict-{version.version}"
        folder.mkdir()
        verdict = {"promote": True, "look": 1, "sentence": "Promoted: better."}
        write_json({"verdict": verdict, "of": version.version}, folder / "verdict.json")
        model = ArtifactRef(kind="policy", uri="", sha256=version.sha256, bytes=0)
        return apply_decision(
            tracked_home, config, {"grpo": model, "promote": store.commit(folder, kind="verdict")}, over=over
        )

    return applied


def test_a_reason_that_no_tag_takes_is_shortened_before_it_is_recorded(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion], apply: Apply
) -> None:
    """Or the alias never follows the log, and each later promotion fails."""
    apply(versions[1], versions[0])
    take_down(tracked_home, NAME, version=2, reason="no\0 nein \udcff two\nlines" + "x" * 200_000)
    assert find_version(tracker, NAME, CHAMPION) == versions[0]
    noted = read_tags(tracker, versions[1])["rolled_back"]
    assert (noted[:27], len(noted) <= 5100) == (r"no\x00 nein \udcff two\nlin", True)
    for name in ("tiny/2", "../../x", "a:b", " "):
        with pytest.raises(PromotionError, match="there is no champion"):
            take_down(tracked_home, name, version=1, reason="rude")


def test_a_version_that_lost_a_race_says_so_and_is_the_challenger(
    tracker: Tracker, versions: list[ModelVersion], apply: Apply
) -> None:
    first, winner, loser = versions
    assert "Promoted: better" in apply(winner, first)
    with pytest.raises(PromotionError, match="version 2 is champion now"):
        apply(loser, first)  # judged at the same time, against the same champion
    assert find_version(tracker, NAME, CHAMPION) == winner
    assert find_version(tracker, NAME, CHALLENGER) == loser
    assert read_tags(tracker, winner)["verdict"] == "Promoted: better."
    tags = read_tags(tracker, loser)
    assert tags["verdict"].startswith("Not promoted: version 3 was compared with version 1, but version 2 is champion")
    assert "promoted_over" not in tags


def test_a_lost_alias_is_restored_by_the_log(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    tracker.client.delete_registered_model_alias(NAME, CHAMPION)
    assert current_champion(tracked_home, open_preset("tiny", ["promotion.challenger=grpo"])) == versions[0]
    assert find_version(tracker, NAME, CHAMPION) == versions[0]


def test_a_deleted_champion_is_an_error(tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]) -> None:
    tracker.client.delete_model_version(NAME, "1")
    with pytest.raises(PromotionError, match="by entry 1 of the audit log version 1 is champion, and MLflow lacks"):
        current_champion(tracked_home, open_preset("tiny", ["promotion.challenger=grpo"]))


def test_a_version_that_was_rolled_back_is_not_promoted_again(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion], apply: Apply
) -> None:
    first, second, _ = versions
    promote(tracked_home, tracker, second, over=first)
    roll_back(tracked_home, tracker, NAME, version=2, reason="rude")
    with pytest.raises(PromotionError, match="has been rolled back"):
        apply(second, first)
    assert read_tags(tracker, second)["verdict"].startswith("Not promoted: version 2 was champion before")
