"""OpenAI's own client and agents of three frameworks, unchanged, against the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlcore.agents.gateway import Gateway
from rlcore.agents.session import Limits, Record, Session
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.rlcore.agents.engines import Gated
from tests.rlcore.agents.gateways import ADD, CALL, running, scripted
from tests.rlcore.environments.tool_templates import HERMES, with_template
from tests.waiting import until

openai = pytest.importorskip("openai")

TURNS = [f"<think>Add them.</think>\nI add.\n{CALL}", "It is 7."]

FLAT = {"type": "function", **ADD["function"]}


@contextmanager
def client(tokenizer: ChatTokenizer, prompt: Prompt, *, retries: int = 2) -> Iterator[tuple[Any, Gateway, Session]]:
    own = with_template(tokenizer, HERMES)
    with running(scripted(own, prompt.prompt_id, TURNS), own) as gateway:
        session = gateway.open(prompt, place=0, sample=0)
        with openai.OpenAI(base_url=gateway.url, api_key=session.key, max_retries=retries) as made:
            yield made, gateway, session


def test_a_chat_with_a_tool_is_one_sample(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        messages: list[Any] = [{"role": "user", "content": "3+4"}]
        first = made.chat.completions.create(model="gpt-5", messages=messages, tools=[ADD], temperature=0)
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert (message.content, message.reasoning_content, call.function.name) == ("I add.", "Add them.", "add")
        assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        second = made.chat.completions.create(model="gpt-5", messages=messages, tools=[ADD])
        rollout = gateway.close(session).rollout
    assert second.choices[0].message.content == "It is 7." and rollout is not None and len(rollout.turns) == 2


def test_a_streamed_chat_is_the_whole_one(tokenizer: ChatTokenizer, prompts: list[Prompt]) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "3+4"}], "tools": [ADD]}
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        whole = made.chat.completions.create(**fields)
        plain = gateway.close(session).rollout
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        with made.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
            found = stream.get_final_completion()
        assert gateway.close(session).rollout == plain
    one, other = (each.choices[0].message for each in (found, whole))
    assert (one.content, found.choices[0].finish_reason, found.usage) == (other.content, "tool_calls", whole.usage)
    calls = [
        [(call.id, call.function.name, call.function.arguments) for call in each.tool_calls] for each in (one, other)
    ]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_with_a_tool_are_one_sample(
    tokenizer: ChatTokenizer, prompts: list[Prompt], is_streamed: bool
) -> None:
    def respond(made: Any, **fields: Any) -> Any:
        if not is_streamed:
            return made.responses.create(model="m", tools=[FLAT], **fields)
        with made.responses.stream(model="m", tools=[FLAT], **fields) as stream:
            events = [event.type for event in stream]
            assert events[0] == "response.created" and events[-1] == "response.completed"
            return stream.get_final_response()

    with client(tokenizer, prompts[0]) as (made, gateway, session):
        first = respond(made, input="3+4", instructions="Be brief.")
        thought, message, call = first.output
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert (thought.content[0].text, message.content[0].text) == ("Add them.", "I add.")
        history = [{"role": "user", "content": "3+4"}, *(item.model_dump(exclude_none=True) for item in first.output)]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        second = respond(made, input=[*history, output], instructions="Be brief.")
        rollout = gateway.close(session).rollout
    assert second.output_text == "It is 7." and second.status == "completed"
    assert rollout is not None and rollout.branches == () and len(rollout.turns) == 2


def test_the_client_raises_its_own_errors_and_repeats_no_request(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    with client(tokenizer, prompts[0]) as (made, gateway, session):
        create, messages = made.chat.completions.create, [{"role": "user", "content": "3+4"}]
        with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
            create(model="m", messages=messages, logit_bias={"5": 1})
        with pytest.raises(openai.BadRequestError, match="no room for an answer") as caught:
            create(model="m", messages=[{"role": "user", "content": "x" * 2000}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            made.with_options(api_key="sk-other").models.list()
        with pytest.raises(openai.PermissionDeniedError, match="max_calls = 32"):
            create(model="m", messages=messages, n=33)
        gateway.close(session)
        with pytest.raises(openai.ConflictError, match="the episode is over"):
            create(model="m", messages=messages)
        assert gateway.statistics["late_calls"] == 1 and gateway.statistics["requests"] == 0


def test_the_clients_retry_after_a_timeout_gets_the_answer_that_the_engine_had_begun(
    tokenizer: ChatTokenizer, prompts: list[Prompt]
) -> None:
    engine = Gated(tokenizer)
    with running(engine, tokenizer) as gateway:
        session = gateway.open(prompts[0], place=0, sample=0)

        def release() -> None:
            until(lambda: gateway.statistics["retries"])
            engine.may_answer.set()

        threading.Thread(target=release).start()
        with openai.OpenAI(base_url=gateway.url, api_key=session.key, max_retries=8, timeout=0.4) as made:
            made.chat.completions.create(model="m", messages=[{"role": "user", "content": "3+4"}])
        record = gateway.close(session)
    assert engine.batches == [1] and record.rollout is not None and record.rollout.branches == ()


LIMITS = Limits(max_calls=4, max_new_tokens=20_000, max_tokens=40_000)

TWO_TURNS = [CALL, "It is 7."]

FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "It is 7."}}</tool_call>'

CODE = ["<code>\nprint(add(3, 4))\n</code>", '<code>\nfinal_answer("It is 7.")\n</code>']

OPENAI_AGENTS = '''
from agents import Agent, Runner, function_tool, set_tracing_disabled

@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b

set_tracing_disabled(True)
agent = Agent(name="sums", instructions="Use the tool.", tools=[add], model="gpt-5")
print(Runner.run_sync(agent, "3+4").final_output)
'''

STREAMED = (
    OPENAI_AGENTS.rpartition("print")[0]
    + """
