"""``rlcore serve`` with the official client: what is supported, what is refused by name, and fifty clients at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from rlcore.tasks.store.settings import Home, configure_environment
from tests.http_servers import free_port, running
from tests.registered import register_toy
from tests.waiting import LONG

pytestmark = pytest.mark.slow

NAME, TOKEN, CLIENTS = "toy-sft/1", "a-token-of-fifty-clients", 50
UNSUPPORTED = {"tools": [{"type": "function"}], "response_format": {"type": "json_object"}, "top_p": 0.9, "foo": 1}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The official client of a model of 128 positions, served by the command."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    home = Home(folder / "home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "PREFECT_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("RLCORE_HOME", str(home.root))
        patch.setenv("RLCORE_SERVE_TOKEN", TOKEN)
        patch.setenv("OMP_NUM_THREADS", "1")
        configure_environment(home)
        register_toy(home)
        command = [sys.executable, "-m", "rlcore.flows", "serve", NAME, "--port", str(port), "--engine", "native"]
        url = f"http://127.0.0.1:{port}/v1"
        with (
            running(command, port, "/health", folder / "log"),
            openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=LONG) as made,
        ):
            yield made


def ask(client: openai.OpenAI, text: str = "3+4", **more: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=NAME, messages=messages, **more)  # type: ignore[call-overload]


def test_the_name_on_the_command_line_is_a_model_and_each_supported_parameter_counts(client: openai.OpenAI) -> None:
    found = ask(client, n=3, max_completion_tokens=5, seed=7, logprobs=True, top_logprobs=2)
    assert len(found.choices) == 3 and found.usage and found.usage.completion_tokens <= 15
    assert all(each.logprobs and each.logprobs.content for each in found.choices)
    assert found.choices == ask(client, n=3, max_completion_tokens=5, seed=7, logprobs=True, top_logprobs=2).choices
    stream = client.chat.completions.create(
        model="toy-sft", messages=[{"role": "user", "content": "3+4"}], n=3, max_tokens=5, seed=7, stream=True
    )
    texts = [""] * 3
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [each.message.content for each in found.choices]
    assert client.completions.create(model=NAME, prompt="3+", max_tokens=4, stop=["\x00"], seed=1).choices[0].text
    assert [each.id for each in client.models.list()] == ["toy-sft"]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_a_400_that_names_it(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as refused:
        ask(client, max_tokens=4, extra_body={name: UNSUPPORTED[name]})
    assert refused.value.param == name


def test_a_bad_role_and_a_prompt_of_nine_thousand_words_are_refused_at_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="roles"):
        client.chat.completions.create(model=NAME, messages=[{"role": "robot", "content": "x"}])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="positions") as refused:
        ask(client, "word " * 9000, max_tokens=4)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        ask(client, "word " * 300_000)
    assert large.value.status_code == 413


def test_fifty_clients_at_once_each_get_their_answer(client: openai.OpenAI) -> None:
    def one(number: int) -> openai.types.chat.ChatCompletion:
        return ask(client, f"{number}+1", max_tokens=24, seed=number)

    alone = [one(number) for number in range(3)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(one, range(CLIENTS)))
    assert all(each.choices[0].finish_reason in ("stop", "length") for each in found)
    prompts = [[each.usage and each.usage.prompt_tokens for each in some] for some in (alone, found[:3])]
    assert prompts[0] == prompts[1]
