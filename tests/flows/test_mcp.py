"""The micro agentic preset with a calculator that an MCP server offers: named before anything runs, and called."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.test_agentic import SETTINGS
from tests.flows.warm import run_warm
from tests.http_servers import free_port, until_it_listens

SERVER = '''
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def calculator(expression: str) -> str:
    """Multiplies two numbers, such as 47*86."""
    first, _, second = expression.partition("*")
    if not (first.isdigit() and second.isdigit()):
        raise ValueError("write two numbers, such as 47*86")
    return str(int(first) * int(second))

server.run("streamable-http", port=int(sys.argv[1]))
'''


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Address of the server."""
    port = free_port()
    program = tmp_path / "server.py"
    program.write_text(SERVER, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(program), str(port)], stderr=subprocess.DEVNULL) as process:
        until_it_listens(port)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def arguments(command: str, url: str) -> list[str]:
    own = (
        "stages.grpo.sampling.episodes.tools=[]",
        "stages.grpo.sampling.episodes.environment=rlcore.environments.mcp_server:McpServer",
        f"stages.grpo.sampling.episodes.options={{url='{url}'}}",
        "stages.grpo.sampling.episodes.timeout_seconds=600.0",
        "stages.grpo.rewards=[{kind='format',options={style='hashes'}}]",
    )
    return [command, "--preset", "agentic", *(part for each in (*SETTINGS, *own) for part in ("--set", each))]


def check_calls(home: Path) -> None:
    """The episodes of a run called the calculator, and the log-probabilities of engine and learner agree."""
    history = json.loads((folder(home, "grpo") / "history.json").read_text())
    assert all(0.0 < row["episode/parsed"] <= 1.0 for row in history)
    assert all(row["mismatch/max_abs"] < 1e-3 for row in history)
    table = read_table(folder(home, "grpo") / "rollouts" / "iteration-00001.parquet")
    (called, *_) = table["text"][table["text"].str.contains("[calculator] ", regex=False)]
    assert "[calculator] " in called


def test_a_server_that_does_not_answer_is_named_before_anything_runs(tmp_path: Path) -> None:
    done = run_warm(arguments("run", "http://127.0.0.1:9/mcp"), environment(tmp_path / "home"), ROOT)
    assert done.returncode == 2, done.stderr
    said = "stages.grpo.sampling.episodes.environment: the MCP server does not answer at 'http://127.0.0.1:9/mcp'"
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "home" / "artifacts" / "checkpoint").exists()


@pytest.mark.slow
def test_episodes_call_the_server_and_are_told_what_it_says(url: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = run_warm(arguments("run", url), environment(home), ROOT)
    assert done.returncode == 0, done.stderr
    check_calls(home)