import asyncio

async def main():
    result = Runner.run_streamed(agent, "3+4")
    async for event in result.stream_events():
        pass
    print(result.final_output)

asyncio.run(main())
"""
)

LANGGRAPH = '''
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b

model = ChatOpenAI(model="gpt-5").bind_tools([add])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": model.invoke(state["messages"])})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
print(graph.compile().invoke({"messages": [("user", "3+4")]})["messages"][-1].content)
'''

SMOLAGENTS = '''
import os
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

@tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b

model = OpenAIServerModel("gpt-5", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(KIND(tools=[add], model=model, verbosity_level=0).run("3+4"))
'''


def play(tokenizer: ChatTokenizer, prompt: Prompt, program: str, turns: Sequence[str], home: Path) -> Record:
    own = with_template(tokenizer, HERMES)
    with running(scripted(own, prompt.prompt_id, turns), own, LIMITS) as gateway:
        session = gateway.open(prompt, place=0, sample=0)
        variables = {"OPENAI_BASE_URL": gateway.url, "OPENAI_API_KEY": session.key, "HOME": str(home)}
        path = home / "agent.py"
        path.write_text(program)  # smolagents reads the source of its tools
        command = [sys.executable, "-W", "ignore", str(path)]
        found = subprocess.run(
            command, env=variables | {"PATH": os.environ["PATH"]}, cwd=home, capture_output=True, text=True, timeout=300
        )
        assert (found.returncode, found.stdout.strip()) == (0, "It is 7."), found.stderr
        record = gateway.close(session)
    assert record.refused == () and len(record.calls) == 2
    rollout = record.rollout
    assert rollout is not None and sum(map(sum, (each.loss_mask for each in rollout.samples))) == rollout.num_sampled
    return record


@pytest.mark.parametrize(
    ("package", "program", "kind"),
    [
        ("agents", OPENAI_AGENTS, "responses"),
        pytest.param("agents", STREAMED, "responses", marks=pytest.mark.slow),
        pytest.param("langgraph", LANGGRAPH, "chat", marks=pytest.mark.slow),
    ],
    ids=["openai-agents", "openai-agents, streamed", "langgraph"],
)
def test_an_agent_that_appends_to_its_history_is_one_sample(
    tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path, package: str, program: str, kind: str
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    record = play(tokenizer, prompts[0], program, TWO_TURNS, tmp_path)
    assert [(call.kind, call.parent, call.fork) for call in record.calls] == [(kind, None, ""), (kind, 1, "")]
    assert record.rollout is not None
    assert [(call.tool, call.output) for call in record.rollout.tool_calls] == [("add", "7.0")]


@pytest.mark.parametrize(
    ("kind", "turns"), [pytest.param("ToolCallingAgent", [CALL, FINAL], marks=pytest.mark.slow), ("CodeAgent", CODE)]
)
def test_smolagents_writes_its_calls_as_text_so_that_each_step_is_a_sample(
    tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path, kind: str, turns: list[str]
) -> None:
    if find_spec("smolagents") is None:
        pytest.skip("smolagents is not installed")
    record = play(tokenizer, prompts[0], SMOLAGENTS.replace("KIND", kind), turns, tmp_path)
    assert [call.parent for call in record.calls] == [None, None]
    assert "Calling tools:" in record.calls[1].fork and record.rollout is not None
    assert len(record.rollout.samples) == 2
