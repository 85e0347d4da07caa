"""Table of tools, and the tools of a run built from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlcore.choices import choices
from rlcore.config import EpisodeConfig
from rlcore.environments.base import Tool
from rlcore.environments.calculator import CalculatorTool
from rlcore.environments.python import PythonTool
from rlcore.environments.search import Passage, SearchTool
from rlcore.errors import ConfigError
from rlcore.sandbox.base import Sandbox


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResources:
    """Resources of tools besides their options: the search corpus and the sandbox of the Python tool."""

    passages: Sequence[Passage] = ()
    sandbox: Sandbox | None = None


def _make_python(config: EpisodeConfig, resources: ToolResources) -> Tool:
    if resources.sandbox is None:
        raise ConfigError("the Python tool needs a sandbox", fix="pass one in ToolResources")
    return PythonTool(resources.sandbox, timeout_seconds=config.timeout_seconds)


TOOLS: Mapping[str, Callable[[EpisodeConfig, ToolResources], Tool]] = choices(
    "episodes.tools",
    {
        "calculator": lambda config, resources: CalculatorTool(),
        "python": _make_python,
        "search": lambda config, resources: SearchTool(resources.passages, num_passages=config.search_top_k),
    },
)


def build_tools(config: EpisodeConfig, resources: ToolResources) -> tuple[Tool, ...]:
    """Build the tools of a configuration.

    Raises:
        DataError: The search tool has no passage.
        ConfigError: The Python tool has no sandbox.
    """
    return tuple(TOOLS[name](config, resources) for name in config.tools)
