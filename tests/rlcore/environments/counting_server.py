"""An MCP server with a state: ``python counting_server.py`` over standard input and output, ``… PORT`` over HTTP."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("counting")
total = 0


@server.tool()
def add(number: int) -> str:
    """Adds a number to the total, and gives the total."""
    global total
    total += number
    return str(total)


@server.tool()
def divide(by: int) -> str:
    """Divides the total."""
    return str(total // by)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
