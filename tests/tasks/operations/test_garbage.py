"""Garbage collection: what is needed stays, what goes leaves its record, and nothing of it disturbs a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.errors import ModelError, StorageError
from rlcore.tasks.keys.plan import look_up
from rlcore.tasks.operations.garbage import Collection, collect, find_waste, look, open_scene
from rlcore.tasks.report.summary import show_model
from rlcore.tasks.run.leases import hold_lease
from rlcore.tasks.serving.export import open_registered
from rlcore.tasks.store.artifacts import MANIFEST, ArtifactRef, ArtifactStore
from rlcore.tasks.store.audit_log import read_entries
from rlcore.tasks.store.cache import StageCache
from rlcore.tasks.store.locks import file_lock
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.shared import SharedStore
from rlcore.tasks.tracking.lineage import ancestry, find_lineage, nodes, read_records, tree_lines, tree_text
from rlcore.tasks.tracking.registry import CHAMPION, PREVIOUS, find_version
from rlcore.tasks.tracking.runs import open_tracker
from tests.registered import roll_back
from tests.tasks.homes import copy_home, new_home
from tests.tasks.operations.daily import NAME, PRESET, age, retrain, table
from tests.toys import ToyConfig

OLD, KEEP = 100, 30  # days
OTHER = f"artifacts/policy/{'0' * 64}"  # of another home
Refs = Mapping[str, ArtifactRef]


def there(home: Home, refs: Refs) -> set[str]:
    """The stages whose results are whole."""
    store = ArtifactStore(home.root)
    return {name for name, ref in refs.items() if not store.errors(ref)}


def counts(collection: Collection) -> dict[str, int]:
    return {kind: count for (kind, _), (count, _) in collection.gone.items()}


@pytest.fixture(scope="module")
def old_home(tmp_path_factory: pytest.TempPathFactory, _empty_mlflow_database: Path) -> tuple[Home, list[Refs]]:
    """Four old retrainings: versions 1 to 3 became champion in turn, 4 was refused."""
    with new_home(tmp_path_factory.mktemp("old"), _empty_mlflow_database) as made:
        refs = [retrain(made, day, is_better=day < 4) for day in (1, 2, 3, 4)]
        age(made, OLD)
    return made, refs


@pytest.fixture
def refs(tracked_home: Home, old_home: tuple[Home, list[Refs]]) -> list[Refs]:
    """The results of a copy of the old home."""
    copy_home(old_home[0], tracked_home)
    return old_home[1]


def test_a_version_with_an_alias_stays_with_its_inputs_and_results(tracked_home: Home, refs: list[Refs]) -> None:
    records = read_records(tracked_home)
    gone = collect(tracked_home, keep_days=KEEP)
    assert there(tracked_home, refs[0]) == set()  # champion once, and neither previous nor needed to make version 2
    assert [there(tracked_home, each) for each in refs[1:]] == [set(each) for each in refs[1:]]
    kinds = ("dataset", "policy", "evaluation", "verdict")
    assert counts(gone) == {f"result: {kind}": 1 for kind in kinds} | {"page": 1, "weights of a version": 1}
    assert read_records(tracked_home) == records
    assert look(tracked_home, keep_days=KEEP).gone == {}


def test_a_look_changes_nothing_and_tells_what_a_collection_then_removes(tracked_home: Home, refs: list[Refs]) -> None:
    before = sorted(path for path in tracked_home.root.rglob("*") if not path.name.startswith("mlflow.db"))
    seen = look(tracked_home, keep_days=KEEP)
    assert sorted(path for path in tracked_home.root.rglob("*") if not path.name.startswith("mlflow.db")) == before
    assert "nothing was removed" in seen.text
    files = {path: path.stat() for path in tracked_home.artifacts.rglob("*") if path.is_file()}
    gone = collect(tracked_home, keep_days=KEEP)
    assert gone.gone == seen.gone
    ((_, weights),) = [sizes for (kind, _), sizes in gone.gone.items() if kind == "weights of a version"]
    removed = sum(fact.st_size for path, fact in files.items() if not path.exists())
    assert weights >= 4096  # one file with two names, which counts where the second goes
    assert sum(size for (kind, _), (_, size) in gone.gone.items() if kind.startswith("result")) <= removed - 4096
    *_, entry = read_entries(tracked_home)
    assert (entry.action, entry.subject) == ("gc", "home")
    assert ["weights of a version", 1, weights] in entry.details["removes"]


def test_the_weights_of_a_registered_version_lie_once(tracked_home: Home) -> None:
    artifact = tracked_home.root / retrain(tracked_home, 1)["grpo"].uri / "model" / "model.safetensors"
    (registered,) = tracked_home.mlartifacts.rglob("model.safetensors")
    assert artifact.samefile(registered)
    assert artifact.stat().st_nlink == 2


def test_what_is_young_or_was_used_a_short_while_ago_stays(tracked_home: Home, refs: list[Refs]) -> None:
    assert look(tracked_home, keep_days=OLD + 1).gone == {}
    (record,) = (each for each in read_records(tracked_home) if each.ref.sha256 == refs[0]["grpo"].sha256)
    StageCache(tracked_home.cache).note_use("grpo", record.key, "another")
    collect(tracked_home, keep_days=KEEP)
    assert there(tracked_home, refs[0]) == {"grpo"}
    with open_registered(tracked_home, f"{NAME}/1") as opened:
        assert opened.folder.is_dir()


def test_an_alias_of_ones_own_pins_a_version(tracked_home: Home, refs: list[Refs]) -> None:
    tracker = open_tracker(tracked_home)
    one = find_version(tracker, NAME, PREVIOUS)
    assert one is not None
    client = tracker.client
    client.set_registered_model_alias(NAME, "paper", "1")
    assert look(tracked_home, keep_days=KEEP).gone == {}


def test_commands_say_what_was_cleaned_and_a_run_makes_it_again(tracked_home: Home, refs: list[Refs]) -> None:
    collect(tracked_home, keep_days=KEEP)
    tags, root = find_lineage(tracked_home, f"{NAME}/1")
    text = tree_text(tags, root)
    assert text.count("the artifact was cleaned on 20") == 2
    assert "prompts/v1 from sums.jsonl, rows' digest" in text  # its report stays
    assert "\n  cleaned: 20" in text
    assert "the artifact was cleaned on 20" in show_model(tracked_home, f"{NAME}/1")
    refused = pytest.raises(ModelError, match=rf"(?s)its files were cleaned: 20.*rlcore run {PRESET}")
    with refused, open_registered(tracked_home, f"{NAME}/1"):
        pass
    with pytest.raises(StorageError, match="the artifact was cleaned on 20"):
        ArtifactStore(tracked_home.root).path(refs[0]["grpo"])
    config = ToyConfig.run(name=PRESET, seed=1)
    rows, _ = look_up(table(None), config, ["promote"], home=tracked_home)
    assert [row.state for row in rows] == ["run", "depends", "depends", "depends"]
    assert rows[0].reason.startswith("the artifact was cleaned on 20")
    tracker = open_tracker(tracked_home)
    tracker.client.delete_registered_model_alias(NAME, CHAMPION)  # as it was before the first champion
    again = retrain(tracked_home, 1, is_better=False)
    assert there(tracked_home, again) == set(again)
    assert find_version(tracker, NAME, "challenger").version == 5  # type: ignore[union-attr]
    with open_registered(tracked_home, f"{NAME}/5") as opened:
        assert opened.folder.is_dir()
    _, old = find_lineage(tracked_home, f"{NAME}/1")  # of the same key
    assert old.sha256 == refs[0]["grpo"].sha256
    assert "the artifact was cleaned on 20" in "".join(old.facts)
    _, root = find_lineage(tracked_home, f"{NAME}/5")
    assert "cleaned" not in "".join(fact for node in nodes(root) for fact in node.facts)


def test_a_rollback_ends_before_a_cleaned_version(tracked_home: Home, refs: list[Refs]) -> None:
    collect(tracked_home, keep_days=KEEP)
    tracker = open_tracker(tracked_home)
    assert roll_back(tracked_home, tracker, NAME, version=3, reason="worse").version == 2
    assert find_version(tracker, NAME, PREVIOUS) is None


def test_while_a_run_is_active_only_what_is_older_than_it_goes(tracked_home: Home, refs: list[Refs]) -> None:
    with hold_lease(tracked_home, experiment="other"):
        young = retrain(tracked_home, 5, is_better=False)
        gone = collect(tracked_home, keep_days=-1)  # as a day later
        assert there(tracked_home, young) == set(young)
        assert there(tracked_home, refs[0]) == set()
        assert all(kind.startswith(("result", "page")) for kind in counts(gone))
        assert "1 runs are active" in gone.text
    rest = collect(tracked_home, keep_days=KEEP)
    assert counts(rest) == {"weights of a version": 2}  # of version 1, and of 4, whose alias went to 5


def test_a_result_that_a_run_begins_to_need_meanwhile_stays(tracked_home: Home, refs: list[Refs]) -> None:
    scene = open_scene(tracked_home, keep_days=KEEP)
    by_path = {waste.paths[0].name: waste for waste in find_waste(scene)}
    policy, rows = (by_path[refs[0][name].sha256] for name in ("grpo", "prepare_prompts"))
    (record,) = (each for each in read_records(tracked_home) if each.ref.sha256 == refs[0]["grpo"].sha256)
    with file_lock(tracked_home.work / f"{record.key}.lock"):
        assert not policy.remove()  # a run looks at it now
    StageCache(tracked_home.cache).note_use("grpo", record.key, "another")
    assert not policy.remove()
    assert there(tracked_home, refs[0]) == set(refs[0])
    assert rows.remove()
    assert not rows.remove()


def test_a_result_that_is_placed_again_meanwhile_stays(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    refs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("1")
        refs.append(store.commit(tmp_path / name, kind="thing"))
        if name == "one":
            os.utime(tmp_path / refs[0].uri, (0, 0))
    assert refs[0] == refs[1]
    assert not store.clean(refs[0].uri, before=1000.0)
    assert store.errors(refs[0]) == ()
    assert store.clean(refs[0].uri, before=1e12)
    assert store.absence(refs[0]).startswith("the artifact was cleaned on 20")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a").write_text("1")
    store.commit(tmp_path / "two", kind="thing")
    assert [path.name for path in (tmp_path / "artifacts" / "thing").iterdir()] == [refs[0].sha256]


def test_remains_of_old_work_go_and_living_ones_stay(tracked_home: Home, refs: list[Refs]) -> None:
    remains = {
        "training checkpoint": tracked_home.checkpoints / PRESET / "grpo",
        "unfinished stage": tracked_home.work / "abandoned",
        "champion's data record": tracked_home.past / "d",
        "partial result": tracked_home.artifacts / "policy" / ".damaged-abc",
    }
    for path in remains.values():
        path.mkdir(parents=True)
        (path / "file").write_text("x")
    lived = tracked_home.work / "reproduce-x"
    (lived / "leases").mkdir(parents=True)
    with hold_lease(Home(lived), experiment="x"):
        young = counts(look(tracked_home, keep_days=KEEP))
        gone = counts(collect(tracked_home, keep_days=-1))
        assert (set(young) & set(remains), set(gone) & set(remains)) == (set(), set(remains))
        assert lived.is_dir()
    assert not any(path.exists() for path in remains.values())


def test_a_damaged_audit_log_stops_a_collection_before_anything_goes(tracked_home: Home, refs: list[Refs]) -> None:
    (tracked_home.root / "audit.jsonl").write_text("no entry\n")
    with pytest.raises(StorageError):
        collect(tracked_home, keep_days=KEEP)
    assert there(tracked_home, refs[0]) == set(refs[0])


def test_versions_of_another_state_directory_are_not_ours_to_clean(tracked_home: Home, refs: list[Refs]) -> None:
    shutil.rmtree(tracked_home.cache / "grpo")
    gone = collect(tracked_home, keep_days=-1)
    assert "weights of a version" not in counts(gone)


def test_a_lineage_of_many_generations_is_cut(tracked_home: Home, refs: list[Refs]) -> None:
    """Forty policies, each trained from the one before."""
    (policy,) = (each for each in read_records(tracked_home) if each.ref.sha256 == refs[0]["grpo"].sha256)
    made = [
        replace(
            policy,
            key=f"key {number}",
            ref=replace(policy.ref, sha256=f"{number:064x}"),
            ingredients={**policy.ingredients, "inputs": {"grpo": f"{number - 1:064x}"}},
        )
        for number in range(1, 41)
    ]
    root = ancestry(tracked_home, made, made[-1])
    assert 20 < [node.stage for node in nodes(root)].count("grpo") < 30
    assert "earlier results:" in tree_lines(root)[-1]


def test_of_the_shared_store_goes_what_this_home_knows_and_does_not_need(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedStore(str(tmp_path / "shared"))
    monkeypatch.setenv("RLCORE_STORE", shared.url)
    made = [retrain(tracked_home, day) for day in (1, 2, 3)]
    shared.folder.write(f"{OTHER}/{MANIFEST}", b"{}")
    assert look(tracked_home, keep_days=KEEP).gone == {}
    for path in (tmp_path / "shared").rglob("*"):
        os.utime(path, (1.0, 1.0))
    age(tracked_home, OLD)
    before = shared.folder.sizes("")
    seen = counts(look(tracked_home, keep_days=KEEP))
    assert shared.folder.sizes("") == before
    assert counts(collect(tracked_home, keep_days=KEEP)) == seen
    gone = {path.rpartition("/")[0] for path in before.keys() - shared.folder.sizes("").keys()}
    assert {made[0][name].uri for name in ("grpo", "evaluate_grpo", "promote")} <= gone
    assert gone.isdisjoint({OTHER, *(ref.uri for refs in made[1:] for ref in refs.values())})
    assert [path for path in gone if path.startswith("records")] == []
    assert seen["shared result: policy"] == seen["result: policy"] == 1
