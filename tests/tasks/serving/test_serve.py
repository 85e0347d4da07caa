"""rlcore serve: the model, the engine and the command of vLLM; and exports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from transformers import AutoTokenizer

from rlcore.errors import ConfigError, ModelError, SamplingError, ServiceError, StorageError
from rlcore.models import saving
from rlcore.openai_api.guard import Receive, Scope, Send
from rlcore.openai_api.replies import Piece, TokenLogprob
from rlcore.openai_api.requests import Options
from rlcore.openai_api.server import ServerThread, listen
from rlcore.tasks.serving.engine import Job, VllmEngine
from rlcore.tasks.serving.export import RegisteredVersion, export_model, open_registered
from rlcore.tasks.serving.serve import TOKEN, serve_model, vllm_command
from rlcore.tasks.store.settings import Home, configure_environment, find_home
from rlcore.tasks.tracking.registry import find_number, set_alias
from rlcore.tasks.tracking.runs import open_tracker
from rlcore.text.tokenization import ChatTokenizer
from tests.chat_models import MAX_NEW_TOKENS, QUESTIONS, conversation, our_answers
from tests.flows.conftest import environment
from tests.flows.warm import run_warm
from tests.http_servers import SERVE, answers, ask, free_port, running
from tests.registered import register_toy
from tests.waiting import LONG


def test_a_server_with_a_token_answers_greedily(
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
def test_a_token_must_fit_into_a_header(tracked_home: Home, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ConfigError, match="header") as refused:
        serve_model(tracked_home, "toy-sft/1", engine="native")
    assert refused.value.where == TOKEN


def test_a_taken_port_is_an_error_before_loading(tracked_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_model_is_loaded_through_a_server(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_missing_engine_is_an_error(tracked_home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"make .*engine"):
        serve_model(tracked_home, "toy-sft/1", engine="vllm")


KEY = "of-the-engine"
OPTIONS = Options(model="toy", n=2, temperature=0.5, seed=2**63 - 1, stop=("x",), top_logprobs=1)
JOB = Job(prompt_ids=(5, 6), max_tokens=3, options=OPTIONS, place=1)
LOGPROBS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}], "text_offset": [0]}
EVENTS = (
    {"choices": [{"index": 1, "text": "a", "token_ids": [9], "logprobs": LOGPROBS, "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "é\u2028", "token_ids": [7, 8], "logprobs": None, "finish_reason": "length"}]},
    {"choices": [{"index": 1, "text": "", "token_ids": [1], "logprobs": None, "finish_reason": "stop"}]},
)
PIECES = [
    Piece(index=1, text="a", num_tokens=1, logprobs=(TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.0))),)),
    Piece(index=0, text="é\u2028", num_tokens=2, finish="length"),
    Piece(index=1, text="", num_tokens=1, finish="stop"),
]


@dataclass
class Stub:
    """A server like vLLM's: what it was asked, and what it answers."""

    events: tuple[Mapping[str, Any], ...] = EVENTS
    status: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        assert (request.headers["authorization"], scope["path"]) == (f"Bearer {KEY}", "/v1/completions")
        self.asked.append(await request.json())
        lines = [f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in self.events]
        body = "".join([*lines, "data: [DONE]\n\n"]) if self.status == 200 else '{"error": "no such thing"}'
        await Response(body, self.status)(scope, receive, send)


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    server = ServerThread(made)
    made.url = f"http://127.0.0.1:{server.start()}"
    yield made
    server.stop()


def vllm_ask(url: str) -> tuple[list[Piece] | SamplingError, bool]:
    """The pieces of :data:`JOB` or the error, and whether the engine counts as healthy then."""

    async def run() -> tuple[list[Piece] | SamplingError, bool]:
        engine = VllmEngine(url, KEY, "toy", (1, 4))
        try:
            return [piece async for piece in engine.generate(JOB)], engine.is_healthy()
        except SamplingError as error:
            return error, engine.is_healthy()
        finally:
            await engine.close()

    return asyncio.run(run())


def test_a_job_goes_as_token_ids_with_a_whole_distribution_and_its_pieces_come_back(stub: Stub) -> None:
    assert vllm_ask(stub.url) == (PIECES, True)
    (question,) = stub.asked
    assert question["prompt"] == [5, 6]
    assert (question["top_p"], question["top_k"], question["min_p"], question["repetition_penalty"]) == (1, 0, 0, 1)
    assert (question["n"], question["max_tokens"], question["temperature"], question["logprobs"]) == (2, 3, 0.5, 1)
    assert (question["stop"], question["stop_token_ids"], question["model"]) == (["x"], [1, 4], "toy")
    assert 0 <= question["seed"] < 2**63


