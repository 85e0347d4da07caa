"""Environment of an MCP server's tools: ``rlcore.environments.mcp_server:McpServer``, with the extra ``mcp``.

    options = { command = "python -m my_server" }     or     options = { url = "http://127.0.0.1:8000/mcp" }

Each episode has its own session, and with a command its own process, which holds the state of the episode.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from rlcore.environments.base import CallError
from rlcore.environments.call_arguments import Schema
from rlcore.environments.environment import RESERVED
from rlcore.errors import ConfigError, shown
from rlcore.extras import install_command
from rlcore.types import Prompt

try:
    from mcp import Client, MCPError, StdioServerParameters
except ImportError as error:
    raise ConfigError("the extra mcp is not installed", where="environment", fix=install_command("mcp")) from error

_START_SECONDS = 60.0  # for listing the tools; calls have the timeout of episodes
_BAD_ARGUMENTS = -32602  # JSON-RPC: Invalid params


class McpServer:
    """Session with a server that ``command`` starts, or at ``url``. Its tools are methods.

    The policy reads errors of a tool; any other error fails the rollout.
    """

    def __init__(self, *, command: str = "", url: str = "") -> None:
        self._server = _server(command, url)
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    @staticmethod
    def tool_schemas(*, command: str = "", url: str = "") -> Mapping[str, Schema]:
        """Return the server's tool schemas by name, as chat templates take them.

        Raises:
            ConfigError: The server does not answer, or a tool has a reserved name.
        """
        return _schemas(command, url)

    async def reset(self, prompt: Prompt) -> None:
        """Open the session in a task that also closes it, as the library requires."""
        opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        self._client = await opened

    async def close(self) -> None:
        self._end.set()
        if self._task is not None:
            await self._task

    def __getattr__(self, tool: str) -> Any:
        if tool.startswith("_"):
            raise AttributeError(tool)
        return partial(self._call, tool)

    async def _call(self, tool: str, /, **arguments: Any) -> str:
        try:
            result = await self._client.call_tool(tool, arguments)
        except MCPError as error:
            if error.error.code == _BAD_ARGUMENTS:
                raise CallError(error.error.message) from error
            raise
        text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
        if result.is_error:
            raise CallError(text)
        return text

    async def _hold(self, opened: asyncio.Future[Client]) -> None:
        try:
            async with Client(self._server) as client:
                opened.set_result(client)
                await self._end.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)


@lru_cache
def _schemas(command: str, url: str) -> Mapping[str, Schema]:
    server = _server(command, url)
    try:
        with ThreadPoolExecutor(1) as aside:  # this thread may run an event loop
            tools = aside.submit(asyncio.run, asyncio.wait_for(_listed(server), _START_SECONDS)).result()
    except Exception as error:  # a process or server may cause any error
        raise ConfigError(
            f"the MCP server does not answer at {command or url!r}: {shown(_innermost(error))}",
            where="environment",
            fix="set options.command to a command that serves on stdin and stdout, or set options.url",
        ) from error
    if taken := [tool.name for tool in tools if tool.name in RESERVED or tool.name.startswith("_")]:
        raise ConfigError(
            f"the server's tool name {shown(taken[0])!r} is reserved", where="environment", fix="rename it"
        )
    return {
        tool.name: {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or tool.name,
                "parameters": tool.input_schema,
            },
        }
        for tool in tools
    }


async def _listed(server: StdioServerParameters | str) -> list[Any]:
    found: list[Any] = []
    async with Client(server) as client:
        page = await client.list_tools()
        found += page.tools
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            found += page.tools
    return found


def _server(command: str, url: str) -> StdioServerParameters | str:
    if bool(command) == bool(url):
        raise ConfigError("an MCP server needs a command or a url", where="environment", fix="set one of these options")
    program, *arguments = shlex.split(command) or [""]
    return url or StdioServerParameters(command=program, args=arguments)


def _innermost(error: BaseException) -> str:
    """Return the message of the first error of a group, in which the library reports errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    with suppress(AttributeError):
        return str(error.error.message)  # type: ignore[attr-defined]
    return str(error) or type(error).__name__
