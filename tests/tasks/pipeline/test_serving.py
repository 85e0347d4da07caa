"""A registered model behind an address: by transformers, by MLflow, and what vLLM is asked to do."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from tasks.home.settings import Home
from tasks.pipeline.delivery import Registered
from tasks.pipeline.serving import serve_model, vllm_command
from tasks.tracking.registry import find_number, set_alias
from tasks.tracking.runs import open_tracker
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, our_answers
from tests.http_servers import SERVE, answers, ask, free_port, running
from tests.registered import register_toy


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openai") is None, reason="the extra `serve` is not installed")
def test_an_openai_client_gets_the_greedy_answers_of_the_evaluation(tracked_home: Home, tmp_path: Path) -> None:
    ref, port = register_toy(tracked_home), free_port()
    expected = [text for _, text in our_answers(tracked_home.root / ref.uri / "model")]
    with running([sys.executable, "-c", SERVE, str(port), "transformers", ""], port, "/health", tmp_path / "log"):
        settings = {"model": "toy-sft", "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        found = [ask(url, settings | {"messages": conversation(each)}) for each in QUESTIONS]
        assert answers(f"http://127.0.0.1:{port}/v1/models")
        drawn = {
            ask(url, settings | {"messages": conversation("1"), "temperature": 1.5})["choices"][0]["message"]["content"]
            for _ in range(5)
        }
        assert len(drawn) > 1  # a temperature is one
    assert [each["choices"][0]["message"]["content"] for each in found] == expected
    assert not answers(f"http://127.0.0.1:{port}/health")
    assert not list(tracked_home.work.glob("tmp*"))


@pytest.mark.slow
def test_mlflows_own_server_gives_the_greedy_answers_of_the_evaluation(tracked_home: Home, tmp_path: Path) -> None:
    ref, port = register_toy(tracked_home), free_port()
    tracker = open_tracker(tracked_home)
    version = find_number(tracker, "toy-sft", "1")
    assert version is not None
    set_alias(tracker, version, "champion")
    command = [*(sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", "models:/toy-sft@champion")]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    with running(command, port, "/ping", tmp_path / "log"):
        question = {"messages": conversation(QUESTIONS[0]), "max_tokens": MAX_NEW_TOKENS}
        (answer,) = ask(f"http://127.0.0.1:{port}/invocations", question)
    (_, text), *_ = our_answers(tracked_home.root / ref.uri / "model", QUESTIONS[:1])
    assert answer["choices"][0]["message"]["content"] == text.lstrip()


@pytest.mark.slow
def test_a_model_that_a_server_keeps_is_loaded_through_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    port, store = free_port(), tmp_path / "server"
    store.mkdir()
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    ]
    command += ["--backend-store-uri", f"sqlite:///{store}/mlflow.db", "--artifacts-destination", store.as_uri()]
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    with running(command, port, "/health", tmp_path / "log"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        ref = register_toy(home)
        chat = mlflow.transformers.load_model("models:/toy-sft/1")
        found = chat(conversation(QUESTIONS[0]), do_sample=False, max_new_tokens=MAX_NEW_TOKENS, return_full_text=False)
    ((_, text),) = our_answers(home.root / ref.uri / "model", QUESTIONS[:1])
    assert found[0]["generated_text"] == text
    assert not list(home.work.glob("tmp*"))


def test_vllm_is_given_the_checkpoint_under_the_models_name_with_its_generation_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    registered = Registered(tags={"name": "toy-sft", "version": "1"}, folder=tmp_path)
    command = vllm_command("python", registered, host="0.0.0.0", port=8001, eager=False)
    pairs = dict(zip(command[3::2], command[4::2], strict=True))
    assert pairs == {
        "--model": str(tmp_path),
        "--served-model-name": "toy-sft",
        "--host": "0.0.0.0",
        "--port": "8001",
        "--generation-config": "auto",
        "--dtype": "float32",
    }
    assert vllm_command("python", registered, host="0.0.0.0", port=8001, eager=True) == [*command, "--enforce-eager"]


def test_an_engine_that_is_not_here_is_refused_with_the_way_to_get_it(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="make engine"):
        serve_model(tracked_home, "toy-sft/1", engine="vllm")
