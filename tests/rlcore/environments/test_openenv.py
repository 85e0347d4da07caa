"""A server of OpenEnv as an environment: its tools or its action, a session for each episode, the sum of its rewards.

Each test runs against a replay of what OpenEnv's server has said, and against that server where ``OPENENV_PYTHON``
names an interpreter that has it (``pip install openenv==0.10.0``).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from rlcore.environments.base import ParsedCall, ToolFailure, ToolOutput
from rlcore.environments.environment import import_environment
from rlcore.environments.environment_pool import EnvironmentPool
from rlcore.errors import ConfigError
from rlcore.types import Message, Prompt
from tests.http_servers import free_port, until_it_listens
from tests.rlcore.environments.openenv_replay import EXCHANGE
from tests.waiting import LONG

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("OPENENV_PYTHON", "")
NAME = "rlcore.environments.openenv:OpenEnv"
PROMPT = Prompt(
    prompt_id="p", messages=(Message(role="user", content="go"),), token_ids=(3,), reference="4", task="odd"
)
WANTED = random.Random(0).getrandbits(31) % 9 + 1  # the number that the server draws for the seed of the group 0
OPTIONS = {"reset": {"level": 2}, "from_row": {"hint": "task"}}


@contextmanager
def serving(kind: str, *, real: bool) -> Iterator[str]:
    """The address of a server."""
    if real and not PYTHON:
        pytest.skip("OPENENV_PYTHON names no interpreter that has openenv==0.10.0")
    program, python = ("openenv_server.py", PYTHON) if real else ("openenv_replay.py", sys.executable)
    port = free_port()
    command = [python, str(FOLDER / program), kind, str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            until_it_listens(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module", params=["replay", "openenv"])
def address(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """The address of the server of a kind, which is started once."""
    with ExitStack() as stack:
        started: dict[str, str] = {}

        def of(kind: str) -> str:
            if kind not in started:
                started[kind] = stack.enter_context(serving(kind, real=request.param == "openenv"))
            return started[kind]

        yield of


@contextmanager
def playing(url: str, *keys: str, **options: Any) -> Iterator[EnvironmentPool]:
    """Episodes that have begun."""
    made = EnvironmentPool(import_environment(NAME, {"url": url, **options}), timeout_seconds=LONG)
    found = made.reset(dict.fromkeys(keys, PROMPT), dict.fromkeys(keys, (0, 0)))
    assert not [each for each in found.values() if isinstance(each, ToolFailure)], found
    yield made
    made.close()


def call(tool: str, **arguments: Any) -> ParsedCall:
    return ParsedCall(tool=tool, arguments=arguments)


def test_an_action_is_a_tool_and_what_it_needs_is_described(address: Callable[[str], str]) -> None:
    found = import_environment(NAME, {"url": address("action")})
    assert set(found.schemas) == {"step"}
    parameters = found.parameters_of("step")
    assert parameters["required"] == ["number"] and set(parameters["properties"]) == {"number"}
    assert parameters["properties"]["number"]["description"] == "A number from 1 to 9."
    assert found.has_reward and found.takes_rng


def test_reset_is_told_the_seed_the_options_and_the_row(address: Callable[[str], str]) -> None:
    worlds = EnvironmentPool(import_environment(NAME, {"url": address("action"), **OPTIONS}), timeout_seconds=LONG)
    said = worlds.reset({"a": PROMPT, "b": PROMPT}, {"a": (0, 0), "b": (0, 1)})
    assert said == dict.fromkeys("ab", "level 2, odd: I think of a number.")
    # The number that the seed of the group stands for, in both of its episodes.
    right = worlds.answer(dict.fromkeys("ab", call("step", number=WANTED)))
    assert right == dict.fromkeys("ab", ToolOutput(text="right"))
    worlds.close()


def test_an_episode_is_worth_the_sum_of_its_rewards_and_ends(address: Callable[[str], str]) -> None:
    with playing(address("action"), "a", "b", **OPTIONS) as worlds:
        assert worlds.rewards(["a", "b"]) == {"a": 0.0, "b": 0.0}  # nobody gets out of a score by doing nothing
        assert worlds.answer({"a": call("step", number=9)}) == {"a": ToolOutput(text="wrong")}
        worlds.answer({"a": call("step", number=WANTED)})
        assert worlds.rewards(["a", "b"]) == {"a": 0.75, "b": 0.0}
        over = worlds.answer({"a": call("step", number=WANTED)})
        assert over == {"a": ToolOutput(text="error: the episode is over", is_error=True)}
        assert worlds.rewards(["a"]) == {"a": 0.75}


def test_what_the_server_refuses_is_told_and_the_episode_goes_on(address: Callable[[str], str]) -> None:
    with playing(address("action"), "a", **OPTIONS) as worlds:
        raised = worlds.answer({"a": call("step", number=10)})
        assert raised == {"a": ToolOutput(text="error: the board has nine fields", is_error=True)}
        (unfit,) = worlds.answer({"a": call("step", number="x")}).values()
        assert unfit == ToolOutput(text="error: step: number must be of type integer", is_error=True)
        assert worlds.rewards(["a"]) == {"a": 0.0}
        assert worlds.answer({"a": call("step", number=WANTED)}) == {"a": ToolOutput(text="right")}


def test_tools_over_mcp_are_called_by_their_names(address: Callable[[str], str]) -> None:
    url = address("tools")
    described = import_environment(NAME, {"url": url}).schemas["calculator"]["function"]
    assert described["description"] == "Multiplies two numbers, such as 47*86."
    assert described["parameters"]["properties"]["expression"]["type"] == "string"
    with playing(url, "a") as worlds:
        assert worlds.answer({"a": call("calculator", expression="47*86")}) == {"a": ToolOutput(text="4042")}
        (wrong,) = worlds.answer({"a": call("calculator", expression="47")}).values()
        assert isinstance(wrong, ToolOutput) and wrong.is_error and "write two numbers" in wrong.text
        assert worlds.rewards(["a"]) == {"a": None}


def test_sessions_that_the_server_has_no_room_for_fail_and_say_so() -> None:
    with serving("action", real=True) as url:
        worlds = EnvironmentPool(import_environment(NAME, {"url": url}), timeout_seconds=LONG)
        found = worlds.reset(dict.fromkeys("abc", PROMPT), dict.fromkeys("abc", (0, 0)))
        worlds.close()
    (failure,) = [each for each in found.values() if isinstance(each, ToolFailure)]
    assert "capacity" in failure.reason, failure


def test_a_server_that_goes_away_fails_the_episode() -> None:
    with ExitStack() as stack:
        url = stack.enter_context(serving("action", real=False))
        worlds = EnvironmentPool(import_environment(NAME, {"url": url, **OPTIONS}), timeout_seconds=LONG)
        worlds.reset({"a": PROMPT}, {"a": (0, 0)})
    (said,) = worlds.answer({"a": call("step", number=1)}).values()
    assert isinstance(said, ToolFailure)
    assert said.reason.startswith("rlcore.environments.openenv:OpenEnv.step raised ConnectionClosed")
    worlds.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "http://127.0.0.1:9"}, "the OpenEnv server does not answer at 'http://127.0.0.1:9'"),
        ({"url": "nowhere"}, "the OpenEnv server does not answer at 'nowhere'"),
        ({"url": "http://127.0.0.1:9", "from_row": {"hint": "answer"}}, "from_row names the field 'answer'"),
        ({}, "cannot be constructed with these options"),
    ],
)
def test_where_no_server_answers_the_error_names_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_environment(NAME, options)
    assert said in caught.value.what


@pytest.mark.parametrize("kind", ["action", "tools"])
def test_the_replay_is_what_the_server_of_openenv_says(kind: str) -> None:
    with serving(kind, real=True) as url:
        with urllib.request.urlopen(f"{url}/schema") as answer:
            assert json.load(answer)["action"] == EXCHANGE[kind]["schema"]["action"]
        with connect(url.replace("http", "ws") + "/ws") as socket:
            for asked, said in EXCHANGE[kind]["said"]:
                socket.send(json.dumps(asked))
                assert json.loads(socket.recv()) == said
