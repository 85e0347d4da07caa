"""Homes that are moved, cleaned, backed up, damaged, or of the previous release."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rlcore.flows.cli.app import main
from rlcore.tasks.store.artifacts import ArtifactStore
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.lineage import read_records
from tests.chaos.chain import run_killed
from tests.flows.conftest import ROOT, environment, flows_arguments, flows_command, run_flows, states_of
from tests.flows.warm import run_warm
from tests.restic import page
from tests.tasks.operations.daily import NAME, age, retrain
from tests.waiting import LONG, until

FIRST = ("promotion.min_accuracy=0.0", "promotion.max_truncated=1.0")
ASK = """
import warnings
warnings.simplefilter("ignore")
import mlflow
from rlcore.tasks.store.settings import configure_environment, find_home
configure_environment(find_home())
chat = mlflow.transformers.load_model("models:/tiny-grpo@champion")
print(repr(chat([{"role": "user", "content": "3+4"}], max_new_tokens=8, return_full_text=False)[0]["generated_text"]))
"""


@pytest.fixture
def moved(micro_home: Path, tmp_path: Path) -> Path:
    shutil.copytree(micro_home, tmp_path / "another place" / "home")
    return tmp_path / "another place" / "home"


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_a_run_in_a_copy_leaves_every_byte_of_the_original(micro_home: Path, moved: Path) -> None:
    before = digests(micro_home)
    done = run_flows("run", moved, "evaluation.num_problems=20")
    assert done.returncode == 0, done.stderr
    assert digests(micro_home) == before
    assert f"file locations in MLflow to {moved}" in done.stderr


@pytest.mark.slow
def test_a_moved_home_promotes_tells_the_lineage_and_loads_its_champion(micro_home: Path, moved: Path) -> None:
    aside = micro_home.with_name("aside")
    micro_home.rename(aside)
    try:
        promoted = run_flows("promote", moved, *FIRST)
        assert promoted.returncode == 0, promoted.stderr
        lineage = run_warm(["lineage", "tiny-grpo@champion"], environment(moved), ROOT)
        assert "import_sft" in lineage.stdout, lineage.stderr
        asked = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, env=environment(moved), cwd=ROOT, check=False
        )
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.strip().startswith("'")
        assert not micro_home.exists()
    finally:
        shutil.rmtree(micro_home, ignore_errors=True)
        aside.rename(micro_home)
    (card,) = [
        text
        for path in moved.glob("mlartifacts/tiny/models/*/artifacts/model_card.md")
        if "# `tiny-grpo`" in (text := path.read_text())
    ]
    assert "It became champion." in card
    assert "The whole evaluation on held-out problems:" in card
    assert "No decision yet" not in card


PLAN = "40:3"  # percent of the events that kill, and which


@pytest.fixture
def retained(tracked_home: Home) -> Home:
    """Old retrainings: two champions, and two that were refused, of which one is the challenger."""
    for day in (1, 2, 3, 4):
        retrain(tracked_home, day, is_better=day < 3)
    age(tracked_home, 100.0)
    return tracked_home


def whole(retained: Home) -> set[str]:
    store = ArtifactStore(retained.root)
    return {record.ref.sha256 for record in read_records(retained) if not store.errors(record.ref)}


def test_the_command_shows_what_would_go_and_removes_it_when_asked(retained: Home) -> None:
    before, env = whole(retained), environment(retained.root)
    shown = run_warm(["gc"], env, ROOT)
    assert shown.returncode == 0, shown.stderr
    assert "nothing was removed; to remove it: the same command with --delete" in shown.stdout
    assert whole(retained) == before
    done = run_warm(["gc", "--keep-days", "30", "--delete"], env, ROOT)
    assert done.returncode == 0, done.stderr
    assert "result: policy" in done.stdout
    assert len(whole(retained)) < len(before)
    lineage = run_warm(["lineage", f"{NAME}/3"], env, ROOT)
    assert "the artifact was cleaned on 20" in lineage.stdout
    again = run_warm(["gc"], env, ROOT)
    assert again.stdout.startswith("nothing that is older than 20")


def test_without_a_state_directory_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCORE_HOME", str(tmp_path / "none"))
    assert (main(["gc", "--delete"]), (tmp_path / "none").exists()) == (0, False)
    assert "nothing was run" in capsys.readouterr().out
    assert main(["gc", "--keep-days", "-1"]) == 2


@pytest.mark.slow  # ten kills of a rare command
def test_a_collection_that_is_killed_loses_nothing_and_the_next_one_finishes(retained: Home, tmp_path: Path) -> None:
    copy = Home(tmp_path / "copy")
    shutil.copytree(retained.root, copy.root, copy_function=shutil.copy2)
    undisturbed = run_warm(["gc", "--delete"], environment(copy.root), ROOT)
    assert undisturbed.returncode == 0, undisturbed.stderr
    kills = run_killed(["gc", "--delete"], retained.root, tmp_path / "events", plan=PLAN)
    assert kills >= 10
    assert whole(retained) == whole(copy)
    assert names(retained) == names(copy)


def names(retained: Home) -> set[str]:
    """The files of a state directory, but for databases and the log of what each collection was about to remove."""
    others = ("mlflow.db", "audit", "versions")
    return {
        path.relative_to(retained.root).as_posix()
        for path in retained.root.rglob("*")
        if not path.name.startswith(others)
    }


MODEL = "tiny-grpo/1"


@pytest.mark.slow
def test_a_backup_during_a_run_is_whole_and_a_flipped_bit_is_found(micro_home: Path, tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "elsewhere" / "home"
    shutil.copytree(micro_home, home)
    (tmp_path / "user").mkdir()
    commands = page(tmp_path / "user", environment(home))
    commands.begin(home)
    before = set(home.glob("cache/*/*.json"))
    run = subprocess.Popen(
        flows_command("run", "seed=7"), env=environment(home), cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: run.poll() is not None or set(home.glob("cache/*/*.json")) - before, "a result of the run")
        commands.back_up(home)
        assert run.poll() is None, "the run has ended before the backup"
    finally:
        run.kill()
        run.wait(LONG)
    home.rename(tmp_path / "lost")
    restored = commands.restore(other)
    assert f"restored {other / 'mlflow.db'} from {other / 'dumps'}" in restored
    env = environment(other)
    planned = run_warm(flows_arguments("plan"), env, ROOT)
    assert set(states_of(planned.stdout).values()) == {"cached"}, planned.stdout + planned.stderr
    assert run_warm(["audit", "verify"], env, ROOT).returncode == 0
    done = run_warm(["reproduce", MODEL], env, ROOT)
    assert "every file of the model is the same" in done.stdout, done.stdout + done.stderr
    commands.back_up(other)  # the restored home goes on
    commands.flip_bit()
    with pytest.raises(AssertionError, match=r"Fatal: repository contains errors"):
        commands.check(other)


DAMAGES = ("chat_template.jinja is damaged", "model.safetensors is damaged", "tokenizer.json is damaged")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def retype(path: Path) -> None:
    """Change the text of a file, as somebody would in an editor: in a new file of the same name."""
    text = path.read_text(encoding="utf-8")
    path.unlink()
    path.write_text(text + " ", encoding="utf-8")


def damage(damaged: Path, *, of: str, everywhere: bool) -> None:
    """One bit of the weights, the tokenizer and the template of a registered model; ``everywhere``: its artifact's."""
    (registered,) = [
        path.parent
        for path in damaged.glob("mlartifacts/tiny/models/*/artifacts/MANIFEST.json")
        if json.loads((path.parent / "MANIFEST.json").read_text())["sha256"] == sha256(damaged, of)
    ]
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        file = registered / "model" / name
        if not everywhere:
            shutil.copy(file, file.with_suffix(".own"))
            file.with_suffix(".own").rename(file)
        if name == "model.safetensors":
            flip(file)
        else:
            retype(file)


