"""Two environments behind OpenEnv's own server, for OpenEnv's interpreter: ``openenv_server.py action|tools PORT``."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field


class Guess(Action):  # type: ignore[misc]
    number: int = Field(description="A number from 1 to 9.")


class Said(Observation):  # type: ignore[misc]
    text: str


class GuessEnvironment(Environment):  # type: ignore[misc]
    """A number to be guessed, which follows from the seed. A right guess pays 1 and ends it, a wrong one costs 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, level: int = 0, hint: str = "") -> Said:
        self.wanted = (seed or 0) % 9 + 1
        return Said(text=f"level {level}, {hint}: I think of a number.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Said:
        if action.number > 9:
            raise RuntimeError("the board has nine fields")
        right = action.number == self.wanted
        return Said(text="right" if right else "wrong", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return State()


class SumsEnvironment(MCPEnvironment):  # type: ignore[misc]
    """A calculator as a tool over MCP, without any reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("sums")

        @mcp.tool()  # type: ignore[untyped-decorator]
        def calculator(expression: str) -> str:
            """Multiplies two numbers, such as 47*86."""
            first, _, second = expression.partition("*")
            if not (first.isdigit() and second.isdigit()):
                raise ValueError("write two numbers, such as 47*86")
            return str(int(first) * int(second))

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("this environment has tools alone")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    if kind == "tools":
        app = create_app(SumsEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=256)
    else:
        app = create_app(GuessEnvironment, Guess, Said, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
