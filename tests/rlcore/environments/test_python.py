"""The Python tool in real boxes: what a program prints, what it does wrong, and what is not its fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlcore.config import EpisodeConfig
from rlcore.environments.base import ToolFailure, ToolOutput
from rlcore.environments.python import PythonTool
from rlcore.environments.table import ToolResources, build_tools
from rlcore.errors import ConfigError
from rlcore.sandbox.base import DEFAULT_LIMITS, ResourceLimits, RunResult, RunStatus
from rlcore.sandbox.pool import SandboxPool
from tests.rlcore.sandbox.conftest import require_bubblewrap
from tests.waiting import LONG


@pytest.fixture(scope="module")
def boxes() -> Iterator[SandboxPool]:
    require_bubblewrap()
    with SandboxPool() as sandbox:
        yield sandbox


@pytest.fixture
def tool(boxes: SandboxPool) -> PythonTool:
    return PythonTool(boxes, timeout_seconds=LONG)


def test_programs_are_answered_in_order_with_what_they_print(tool: PythonTool) -> None:
    programs = ["print(347 * 286)", "x = 1", "print('a')\nprint('b')", "print(x)", "1/0", "print("]
    outputs = tool(programs)
    assert all(isinstance(output, ToolOutput) for output in outputs)
    texts = [output.text for output in outputs if isinstance(output, ToolOutput)]
    assert texts[:3] == ["99242", "nothing was printed", "a\nb"]
    assert "NameError" in texts[3]  # nothing is kept of the second program
    assert "ZeroDivisionError" in texts[4]
    assert "SyntaxError" in texts[5]
    assert [output.is_error for output in outputs if isinstance(output, ToolOutput)] == [False] * 3 + [True] * 3


def test_a_program_that_raises_half_a_surrogate_pair_says_what_every_file_can_hold(tool: PythonTool) -> None:
    (output,) = tool(["raise ValueError(chr(0xd800))"])
    assert isinstance(output, ToolOutput)
    assert output.text.encode().decode().count("ud800") == 1


def test_a_program_that_does_not_end_and_one_that_ends_itself_are_errors_of_the_policy(boxes: SandboxPool) -> None:
    endless, gone = PythonTool(boxes, timeout_seconds=2.0)(["while True: pass", "import os; os._exit(0)"])
    assert endless == ToolOutput(text="error: the program's time was up", is_error=True)
    assert isinstance(gone, ToolOutput)
    assert gone.is_error


class Broken:
    """A sandbox whose boxes do not start."""

    def run(self, code: str, *, stdin: str = "", limits: ResourceLimits = DEFAULT_LIMITS) -> RunResult:
        return RunResult(status=RunStatus.INFRA, error="no box")

    def close(self) -> None:
        return


def test_a_box_that_does_not_start_is_nobodys_error() -> None:
    assert PythonTool(Broken(), timeout_seconds=1.0)(["print(1)"]) == [ToolFailure(reason="no box")]


def test_the_table_gives_the_tool_its_sandbox() -> None:
    config = EpisodeConfig(tools=("python", "calculator"))
    assert [tool.name for tool in build_tools(config, ToolResources(sandbox=Broken()))] == ["python", "calculator"]
    with pytest.raises(ConfigError, match="needs a sandbox"):
        build_tools(config, ToolResources())
