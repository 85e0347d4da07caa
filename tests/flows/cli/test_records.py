"""A person's rows in a run's state directory: found, erased to the last byte, kept out, and documented."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlcore.tasks.pipeline.leases import hold_lease
from rlcore.tasks.store.audit_log import read_entries
from rlcore.tasks.store.settings import Home
from tests.chaos.chain import run_killed
from tests.flows.conftest import ROOT, environment
from tests.flows.retraining import NAME, SMALL
from tests.flows.warm import run_warm

PERSON = "Zyxwyr Quennell 5550199 asks 15+1"  # of whom no byte may be left
HELD_OUT = "Zyxwyr Quennell 5550199 asks 16+1"
REJECTED = "20+2"  # a prompt whose answer is about the person, and too long
WORD = b"quennell"
OTHERS = 12


def write_files(folder: Path) -> tuple[str, ...]:
    """Rows of the person among others: for training, held out, and one that the gate rejects; the overrides."""
    folder.mkdir()
    asked = {f"{number}+1": "train" if number % 2 else "eval" for number in range(20, 20 + 2 * OTHERS)}
    asked |= {PERSON: "train", HELD_OUT: "eval"}
    overrides = list[str]()
    for name, columns in _COLUMNS.items():
        rows = [columns(question) | _common(question, split) for question, split in asked.items()]
        if name == "demonstrations":
            rows.append(columns(REJECTED, completion=f"{PERSON} " * 20) | _common(REJECTED, "train"))
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sizes = ("num_train=13", "num_eval=13", "max_quarantined=0.1", f"adapter={name}", f"path={path}")
        overrides += [f"data.{name}.{size}" for size in sizes]
    return (
        *SMALL,
        *overrides,
        "data.demonstrations.options={}",
        "stages.grpo.num_iterations=2",
        "evaluation.num_problems=13",
    )


def _common(question: str, split: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}], "split": split}


_COLUMNS: dict[str, Callable[..., dict[str, object]]] = {
    "prompts": lambda question: {"prompt_id": question, "reference": "7", "task": "sevens"},
    "demonstrations": lambda question, completion="#### 7": {
        "demonstration_id": question, "completion": completion, "reference": "7", "task": "sevens"
    },
    "preferences": lambda question: {
        "pair_id": question, "set_id": question, "source": "test", "chosen": "#### 7", "rejected": "#### 3",
        "margin": 0.0, "probability": 1.0, "weight": 1.0,
    },
}  # fmt: skip


def command(home: Path, *arguments: str, fails: bool = False) -> str:
    done = run_warm(arguments, environment(home), ROOT)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def settings(overrides: tuple[str, ...]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def places(home: Path) -> list[str]:
    """The files of a state directory that have the person's name in any byte or in the text of a table."""
    files = [path for path in sorted(home.rglob("*")) if path.is_file()]
    return [path.relative_to(home).as_posix() for path in files if WORD in _content(path).lower()]


def _content(path: Path) -> bytes:
    return str(pq.read_table(path).to_pylist()).encode() if path.suffix == ".parquet" else path.read_bytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A finished run on the person's rows, and the overrides of its preset."""
    folder = tmp_path_factory.mktemp("erased")
    overrides = write_files(folder / "data")
    command(folder / "home", "retrain", "retrain", *settings(overrides))
    return folder / "home", overrides


@pytest.fixture
def home(made: tuple[Path, tuple[str, ...]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "home"))


@pytest.fixture
def request_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "request.jsonl"
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in (PERSON, HELD_OUT.upper(), REJECTED)))
    yield path
    assert path.is_file()  # it is the user's


def test_rows_are_found_in_snapshots_by_any_layout_and_with_the_models_that_descend(
    home: Path, request_file: Path, made: tuple[Path, tuple[str, ...]]
) -> None:
    shown = command(home, "rows", str(request_file))
    assert shown.count("train 1, held out 1, quarantined 0") == 3
    assert "in snapshots: 2 of 3 lines" in shown
    assert f"{NAME}/1" in shown
    source = home.parent / "as-in-the-source.jsonl"
    lines = (made[0].parent / "data" / "prompts.jsonl").read_text().splitlines()
    source.write_text("\n".join([*lines[-2:], json.dumps({"id": "20+1"})]))
    assert "in snapshots: 3 of 3 lines" in command(home, "rows", str(source))