def sha256(damaged: Path, stage: str) -> str:
    (path,) = (damaged / "cache" / stage).glob("*.json")
    return str(json.loads(path.read_text())["ref"]["sha256"])


@pytest.fixture
def damaged(micro_home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(micro_home, tmp_path / "home"))


def refused(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    output = " ".join(done.stderr.split())
    assert "is not what was registered" in output, done.stderr
    assert all(each in output for each in DAMAGES), done.stderr


@pytest.mark.parametrize("command", [("export", "tiny-grpo/1", "out"), ("serve", "tiny-grpo/1")])
def test_a_damaged_model_is_neither_exported_nor_served(
    damaged: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    damage(damaged, of="grpo", everywhere=True)
    shutil.rmtree(next(damaged.glob("artifacts/policy/" + sha256(damaged, "grpo"))))
    refused(run_warm(command, environment(damaged), tmp_path))
    assert not (tmp_path / "out").exists()


def test_no_run_begins_with_a_damaged_model(damaged: Path) -> None:
    damage(damaged, of="sft", everywhere=False)
    base = ("model.source=registry", "model.path=models:/tiny-sft/1")
    refused(run_flows("run", damaged, *base))
    refused(run_flows("run", damaged, "stages.ppo.init_from=models:/tiny-sft/1"))


def test_a_damaged_champion_is_not_judged(damaged: Path) -> None:
    first = run_flows("promote", damaged, "promotion.challenger=grpo", "promotion.min_accuracy=0.0")
    assert first.returncode == 0, first.stderr
    damage(damaged, of="grpo", everywhere=False)
    refused(run_flows("promote", damaged, "promotion.challenger=grpo", "promotion.min_accuracy=0.0"))


FILE = Path(__file__).with_name("home-0.7.0.tar.xz")


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(FILE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "home"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "tiny-grpo/1"], "tiny-grpo"),
        (["lineage", "tiny-grpo/1"], "import_sft"),
        (["plan", "tiny"], "first run of this preset"),
        (["gc"], "can go"),
        (["audit", "verify"], "0 entries, no errors"),
        (["upgrade"], "every database is of the installed versions"),
    ],
)
def test_a_home_of_the_previous_release_is_read(previous: Path, arguments: list[str], expected: str) -> None:
    done = run_warm(arguments, environment(previous), ROOT)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_file_is_small() -> None:
    assert FILE.stat().st_size <= 200_000
