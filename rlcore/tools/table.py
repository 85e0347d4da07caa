"""The tools of a run, built from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rlcore.config import EpisodeConfig
from rlcore.tools.base import Tool
from rlcore.tools.calculator import CalculatorTool
from rlcore.tools.search import Passage, SearchTool


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResources:
    """What tools need that is no option. ``passages``: of the search tool's corpus."""

    passages: Sequence[Passage] = ()


TOOLS: Mapping[str, Callable[[EpisodeConfig, ToolResources], Tool]] = MappingProxyType(
    {
        "calculator": lambda config, resources: CalculatorTool(),
        "search": lambda config, resources: SearchTool(resources.passages, num_passages=config.num_passages),
    }
)


def build_tools(config: EpisodeConfig, resources: ToolResources) -> tuple[Tool, ...]:
    """The tools that a configuration names.

    Raises:
        DataError: the search tool without a passage.
    """
    return tuple(TOOLS[name](config, resources) for name in config.tools)
