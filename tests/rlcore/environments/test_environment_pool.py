"""Environments in a pool and behind MCP servers: each episode has its own state, and fails alone."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from rlcore.environments.base import CallError, ParsedCall, ToolFailure, ToolOutput
from rlcore.environments.environment import (
    MAX_CHARACTERS,
    MIN_FAILURES,
    EnvironmentPool,
    episode_seeds,
    import_environment,
    wrap_environment,
)
from rlcore.errors import ConfigError
from rlcore.types import Message, Prompt
from tests.http_servers import free_port, until_it_listens
from tests.waiting import LONG, given_time


def prompt(reference: str) -> Prompt:
    return Prompt(
        prompt_id=reference,
        messages=(Message(role="user", content="?"),),
        token_ids=(1,),
        reference=reference,
        task="t",
    )


class Counter:
    """Counts its calls; every way to go wrong is a tool."""

    ended: ClassVar[list[str]] = []
    released: ClassVar[threading.Event]
    met: ClassVar[set[str]]

    def reset(self, prompt: Prompt, rng: random.Random) -> str | None:
        if prompt.reference == "broken":
            raise KeyError("board")
        self.rng, self.calls, self.name = rng, 0, prompt.reference
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE calls (one)")
        return f"start {rng.randrange(10**6)}"

    def step(self, by: int) -> int:
        """Counts.

        Args:
            by: how far
        """
        if by < 0:
            raise CallError("only forward")
        self.calls += by
        return self.calls

    def draw(self) -> int:
        """Draws a number."""
        return self.rng.randrange(10**6)

    def crash(self) -> str:
        """Raises."""
        raise ZeroDivisionError("oh")

    def store(self) -> int:
        """Counts in a database, which only the thread may use that has opened it."""
        self.database.execute("INSERT INTO calls VALUES (1)")
        return int(self.database.execute("SELECT count(*) FROM calls").fetchone()[0])

    def leave(self) -> str:
        """Leaves."""
        sys.exit(3)

    def half(self) -> str:
        """Says half of a surrogate pair."""
        return "\ud800"

    def hang(self) -> str:
        """Waits."""
        self.released.wait()
        return "late"

    def circle(self) -> list[Any]:
        """Gives what JSON cannot hold."""
        found: list[Any] = []
        found.append(found)
        return found

    def flood(self) -> str:
        """Says too much."""
        return "x" * (2 * MAX_CHARACTERS)

    async def meet(self, count: int) -> str:
        """Waits until so many are here.

        Args:
            count: how many
        """
        self.met.add(self.name)
        while len(self.met) < count:
            await asyncio.sleep(0.01)
        if self.name == "refused":
            raise CallError("not for you")
        return f"met {self.name}"

    async def block(self) -> str:
        """Never gives way."""
        self.released.wait()
        return "late"

    def get_reward(self) -> float | None:
        return {"nan": float("nan"), "none": None, "numpy": np.float32(0.5)}.get(self.name, float(self.calls))

    def close(self) -> None:
        self.ended.append(self.name)
        raise OSError("already gone")


KIND = wrap_environment(Counter, {}, name="tests:Counter")


@pytest.fixture(autouse=True)
def _until_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A call that hangs is released when its test is over; who meets whom is known to each test alone."""
    monkeypatch.setattr(Counter, "released", threading.Event(), raising=False)
    monkeypatch.setattr(Counter, "met", set(), raising=False)
    yield
    Counter.released.set()


def started(*references: str, timeout_seconds: float = LONG, seed: int = 0) -> tuple[EnvironmentPool, dict[int, Any]]:
    worlds = EnvironmentPool(KIND, timeout_seconds=timeout_seconds)
    prompts = {key: prompt(reference) for key, reference in enumerate(references)}
    return worlds, worlds.reset(prompts, {key: episode_seeds(seed, 0, key) for key in prompts})


def call(tool: str, **named: Any) -> ParsedCall:
    return ParsedCall(tool=tool, arguments=named)


def test_every_episode_has_a_state_of_its_own() -> None:
    worlds, _ = started("a", "b")
    worlds.answer({0: call("step", by=1), 1: call("step", by=5)})
    assert worlds.answer({0: call("step", by=1), 1: call("step", by=5)}) == {
        0: ToolOutput(text="2"),
        1: ToolOutput(text="10"),
    }
    assert worlds.rewards([0, 1]) == {0: 2.0, 1: 10.0}


def test_a_group_begins_alike_and_each_episode_then_draws_its_own_numbers_which_the_seed_decides() -> None:
    worlds, starts = started("a", "a")
    again, same = started("a", "a")
    _, other = started("a", "a", seed=1)
    assert starts[0] == starts[1] == same[0] != other[0]
    drawn = worlds.answer({0: call("draw"), 1: call("draw")})
    assert drawn[0] != drawn[1]
    assert again.answer({1: call("draw"), 0: call("draw")}) == drawn


def test_an_error_of_the_policy_is_its_observation_and_one_of_the_environment_fails_the_rollout() -> None:
    worlds, _ = started("a", "b", "c", "d", "e")
    calls = {0: call("step", by=-1), 1: call("step", by="1"), 2: call("crash"), 3: call("circle"), 4: call("flood")}
    found = worlds.answer(calls)
    assert found[0] == ToolOutput(text="error: only forward", is_error=True)
    assert found[1] == ToolOutput(text="error: step: by must be of type integer", is_error=True)
    assert isinstance(found[2], ToolFailure) and isinstance(found[3], ToolFailure)
    assert found[2].reason.startswith("tests:Counter.crash raised ZeroDivisionError: oh (")
    assert isinstance(found[4], ToolOutput) and len(found[4].text) == MAX_CHARACTERS


