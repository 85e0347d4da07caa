"""Settings of multi-turn episodes with tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rlcore.config.bounds import PositiveFloat, PositiveInt
from rlcore.errors import ConfigError
from rlcore.strict import AtLeast


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Episodes of several turns with tools. Without ``tools`` every completion is one turn.

    ``sampling.max_new_tokens`` bounds all turns and all tool output together; a further turn begins only if
    ``max_turn_tokens`` still fit. Output longer than ``max_output_tokens`` is cut and ends with ``[cut]``.
    ``tool_role``: the role of the output's message; ``user`` for chat templates without a role ``tool``.
    """

    tools: tuple[Literal["calculator", "python", "search"], ...] = ()
    max_turns: PositiveInt = 4
    max_turn_tokens: PositiveInt = 512
    max_output_tokens: Annotated[int, AtLeast(16)] = 256
    timeout_seconds: PositiveFloat = 5.0  # for one Python program
    corpus: str = ""  # for search: a JSONL or Parquet file of passages
    num_passages: PositiveInt = 3  # per search
    tool_role: Literal["tool", "user"] = "tool"

    def __post_init__(self) -> None:
        if len(set(self.tools)) < len(self.tools):
            raise ConfigError("a tool is named twice")
        if ("search" in self.tools) != bool(self.corpus):
            raise ConfigError("the search tool and its corpus go together: name both or neither")
