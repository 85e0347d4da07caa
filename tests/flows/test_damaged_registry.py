"""A registered model whose files in MLflow are not those that were registered: refused wherever a model enters."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.flows.conftest import environment, run_flows
from tests.flows.warm import run_warm

DAMAGES = ("chat_template.jinja is damaged", "model.safetensors is damaged", "tokenizer.json is damaged")


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, under whatever other names it lies there."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def retype(path: Path) -> None:
    """Change the text of a file, as somebody would in an editor: in a new file of the same name."""
    text = path.read_text(encoding="utf-8")
    path.unlink()
    path.write_text(text + " ", encoding="utf-8")


def damage(home: Path, *, of: str, everywhere: bool) -> None:
    """One bit of the weights, the tokenizer and the template of a registered model; ``everywhere``: its artifact's."""
    (registered,) = [
        path.parent
        for path in home.glob("mlartifacts/tiny/models/*/artifacts/MANIFEST.json")
        if json.loads((path.parent / "MANIFEST.json").read_text())["sha256"] == sha256(home, of)
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


def sha256(home: Path, stage: str) -> str:
    (path,) = (home / "cache" / stage).glob("*.json")
    return str(json.loads(path.read_text())["ref"]["sha256"])


@pytest.fixture
def home(micro_home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(micro_home, tmp_path / "home"))


def refused(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert "is not what was registered" in said, done.stderr
    assert all(each in said for each in DAMAGES), done.stderr


@pytest.mark.parametrize("command", [("export", "tiny-grpo/1", "out"), ("serve", "tiny-grpo/1")])
def test_a_damaged_model_is_neither_exported_nor_served(home: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    damage(home, of="grpo", everywhere=True)
    shutil.rmtree(next(home.glob("artifacts/policy/" + sha256(home, "grpo"))))
    refused(run_warm(command, environment(home), tmp_path))
    assert not (tmp_path / "out").exists()


def test_no_run_begins_with_a_damaged_model(home: Path) -> None:
    damage(home, of="sft", everywhere=False)
    base = ("model.source=registry", "model.path=models:/tiny-sft/1")
    refused(run_flows("run", home, *base))
    refused(run_flows("run", home, "stages.ppo.init_from=models:/tiny-sft/1"))


def test_a_damaged_champion_is_not_judged(home: Path) -> None:
    first = run_flows("promote", home, "promotion.challenger=grpo", "promotion.min_accuracy=0.0")
    assert first.returncode == 0, first.stderr
    damage(home, of="grpo", everywhere=False)
    refused(run_flows("promote", home, "promotion.challenger=grpo", "promotion.min_accuracy=0.0"))
