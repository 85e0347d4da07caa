"""``rlcore export --push``: a repository with the folder and a card that hubs read, on a hub of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from rlcore.flows.cli.app import main
from rlcore.tasks.store.settings import Home
from tests.hub_server import TOKEN, Hub, hub_server
from tests.registered import register_toy


@pytest.fixture
def hub(tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    register_toy(tracked_home)
    monkeypatch.chdir(tmp_path)
    with hub_server() as found:
        # huggingface_hub reads HF_ENDPOINT and HF_HUB_DISABLE_XET when it is imported.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # in huggingface_hub
def test_a_push_makes_a_private_repository_that_holds_the_folder(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["export", "toy-sft/1", "out", "--push", "me/mine"]) == 0
    assert capsys.readouterr().out.endswith(f"uploaded: {hub.url}/me/mine/commit/{'a' * 40}\n")
    assert hub.private == {"me/mine": True}
    here = {str(file.relative_to("out")): file.read_bytes() for file in Path("out").rglob("*") if file.is_file()}
    assert hub.files["me/mine"] == here
    for name, content in hub.files["me/mine"].items():
        copy = tmp_path / "copy" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy").num_parameters() > 0

    assert main(["export", "toy-sft/1", "again", "--push", "me/mine", "--public"]) == 0  # into the one that exists
    assert hub.private == {"me/mine": True}
    assert main(["export", "toy-sft/1", "third", "--push", "me/other", "--public"]) == 0
    assert hub.private["me/other"] is False


def test_a_dry_run_writes_the_card_alone(hub: Hub) -> None:
    assert main(["export", "toy-sft/1", "out", "--push", "me/mine", "--dry-run"]) == 0
    assert [file.name for file in Path("out").iterdir()] == ["README.md"]
    assert hub.private == {}
    card = ModelCard.load(Path("out/README.md"))
    assert card.data.to_dict() == yaml.safe_load(Path("out/README.md").read_text().split("---")[1])
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "apache-2.0", "transformers", "text-generation",
    )  # fmt: skip
    assert 'pipeline("text-generation", "me/mine")' in card.text
    card.validate()  # asks the hub
    assert main(["export", "toy-sft/1", "out", "--push", "me/mine", "--dry-run"]) == 1  # a README.md stays


def test_what_cannot_be_uploaded_is_named_with_the_fix(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine", "me/mi ne", "me/a..b", "/mine"):
        for more in ([], ["--dry-run"]):
            assert main(["export", "toy-sft/1", "out", "--push", name, *more]) == 2
            assert "is no name of a repository" in capsys.readouterr().err
    assert main(["export", "toy-sft/1", "out", "--public"]) == 2
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["export", "toy-sft/1", "out", "--push", "me/mine"]) == 2
    assert "hf auth login" in capsys.readouterr().err
    assert not Path("out").exists()
    monkeypatch.undo()


def test_a_refused_token_leaves_the_folder_and_says_how_to_go_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert main(["export", "toy-sft/1", "out", "--push", "me/mine"]) == 1
    error = capsys.readouterr().err
    assert "401" in error and "HF_TOKEN" in error and "hf upload me/mine out" in error
    assert Path("out/README.md").exists()
