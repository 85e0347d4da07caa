"""A registered model behind an address: by the built-in engine, by MLflow, and what vLLM is asked to do."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlcore.errors import ConfigError, ServiceError
from rlcore.openai_api.server import listen
from rlcore.tasks.promotion.export import RegisteredVersion
from rlcore.tasks.serving.serve import TOKEN, serve_model, vllm_command
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.registry import find_number, set_alias
from rlcore.tasks.tracking.runs import open_tracker
from rlcore.text.tokenization import ChatTokenizer
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, our_answers
from tests.http_servers import SERVE, answers, ask, free_port, running
from tests.registered import register_toy
from tests.waiting import LONG


def test_a_server_asks_for_the_token_that_it_prints_and_answers_as_the_evaluation_does(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, port, log = register_toy(tracked_home), free_port(), tmp_path / "log"
    checkpoint = tracked_home.root / ref.uri / "model"
    monkeypatch.delenv(TOKEN, raising=False)
    with running([sys.executable, "-c", SERVE, str(port), "native", ""], port, "/health", log) as server:
        address, token = re.findall(r"^(?:.+: |token: )(\S+)$", log.read_text(), re.MULTILINE)
        assert address == f"http://127.0.0.1:{port}/v1"
        assert len(token) >= 32
        assert not answers(f"{address}/models")
        assert not answers(f"{address}/models", token[:-1])
        assert answers(f"{address}/models", token)
        asked = {"model": "toy-sft", "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
        found = [
            ask(f"{address}/chat/completions", asked | {"messages": conversation(each)}, token) for each in QUESTIONS
        ]
        server.terminate()
        assert server.wait(LONG) == 143  # as shells say it
    tokenizer = ChatTokenizer.load(checkpoint)
    expected = [ids[:-1] if ids[-1] in tokenizer.eos_ids else ids for ids, _ in our_answers(checkpoint)]
    assert [each["choices"][0]["message"]["content"] for each in found] == list(map(tokenizer.decode, expected))
    assert not list(tracked_home.work.glob("tmp*"))
    assert token not in " ".join(log.read_text().splitlines()[2:])


@pytest.mark.parametrize("token", ["", " ", "two\nlines", "a\u00e9", " a"])
def test_a_token_that_no_header_can_hold_is_refused(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ConfigError, match="header") as refused:
        serve_model(tracked_home, "toy-sft/1", engine="native")
    assert refused.value.where == TOKEN


def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_toy(tracked_home)
    monkeypatch.setattr("rlcore.tasks.serving.serve.load_policy", lambda *_, **__: pytest.fail("it was loaded"))
    with listen("127.0.0.1", 0) as taken, pytest.raises(ServiceError, match="nothing can listen"):
        serve_model(tracked_home, "toy-sft/1", port=taken.getsockname()[1], engine="native")


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


def test_vllm_is_given_the_checkpoint_under_the_models_name_at_a_loopback_port(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    registered = RegisteredVersion(tags={"name": "toy-sft", "version": "1"}, folder=tmp_path)
    command = vllm_command("python", registered, port=8001, eager=False)
    assert command[-1] == "--disable-uvicorn-access-log"
    pairs = dict(zip(command[3:-1:2], command[4:-1:2], strict=True))
    assert pairs == {
        "--model": str(tmp_path),
        "--served-model-name": "toy-sft",
        "--host": "127.0.0.1",
        "--port": "8001",
        "--generation-config": "vllm",
        "--dtype": "float32",
    }
    on_cpu = vllm_command("python", registered, port=8001, eager=True)
    share = on_cpu.index("--gpu-memory-utilization")
    assert [*on_cpu[:share], *on_cpu[share + 2 :]] == [*command, "--enforce-eager", "--no-enable-chunked-prefill"]
    assert 0.0 < float(on_cpu[share + 1]) <= 0.5  # of memory that others use too


def test_an_engine_that_is_not_here_is_refused_with_the_way_to_get_it(
    tracked_home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"make .*engine"):
        serve_model(tracked_home, "toy-sft/1", engine="vllm")