def test_unknown_rows_and_lines_without_a_row_fail(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "request.jsonl"
    path.write_text('{"prompt": "nobody asked this"}\n')
    assert "in snapshots: 0 of 1 lines" in command(home, "rows", str(path), fails=True)
    path.write_text('{"prompt": "nobody asked this"}\n{"name": "Zyxwyr"}\n')
    assert "line 2 names no row" in command(home, "rows", str(path), fails=True)


def test_a_dry_run_lists_places_sources_and_models_and_changes_no_row(home: Path, request_file: Path) -> None:
    before = places(home)
    shown = command(home, "erase", str(request_file), "--reason", "request 17")
    assert places(home) == before
    assert "nothing was deleted" in shown
    assert "prompts.jsonl: lines 25, 26" in shown
    assert f"{NAME}/1" in shown
    assert "to train without them: rlcore run retrain" in shown
    assert not (home / "erased.jsonl").exists()


def test_an_erasure_leaves_no_byte_of_the_person_and_a_new_run_has_only_the_others(
    home: Path, request_file: Path, made: tuple[Path, tuple[str, ...]]
) -> None:
    assert len(places(home)) > 10
    shown = command(home, "erase", str(request_file), "--reason", "request 17", "--delete")
    assert places(home) == []
    assert "Found again by a second search\n\nNothing." in shown
    again = command(home, "retrain", "retrain", *settings(made[1]), fails=True)  # 12 pairs prove no reward model
    assert "drift: prompts: no column of 7 has moved" in again  # from the champion's record in MLflow
    assert places(home) == []
    reports = [json.loads(path.read_text()) for path in home.glob("artifacts/dataset/*/report.json")]
    new = [each for each in reports if "left out: erased on request" in each["reasons"]]
    assert sorted(each["reasons"]["left out: erased on request"] for each in new) == [2, 2, 3]
    assert {each["num_train"] for each in new} == {12}


def test_the_versions_name_the_erasure_and_can_still_be_loaded_and_compared(
    home: Path, request_file: Path, tmp_path: Path
) -> None:
    command(home, "erase", str(request_file), "--reason", "request 17", "--delete")
    assert "rows erased" in command(home, "lineage", f"{NAME}/1")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "21+1"}\n')
    assert f"{NAME}/1" in command(home, "rows", str(other))  # also without the tables that had this row
    command(home, "export", f"{NAME}/1", str(tmp_path / "exported"))


def test_a_repeated_erasure_changes_nothing_and_the_log_has_one_entry_without_text(
    home: Path, request_file: Path
) -> None:
    arguments = ("erase", str(request_file), "--reason", "request 17", "--delete")
    command(home, *arguments)
    (certificate,) = home.glob("erasures/*/certificate.json")
    before = certificate.read_text()
    command(home, *arguments)
    assert certificate.read_text() == before
    (entry,) = [each for each in read_entries(Home(home)) if each.action == "erase"]
    assert len(entry.details["prompts"]) == 3
    assert WORD not in json.dumps(entry.details).lower().encode()


def test_a_reason_that_quotes_the_person_is_refused_before_anything_is_deleted(home: Path, request_file: Path) -> None:
    before = places(home)
    shown = command(home, "erase", str(request_file), "--reason", f"on behalf of {PERSON}", "--delete", fails=True)
    assert "the reason quotes an erased row" in shown
    assert places(home) == before


def test_while_a_run_is_active_nothing_is_erased(home: Path, request_file: Path) -> None:
    before = places(home)
    with hold_lease(Home(home), experiment="nightly"):
        shown = command(home, "erase", str(request_file), "--reason", "request 17", "--delete", fails=True)
    assert "runs are active here: nightly" in shown
    assert places(home) == before


def test_a_killed_erasure_is_completed_by_its_repeat(home: Path, request_file: Path, tmp_path: Path) -> None:
    arguments = ("erase", str(request_file), "--reason", "request 17", "--delete")
    kills = run_killed(arguments, home, tmp_path / "ledger", plan="5:1")
    assert kills > 2
    assert places(home) == []
    (certificate,) = home.glob("erasures/*/certificate.json")
    document = json.loads(certificate.read_text())
    assert document["left"] == {}
    assert sum(place.startswith("artifacts/dataset/") for place in document["deleted"]) >= 6
    assert f"{NAME}/1" in document["models"]
    assert [each.action for each in read_entries(Home(home))].count("erase") == 1


def test_a_key_signs_the_certificate(home: Path, request_file: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    command(home, "erase", str(request_file), "--reason", "request 17", "--delete", "--key", str(key))
    (certificate,) = home.glob("erasures/*/certificate.json")
    check = ["ssh-keygen", "-Y", "check-novalidate", "-n", "rlcore", "-s", f"{certificate}.sig"]
    with certificate.open("rb") as content:
        subprocess.run(check, stdin=content, check=True, capture_output=True)
    with certificate.with_suffix(".md").open("rb") as other:
        assert subprocess.run(check, stdin=other, check=False, capture_output=True).returncode != 0
