"""``rlcore export`` and ``rlcore serve``: a folder, a repository on a hub of this machine, and settings of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from rlcore.flows.cli.app import main
from rlcore.openai_api.guard import Limits
from rlcore.tasks.store.settings import Home
from tests.hub_server import TOKEN, Hub, hub_server
from tests.registered import register_toy


def test_an_exported_model_is_a_folder_that_transformers_loads_in_the_dtype_that_was_asked_for(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register_toy(tracked_home)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["export", "toy-sft/1", "out", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"toy-sft/1 is in {tmp_path / 'out'}\n"
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype) == "torch.bfloat16"

    assert main(["export", "toy-sft/1", "out"]) == 1  # what is there stays
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("export", "toy-sft/1"), 2, "FOLDER"),
        (("export", "toy-sft/1", "out", "--dtype", "int4"), 2, "bfloat16"),
        (("export", "toy-sft@champion", "out"), 1, "no registered model 'toy-sft@champion'"),
        (("serve", "toy-sft@champion"), 1, "no registered model 'toy-sft@champion'"),
        (("serve", "toy-sft/1", "--engine", "llama"), 2, "native"),
        (("serve", "toy-sft/1", "--timeout", "0"), 2, "--timeout"),
        (("serve", "toy-sft/1", "--max-concurrent", "0"), 2, "--max-concurrent"),
    ],
)
def test_what_cannot_be_delivered_is_one_error_and_no_folder(
    tracked_home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert error.count("error (") == 1
    assert text in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (
            (),
            {"host": "127.0.0.1", "port": 8000, "engine": "auto", "python": "", "allow_host": (), "limits": Limits()},
        ),
        (
            (
                *("--host", "0.0.0.0", "--port", "8001", "--engine", "vllm", "--python", "/env/bin/python"),
                *("--allow-host", "a.example", "--allow-host", "10.0.0.7", "--timeout", "9.5", "--max-concurrent", "3"),
            ),
            {
                "host": "0.0.0.0",
                "port": 8001,
                "engine": "vllm",
                "python": "/env/bin/python",
                "allow_host": ("a.example", "10.0.0.7"),
                "limits": Limits(concurrent=3, seconds=9.5),
            },
        ),
    ],
)
def test_a_server_gets_model_address_and_engine_and_its_exit_code_is_the_commands(
    home: Home, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], settings: dict[str, Any]
) -> None:
    asked = []

    def serve_model(home: Home, model: str, **given: Any) -> int:
        asked.append((home, model, given))
        return 143

    monkeypatch.setattr("rlcore.tasks.serving.serve.serve_model", serve_model)
    assert main(["serve", "toy-sft/1", *options]) == 143
    assert asked == [(home, "toy-sft/1", settings)]


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
