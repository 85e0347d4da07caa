"""Agents of three frameworks, unchanged, as processes of their own; each has a tool and two model calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlcore.agents.gateway import Record
from rlcore.agents.session import Limits
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt
from tests.rlcore.agents.gateways import CALL, running, scripted
from tests.rlcore.environments.tool_templates import HERMES, with_template

LIMITS = Limits(max_calls=4, max_new_tokens=20_000, max_tokens=40_000)
TURNS = [CALL, "It is 7."]
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
    """The record of an episode of a program, which must print the answer."""
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
    [("agents", OPENAI_AGENTS, "responses"), ("agents", STREAMED, "responses"), ("langgraph", LANGGRAPH, "chat")],
    ids=["openai-agents", "openai-agents, streamed", "langgraph"],
)
def test_an_agent_that_appends_to_its_history_is_one_sample(
    tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path, package: str, program: str, kind: str
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    record = play(tokenizer, prompts[0], program, TURNS, tmp_path)
    assert [(call.kind, call.parent, call.fork) for call in record.calls] == [(kind, None, ""), (kind, 1, "")]
    assert record.rollout is not None
    assert [(call.tool, call.output) for call in record.rollout.tool_calls] == [("add", "7.0")]


@pytest.mark.parametrize(("kind", "turns"), [("ToolCallingAgent", [CALL, FINAL]), ("CodeAgent", CODE)])
def test_smolagents_writes_its_calls_as_text_so_that_each_step_is_a_sample(
    tokenizer: ChatTokenizer, prompts: list[Prompt], tmp_path: Path, kind: str, turns: list[str]
) -> None:
    if find_spec("smolagents") is None:
        pytest.skip("smolagents is not installed")
    record = play(tokenizer, prompts[0], SMOLAGENTS.replace("KIND", kind), turns, tmp_path)
    assert [call.parent for call in record.calls] == [None, None]
    assert "Calling tools:" in record.calls[1].fork and record.rollout is not None
    assert len(record.rollout.samples) == 2
