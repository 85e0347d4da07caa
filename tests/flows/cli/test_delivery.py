"""``rlcore export`` and ``rlcore serve``: a real folder of a registered model; of a server, what it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rlcore.flows.cli.app import main
from rlcore.openai_api.guard import Limits
from rlcore.tasks.store.settings import Home
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