def test_what_the_server_refuses_or_tells_in_its_stream_is_an_error(stub: Stub) -> None:
    stub.status = 400
    error, is_healthy = vllm_ask(stub.url)
    assert is_healthy and isinstance(error, SamplingError) and "no such thing" in error.what
    stub.status, stub.events = 200, (EVENTS[0], {"error": {"message": "out of memory"}})
    error, _ = vllm_ask(stub.url)
    assert isinstance(error, SamplingError) and "out of memory" in error.what


def test_a_server_that_is_gone_is_an_error_and_no_longer_healthy() -> None:
    with listen("127.0.0.1", 0) as at:
        port = at.getsockname()[1]
    error, is_healthy = vllm_ask(f"http://127.0.0.1:{port}")
    assert isinstance(error, SamplingError) and not is_healthy
    assert "does not answer" in error.what


def test_a_registered_model_is_exported_with_its_card(tracked_home: Home, tmp_path: Path) -> None:
    ref = register_toy(tracked_home)
    folder = export_model(tracked_home, "toy-sft/1", tmp_path / "out")
    assert our_answers(folder) == our_answers(tracked_home.root / ref.uri / "model")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and "\nlicense: " in card.partition("\n---\n")[0]
    assert "No decision yet" in card
    assert "`my\\|sums.jsonl` | 9 | 3" in card
    assert "sft/loss" in card


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_missing_files_come_from_the_registry(tracked_home: Home, tmp_path: Path, damage: str) -> None:
    ref = register_toy(tracked_home)
    expected = our_answers(tracked_home.root / ref.uri / "model")
    weights = tracked_home.root / ref.uri / "model" / "model.safetensors"
    weights.unlink()  # the bytes stay, under the name that the registry has for them
    if damage == "changed":
        weights.write_bytes(b"")
    with open_registered(tracked_home, "toy-sft/1") as registered:
        assert our_answers(registered.folder) == expected
    assert not registered.folder.exists()


def export_and_die(arguments: Sequence[str]) -> int:
    """Export a model and die when its files are written to the disk: for the warm process."""
    saving.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    configure_environment(find_home())
    export_model(find_home(), "toy-sft/1", Path(arguments[0]))
    return 0


@pytest.mark.slow  # the process of the kill imports for seconds; what a kill leaves is in store/test_storage.py
def test_the_next_command_removes_what_a_killed_export_left(tracked_home: Home, tmp_path: Path) -> None:
    ref = register_toy(tracked_home)
    (tracked_home.root / ref.uri / "model" / "model.safetensors").unlink()  # so that files come from the registry
    call = f"{__name__}:export_and_die"
    done = run_warm([str(tmp_path / "out")], environment(tracked_home.root), tmp_path, call=call)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.glob("*out*")] != []
    assert list(tracked_home.work.glob(".scratch-*")) != []
    configure_environment(tracked_home)
    assert list(tmp_path.glob("*out*")) == []
    assert list(tracked_home.work.iterdir()) == []


def test_a_copied_home_exports_its_own_model(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = register_toy(tracked_home)
    expected = our_answers(tracked_home.root / ref.uri / "model")
    copy = Home(tmp_path / "elsewhere" / "home")
    shutil.copytree(tracked_home.root, copy.root)
    shutil.rmtree(copy.artifacts / "checkpoint", ignore_errors=True)
    shutil.rmtree(copy.root / ref.uri, ignore_errors=True)
    shutil.rmtree(tracked_home.mlartifacts)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", copy.tracking_uri)
    monkeypatch.setenv("RLCORE_HOME", str(copy.root))
    assert our_answers(export_model(copy, "toy-sft/1", tmp_path / "out")) == expected


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tracked_home: Home, tmp_path: Path) -> None:
    register_toy(tracked_home)
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="no registered model 'toy-sft@champion'"):
        export_model(tracked_home, "toy-sft@champion", out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not empty"):
        export_model(tracked_home, "toy-sft/1", out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_model_name_with_a_dot_works_from_registration_to_export(tracked_home: Home, tmp_path: Path) -> None:
    register_toy(tracked_home, "toy-v1.2")
    export_model(tracked_home, "models:/toy-v1.2-sft/1", tmp_path / "out")
    assert "`toy-v1.2-sft`" in (tmp_path / "out" / "README.md").read_text()