def test_a_call_that_does_not_come_back_fails_its_rollout_and_no_other() -> None:
    def played(seconds: float) -> dict[int, Any]:
        worlds, _ = started("a", "b", timeout_seconds=seconds)
        return worlds.answer({0: call("hang"), 1: call("step", by=1)})

    found = given_time(played, lambda found: found.get(1) == ToolOutput(text="1"), seconds=0.3)
    assert isinstance(found[0], ToolFailure) and "tests:Counter.hang timed out after " in found[0].reason
    assert found[1] == ToolOutput(text="1")


def test_after_more_failures_than_a_batch_may_lose_no_other_call_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Counter, "ended", asked)
    worlds, _ = started(*"abcdefghijkl")
    found = worlds.answer(
        {key: call("crash") for key in range(MIN_FAILURES + 1)} | {MIN_FAILURES + 1: call("step", by=1)}
    )
    assert found[MIN_FAILURES + 1] == found[MIN_FAILURES]
    worlds.close()
    assert len(asked) == MIN_FAILURES + 1  # it raises each time


def test_outside_the_main_thread_an_environment_stays_in_one_thread_and_loses_it_with_a_call_that_hangs() -> None:
    def play(seconds: float) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
        worlds, _ = started("a", "b", timeout_seconds=seconds)
        stored = worlds.answer({0: call("store"), 1: call("store")})
        worlds.answer({0: call("hang")})
        after = worlds.answer({1: call("step", by=1)})
        return stored, after, worlds.answer({1: call("store")})

    with ThreadPoolExecutor(1) as threads:
        stored, after, elsewhere = given_time(
            lambda seconds: threads.submit(play, seconds).result(),
            lambda found: found[1] == {1: ToolOutput(text="1")},
            seconds=0.3,
        )
    assert stored == {0: ToolOutput(text="1"), 1: ToolOutput(text="1")}
    assert after == {1: ToolOutput(text="1")}
    assert isinstance(elsewhere[1], ToolFailure) and "SQLite objects created in a thread" in elsewhere[1].reason


def test_a_tool_that_leaves_python_fails_its_rollout_and_no_text_of_the_policys_reaches_a_table_unwritable() -> None:
    worlds, _ = started("a", "b")
    found = worlds.answer({0: call("leave"), 1: call("half")})
    assert isinstance(found[0], ToolFailure) and "raised SystemExit" in found[0].reason
    assert found[1] == ToolOutput(text="?")


def test_async_methods_wait_at_the_same_time_each_with_its_own_deadline() -> None:
    def played(seconds: float) -> dict[int, Any]:
        worlds, _ = started("a", "b", "refused", "d", timeout_seconds=seconds)
        found = worlds.answer({key: call("meet", count=99 if key == 3 else 3) for key in range(4)})
        worlds.close()
        return found

    found = given_time(played, lambda found: found.get(0) == ToolOutput(text="met a"), seconds=0.5)
    assert (found[0], found[1]) == (ToolOutput(text="met a"), ToolOutput(text="met b"))
    assert found[2] == ToolOutput(text="error: not for you", is_error=True)
    assert isinstance(found[3], ToolFailure) and "Counter.meet timed out after " in found[3].reason


def test_an_async_method_that_never_gives_way_is_left_behind() -> None:
    def played(seconds: float) -> tuple[Any, Any]:
        worlds, _ = started("a", timeout_seconds=seconds)
        blocked, after = worlds.answer({0: call("block")}), worlds.answer({0: call("meet", count=1)})
        worlds.close()
        return blocked[0], after[0]

    blocked, after = given_time(played, lambda found: found[1] == ToolOutput(text="met a"), seconds=0.2)
    assert isinstance(blocked, ToolFailure) and "timed out" in blocked.reason
    assert after == ToolOutput(text="met a")


def test_an_environment_that_cannot_begin_fails_alone() -> None:
    worlds, starts = started("broken", "b")
    assert isinstance(starts[0], ToolFailure) and "reset raised KeyError: 'board'" in starts[0].reason
    assert starts[1].startswith("start ")
    assert worlds.answer({1: call("step", by=1)}) == {1: ToolOutput(text="1")}


def test_a_reward_is_a_finite_number_or_none() -> None:
    worlds, _ = started("nan", "none", "c", "numpy")
    found = worlds.rewards([0, 1, 2, 3])
    assert found[3] == 0.5
    assert isinstance(found[0], ToolFailure) and "not a finite number" in found[0].reason
    assert (found[1], found[2]) == (None, 0.0)


def test_every_environment_is_closed_whatever_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "ended", [])
    worlds, _ = started("a", "b")
    worlds.close()
    worlds.close()
    assert Counter.ended == ["a", "b"]


SERVER = str(Path(__file__).with_name("counting_server.py"))

COMMAND = f"{sys.executable} {SERVER}"

NAME = "rlcore.environments.mcp_server:McpServer"


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
    prompts = dict.fromkeys("ab", prompt("p"))
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


def test_an_error_of_the_policy_is_its_observation_and_the_session_continues(worlds: EnvironmentPool) -> None:
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
            assert worlds.reset({"a": prompt("p")}, {"a": (0, 0)}) == {"a": ""}
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
