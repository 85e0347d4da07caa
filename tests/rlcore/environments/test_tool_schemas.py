"""The tools of the table as a chat template declares them: each takes one text."""

from __future__ import annotations

from rlcore.environments.base import ParsedCall, ToolOutput
from rlcore.environments.calculator import CalculatorTool
from rlcore.environments.episodes import text_argument, tool_schema


def test_a_tool_of_text_has_one_argument_and_says_what_it_does() -> None:
    function = tool_schema(CalculatorTool())["function"]
    assert (function["name"], function["parameters"]["required"]) == ("calculator", ["argument"])
    assert function["description"].startswith("Computes an expression")


def test_a_call_gives_its_text_by_name_or_as_it_stands() -> None:
    assert text_argument(ParsedCall(tool="calculator", argument="3+4")) == "3+4"
    assert text_argument(ParsedCall(tool="calculator", arguments={"argument": "3+4"})) == "3+4"
    for arguments in ({}, {"argument": 7}, {"argument": "7", "more": 1}, {"expression": "3+4"}):
        found = text_argument(ParsedCall(tool="calculator", arguments=arguments))
        assert isinstance(found, ToolOutput) and found.is_error
