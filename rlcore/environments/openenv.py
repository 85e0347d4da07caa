"""Environment of an OpenEnv server, ``rlcore.environments.openenv:OpenEnv``; it needs the extra ``openenv``.

    options = { url = "http://127.0.0.1:8000", reset = { level = 2 }, from_row = { task_name = "task" } }

Each episode is a WebSocket session with the server, which keeps its state. Its tools are those that the server lists
over MCP. A server without tools has one tool, ``step``, whose arguments are its action. The wire protocol is
implemented here, because OpenEnv's client needs an MCP library of another major version than the extra ``mcp``.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from rlcore.environments.base import CallError
from rlcore.environments.call_arguments import Schema
from rlcore.environments.environment import RESERVED, to_text
from rlcore.errors import ConfigError, shown
from rlcore.extras import install_command
from rlcore.types import Prompt

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect as connect_now
except ImportError as error:
    raise ConfigError(
        "the extra openenv is not installed", where="environment", fix=install_command("openenv")
    ) from error

_ROW = ("prompt_id", "reference", "task")
_SECONDS = 60.0  # for listing the tools; calls have the timeout of episodes
_MAX_BYTES = 2**24  # maximum size of a message
_POLICY = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # codes of errors that an action causes
_STEP = "step"
_LISTED = {"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}}


class OpenEnv:
    """Session with the server at ``url``. The reward of an episode is the sum over its steps, 0 without a step.

    ``reset`` has arguments of the server's ``reset`` besides ``seed``. ``from_row`` maps arguments to fields of the
    prompt's row (``prompt_id``, ``reference`` or ``task``).

    The policy reads errors of a tool, and of an action that the server refuses or fails on. A lost connection, a
    refused session and a tool timeout fail the rollout.
    """

    def __init__(
        self, *, url: str, reset: Mapping[str, Any] | None = None, from_row: Mapping[str, str] | None = None
    ) -> None:
        self._url, self._fixed, self._from_row = url, dict(reset or {}), dict(from_row or {})
        self._socket: ClientConnection | None = None
        self._reward: float | None = None
        self._done = self._was_stepped = False

    @staticmethod
    def tool_schemas(
        *, url: str, reset: Mapping[str, Any] | None = None, from_row: Mapping[str, str] | None = None
    ) -> Mapping[str, Schema]:
        """Return the schemas of the server's tools or of its action by name, as chat templates take them.

        Raises:
            ConfigError: The server does not answer, a tool has a reserved name, or ``from_row`` names an unknown field.
        """
        if unknown := [field for field in (from_row or {}).values() if field not in _ROW]:
            raise ConfigError(
                f"from_row names the field {unknown[0]!r}", where="environment", fix=f"name one of {', '.join(_ROW)}"
            )
        try:
            return _tools(url) or {_STEP: _action(url)}
        except ConfigError:
            raise
        except Exception as error:  # a server may cause any error
            raise ConfigError(
                f"the OpenEnv server does not answer at {url!r}: {shown(error)}",
                where="environment",
                fix="start the server, and set options.url to its address, such as http://127.0.0.1:8000",
            ) from error

    async def reset(self, prompt: Prompt, rng: random.Random) -> str:
        """Begin an episode and return the server's observation."""
        self._socket = await connect(_address(self._url), max_size=_MAX_BYTES, ping_interval=None)
        row = {argument: getattr(prompt, field) for argument, field in self._from_row.items()}
        reply = await self._ask("reset", {"seed": rng.getrandbits(31)} | self._fixed | row)
        return _shown(reply["observation"])

    def get_reward(self) -> float | None:
        """Return the sum of the step rewards; None if the server gave none, 0 if there was no step."""
        return self._reward if self._was_stepped else 0.0

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    def __getattr__(self, tool: str) -> Any:
        if tool.startswith("_"):
            raise AttributeError(tool)
        return partial(self._call, tool)

    async def _call(self, tool: str, /, **arguments: Any) -> str:
        if self._done:
            raise CallError("the episode is over")
        action = arguments if tool == _STEP else {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        try:
            reply = await self._ask("step", action)
        except _ServerError as error:
            if error.code in _POLICY:
                raise CallError(str(error)) from error
            raise
        self._was_stepped = True
        if reply["reward"] is not None:
            self._reward = (self._reward or 0.0) + float(reply["reward"])
        self._done = bool(reply["done"])
        return _shown(reply["observation"]) if tool == _STEP else _result(reply["observation"])

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None
        with suppress(ConnectionClosed):  # the server sends the reason of a refusal before it closes
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        return _answer(await self._socket.recv())


class _ServerError(Exception):
    """Error that the server reports, by its code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _answer(raw: str | bytes) -> Mapping[str, Any]:
    """Return the data of an answer.

    Raises:
        _ServerError: The answer is an error.
    """
    message = json.loads(raw)
    data: Mapping[str, Any] = message["data"]
    if message["type"] != "error":
        return data
    wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors", [])]
    raise _ServerError(data["code"], "; ".join(wrong) or data["message"])


def _shown(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only field, or JSON of several."""
    fields = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    if len(fields) == 1:
        (value,) = fields.values()
        return to_text(value)
    return to_text(fields) if fields else ""


def _result(observation: Mapping[str, Any]) -> str:
    """Return the output of a tool.

    Raises:
        CallError: The tool reported an error, which the policy reads.
        RuntimeError: The server did not reach the tool, or timed out.
    """
    if error := observation.get("error"):
        if error["error_type"] in ("transport_error", "timeout"):
            raise RuntimeError(error["message"])
        raise CallError(error["message"])
    result = observation["result"]
    if not isinstance(result, Mapping) or "content" not in result:
        return to_text(result)
    text = "\n".join(block.get("text", f"[{block['type']}]") for block in result["content"])
    if result.get("is_error"):
        raise CallError(text)
    return text


def _tools(url: str) -> dict[str, Schema]:
    """Return the tools that the server lists over MCP; empty if it has no MCP."""
    with connect_now(_address(url), open_timeout=_SECONDS, max_size=_MAX_BYTES) as socket:
        socket.send(json.dumps(_LISTED))
        reply = _answer(socket.recv(_SECONDS))
    listed = (reply.get("result") or {}).get("tools", [])
    names = [tool["name"] for tool in listed]
    if taken := [name for name in names if name in (*RESERVED, _STEP) or name.startswith("_")]:
        raise ConfigError(
            f"the server's tool name {shown(taken[0])!r} is reserved", where="environment", fix="rename it"
        )
    return {
        tool["name"]: _schema(tool["name"], tool.get("description") or tool["name"], tool["inputSchema"])
        for tool in listed
    }


def _action(url: str) -> Schema:
    """Return the server's action as a tool."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=_SECONDS) as answer:
        action = json.load(answer)["action"]
    properties = {name: schema for name, schema in action["properties"].items() if name != "metadata"}
    parameters = {key: value for key, value in action.items() if key not in ("title", "description")}
    return _schema(
        _STEP,
        action.get("description", f"Takes an action: {action['title']}."),
        parameters | {"properties": properties},
    )


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def _address(url: str) -> str:
    """Return the address of sessions: ``ws://…/ws`` for ``http://…``."""
    return f"{url.rstrip('/').replace('http', 'ws', 1)}/ws"
