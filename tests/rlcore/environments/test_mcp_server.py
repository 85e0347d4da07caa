"""Tools of a real MCP server as an environment: described by it, a state for each episode, ended with the episode."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.environments.base import ParsedCall, ToolFailure, ToolOutput
from rlcore.environments.environment import import_environment
from rlcore.environments.environment_pool import EnvironmentPool
from rlcore.errors import ConfigError
from rlcore.types import Message, Prompt
from tests.http_servers import free_port, until_it_listens
from tests.waiting import LONG

SERVER = str(Path(__file__).with_name("counting_server.py"))
COMMAND = f"{sys.executable} {SERVER}"
NAME = "rlcore.environments.mcp_server:McpServer"
PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="count"),), token_ids=(3,), reference="", task="")


def call(tool: str, **arguments: Any) -> ParsedCall:
    return ParsedCall(tool=tool, arguments=arguments)


def servers() -> list[int]:
    """The processes of the example server that this one has started."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended
            found += [each.pid] if SERVER in each.cmdline() else []
    return found


@pytest.fixture
def worlds() -> Iterator[EnvironmentPool]:
    made = EnvironmentPool(import_environment(NAME, {"command": COMMAND}), timeout_seconds=LONG)
    prompts = dict.fromkeys("ab", PROMPT)
    assert made.reset(prompts, dict.fromkeys("ab", (0, 0))) == {"a": "", "b": ""}
    yield made
    made.close()
    assert servers() == []


def test_the_tools_are_described_as_the_server_describes_them() -> None:
    found = import_environment(NAME, {"command": COMMAND})
    assert set(found.schemas) == {"add", "divide"}
    described = found.schemas["add"]["function"]
    assert described["description"] == "Adds a number to the total, and gives the total."
    assert found.parameters_of("add")["properties"]["number"]["type"] == "integer"
    assert not found.has_reward


def test_each_episode_has_a_server_with_a_state_of_its_own(worlds: EnvironmentPool) -> None:
    assert len(servers()) == 2
    assert worlds.answer({"a": call("add", number=2)}) == {"a": ToolOutput(text="2")}
    said = worlds.answer({"a": call("add", number=3), "b": call("add", number=40)})
    assert said == {"a": ToolOutput(text="5"), "b": ToolOutput(text="40")}


def test_what_the_policy_does_wrong_is_told_and_the_session_goes_on(worlds: EnvironmentPool) -> None:
    (wrong,) = worlds.answer({"a": call("divide", by=0)}).values()
    assert isinstance(wrong, ToolOutput) and wrong.is_error and wrong.text.startswith("error: ")
    (unfit,) = worlds.answer({"a": call("add", number="two")}).values()
    assert unfit == ToolOutput(text="error: add: number must be of type integer", is_error=True)
    assert worlds.answer({"a": call("add", number=1)}) == {"a": ToolOutput(text="1")}


def test_a_server_that_dies_fails_the_episode(worlds: EnvironmentPool) -> None:
    psutil.Process(servers()[0]).kill()
    said = worlds.answer({"a": call("add", number=1), "b": call("add", number=1)})
    kinds = sorted(type(each).__name__ for each in said.values())
    assert kinds == ["ToolFailure", "ToolOutput"]
    (failure,) = [each for each in said.values() if isinstance(each, ToolFailure)]
    assert failure.reason.startswith("rlcore.environments.mcp_server:McpServer.add raised")


def test_a_server_that_runs_already_is_asked_at_its_address() -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            until_it_listens(port)
            kind = import_environment(NAME, {"url": f"http://127.0.0.1:{port}/mcp"})
            worlds = EnvironmentPool(kind, timeout_seconds=LONG)
            assert worlds.reset({"a": PROMPT}, {"a": (0, 0)}) == {"a": ""}
            assert worlds.answer({"a": call("add", number=7)}) == {"a": ToolOutput(text="7")}
            worlds.close()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": "false"}, "the MCP server does not answer at 'false'"),
        ({"command": "no-such-program"}, "the MCP server does not answer at 'no-such-program'"),
        ({"url": "http://127.0.0.1:9/mcp"}, "the MCP server does not answer at 'http://127.0.0.1:9/mcp'"),
        ({}, "needs a command or a url"),
        ({"command": "a", "url": "b"}, "needs a command or a url"),
    ],
)
def test_where_no_server_answers_the_error_names_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="MCP server") as caught:
        import_environment(NAME, options)
    assert said in caught.value.what
