"""Parameters: each is read, ignored or refused, and a refusal names it and the way out."""

from __future__ import annotations

from typing import Any

import pytest
from rlcore.agents.wire import chat, parameters, responses
from rlcore.agents.wire.responses import Stored, read_responses

from rlcore.openai_api.errors import ApiError

CHAT = {"messages": [{"role": "user", "content": "?"}]}
WRONG = {"function": {"name": "f", "arguments": "3"}}
PICTURE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"model": 7}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": PICTURE}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [WRONG]}]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_what_cannot_be_served_in_chat_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat.read_chat(CHAT | fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"input": [{"type": "computer_call_output", "call_id": "1"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ],
)
def test_what_cannot_be_served_in_responses_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_responses({"input": "?"} | fields, Stored())
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 0.1, "seed": 1, "frequency_penalty": 2, "top_logprobs": None},
        {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False},
    ],
)
def test_what_the_run_decides_or_has_no_effect_is_accepted(fields: dict[str, Any]) -> None:
    assert chat.read_chat(CHAT | fields).n == 1


def test_an_unknown_parameter_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    chat.read_chat(CHAT | {"next_year": 1, "second": [], "third": None})
    assert [record.getMessage() for record in caplog.records] == ["agent: ignored parameters=next_year, second"]


def test_a_parameter_is_in_one_table() -> None:
    tables = [parameters.DECIDED_BY_THE_RUN, parameters.WITHOUT_EFFECT, frozenset(parameters.REFUSED)]
    for read in (chat.READ, responses.READ):
        names = [name for table in (*tables, read) for name in table]
        assert len(names) == len(set(names))


def test_the_openai_clients_parameters_are_known() -> None:
    """A parameter that a new client adds is decided here, not by accident."""
    chats = pytest.importorskip("openai.types.chat.completion_create_params").CompletionCreateParamsBase
    answers = pytest.importorskip("openai.types.responses.response_create_params").ResponseCreateParamsBase
    known = parameters.DECIDED_BY_THE_RUN | parameters.WITHOUT_EFFECT | set(parameters.REFUSED)
    assert set(chats.__annotations__) - known - chat.READ == set()
    assert set(answers.__annotations__) - known - responses.READ == set()
