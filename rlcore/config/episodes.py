"""Settings of multi-turn episodes with tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.config.bounds import Duration, PositiveInt, Scalar
from rlcore.errors import ConfigError
from rlcore.strict_config import AtLeast


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Episodes of several turns with tools. Without ``tools`` and ``environment`` every completion is one turn.

    ``sampling.max_new_tokens`` limits turns and tool output together; another turn begins only if ``max_turn_tokens``
    still fit. Output longer than ``max_tool_output_tokens`` is truncated and ends with ``[cut]``. ``environment``: a
    custom class ``module:Class``, whose public methods are tools; ``options``: its arguments; ``files``: the data files
    that it reads. ``tool_role``: role of the message with the output; ``user`` for chat templates without a role
    ``tool``. ``call_format``: syntax of a call; ``template``: that of the chat template, or ``ours`` if it has none.
    """

    tools: tuple[Literal["calculator", "python", "search"], ...] = ()
    max_turns: PositiveInt = 4
    max_turn_tokens: PositiveInt = 512
    max_tool_output_tokens: Annotated[int, AtLeast(16)] = 256
    environment: str = ""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    timeout_seconds: Duration = 5.0  # for one Python program, and for one call of the environment
    search_corpus: str = ""  # for search: a JSONL or Parquet file of passages
    search_top_k: PositiveInt = 3  # per search
    tool_role: Literal["tool", "user"] = "tool"
    call_format: Literal["template", "hermes", "llama3", "mistral", "ours"] = "template"

    @property
    def has_tools(self) -> bool:
        """True if the policy can call a tool."""
        return bool(self.tools or self.environment)

    @property
    def module(self) -> str:
        """Module of the environment, or ""."""
        return self.environment.partition(":")[0]

    def __post_init__(self) -> None:
        if self.environment and ":" not in self.environment:
            raise ConfigError(f"environment = {self.environment!r} is not written as module:Class")
        if (self.options or self.files) and not self.environment:
            raise ConfigError("options and files need environment")
        if len(set(self.tools)) < len(self.tools):
            raise ConfigError("tools has a tool twice")
        if ("search" in self.tools) != bool(self.search_corpus):
            raise ConfigError("the tool search needs search_corpus, and search_corpus needs the tool search")
