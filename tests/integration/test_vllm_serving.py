"""A registered model and its exported folder behind vLLM's own server: the greedy answers of the evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlcore.tasks.promotion.export import export_model
from rlcore.tasks.serving.serve import TOKEN
from rlcore.tasks.store.settings import Home
from rlcore.text.tokenization import ChatTokenizer
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, our_answers
from tests.http_servers import SERVE, answers, ask, free_port, running
from tests.integration.vllm_runs import PYTHON
from tests.registered import register_toy

pytestmark = pytest.mark.engine


def texts_of(port: int, model: str, token: str = "") -> list[str]:
    settings = {"model": model, "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    found = [ask(url, settings | {"messages": conversation(each)}, token) for each in QUESTIONS]
    return [each["choices"][0]["message"]["content"] for each in found]


def expected_of(checkpoint: Path) -> list[str]:
    """The evaluation's answers without the token that ends each: every third token of the toy does, and has a text."""
    tokenizer = ChatTokenizer.load(checkpoint)
    ends = tokenizer.eos_ids
    return [tokenizer.decode(ids[:-1] if ids[-1] in ends else ids) for ids, _ in our_answers(checkpoint)]


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def test_a_registered_model_that_vllm_serves_answers_as_the_evaluation_does(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, port = register_toy(tracked_home), free_port()
    monkeypatch.setenv(TOKEN, "a-token")
    with running([sys.executable, "-c", SERVE, str(port), "vllm", PYTHON], port, "/health", tmp_path / "log"):
        found = texts_of(port, "toy-sft", "a-token")
        assert not answers(f"http://127.0.0.1:{port}/v1/models")
    assert found == expected_of(tracked_home.root / ref.uri / "model")


def test_an_exported_folder_is_all_that_vllm_needs(tracked_home: Home, tmp_path: Path) -> None:
    register_toy(tracked_home)
    folder, port = export_model(tracked_home, "toy-sft/1", tmp_path / "out"), free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32"]  # else it rounds, and near ties of a random model flip
    with running(command, port, "/health", tmp_path / "log"):
        found = texts_of(port, str(folder))
    assert found == expected_of(folder)
