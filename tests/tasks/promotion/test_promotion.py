"""The gate's decision on a version, and export of a registered model."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlcore.errors import ModelError, PromotionError, StorageError
from rlcore.flows.presets import open_preset
from rlcore.models import saving
from rlcore.tasks.promotion.promotion import apply_decision, current_champion, take_down
from rlcore.tasks.serving.export import export_model, open_registered
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.settings import Home, configure_environment, find_home
from rlcore.tasks.store.storage import write_json
from rlcore.tasks.tracking.registry import CHALLENGER, CHAMPION, ModelVersion, find_version, read_tags
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.chat_models import our_answers
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.registered import promote, register_toy, register_versions, roll_back

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


def test_a_registered_model_is_exported_with_its_card(tracked_home: Home, tmp_path: Path) -> None:
    ref = register_toy(tracked_home)
    folder = export_model(tracked_home, "toy-sft/1", tmp_path / "out")
    assert our_answers(folder) == our_answers(tracked_home.root / ref.uri / "model")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and "\nlicense: " in card.partition("\n---\n")[0]
    assert "No decision yet" in card
    assert "`my\\|sums.jsonl` | 9 | 3" in card
    assert "sft/loss" in card


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_missing_files_come_from_the_registry(tracked_home: Home, tmp_path: Path, damage: str) -> None:
    ref = register_toy(tracked_home)
    expected = our_answers(tracked_home.root / ref.uri / "model")
    weights = tracked_home.root / ref.uri / "model" / "model.safetensors"
    weights.unlink()  # the bytes stay, under the name that the registry has for them
    if damage == "changed":
        weights.write_bytes(b"")
    with open_registered(tracked_home, "toy-sft/1") as registered:
        assert our_answers(registered.folder) == expected
    assert not registered.folder.exists()


def export_and_die(arguments: Sequence[str]) -> int:
    """Export a model and die when its files are written to the disk: for the warm process."""
    saving.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    configure_environment(find_home())
    export_model(find_home(), "toy-sft/1", Path(arguments[0]))
    return 0


@pytest.mark.slow  # the process of the kill imports for seconds; what a kill leaves is in store/test_storage.py
def test_the_next_command_removes_what_a_killed_export_left(tracked_home: Home, tmp_path: Path) -> None:
    ref = register_toy(tracked_home)
    (tracked_home.root / ref.uri / "model" / "model.safetensors").unlink()  # so that files come from the registry
    call = f"{__name__}:export_and_die"
    done = run_warm([str(tmp_path / "out")], environment(tracked_home.root), tmp_path, call=call)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.glob("*out*")] != []
    assert list(tracked_home.work.glob(".scratch-*")) != []
    configure_environment(tracked_home)
    assert list(tmp_path.glob("*out*")) == []
    assert list(tracked_home.work.iterdir()) == []


def test_a_copied_home_exports_its_own_model(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = register_toy(tracked_home)
    expected = our_answers(tracked_home.root / ref.uri / "model")
    copy = Home(tmp_path / "elsewhere" / "home")
    shutil.copytree(tracked_home.root, copy.root)
    shutil.rmtree(copy.artifacts / "checkpoint", ignore_errors=True)
    shutil.rmtree(copy.root / ref.uri, ignore_errors=True)
    shutil.rmtree(tracked_home.mlartifacts)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", copy.tracking_uri)
    monkeypatch.setenv("RLCORE_HOME", str(copy.root))
    assert our_answers(export_model(copy, "toy-sft/1", tmp_path / "out")) == expected


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tracked_home: Home, tmp_path: Path) -> None:
    register_toy(tracked_home)
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="no registered model 'toy-sft@champion'"):
        export_model(tracked_home, "toy-sft@champion", out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not empty"):
        export_model(tracked_home, "toy-sft/1", out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_model_name_with_a_dot_works_from_registration_to_export(tracked_home: Home, tmp_path: Path) -> None:
    register_toy(tracked_home, "toy-v1.2")
    export_model(tracked_home, "models:/toy-v1.2-sft/1", tmp_path / "out")
    assert "`toy-v1.2-sft`" in (tmp_path / "out" / "README.md").read_text()
