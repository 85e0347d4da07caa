"""Settings of multi-turn episodes with tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlcore.config.bounds import PositiveFloat, PositiveInt, Scalar
from rlcore.errors import ConfigError
from rlcore.strict import AtLeast


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Episodes of several turns with tools. Without ``tools`` and ``environment`` every completion is one turn.

    ``sampling.max_new_tokens`` bounds all turns and all tool output together; a further turn begins only if
    ``max_turn_tokens`` still fit. Output longer than ``max_tool_output_tokens`` is cut and ends with ``[cut]``.
    ``environment``: a class of one's own, ``module:Class``, whose public methods are tools, with ``options`` by name;
    ``files``: the data files that it reads. ``tool_role``: the role of the output's message; ``user`` for chat
    templates without a role ``tool``. ``call_format``: how a call is written; ``template``: as the chat template has
    it, and as ours where it has none.
    """

    tools: tuple[Literal["calculator", "python", "search"], ...] = ()
    max_turns: PositiveInt = 4
    max_turn_tokens: PositiveInt = 512
    max_tool_output_tokens: Annotated[int, AtLeast(16)] = 256
    environment: str = ""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    timeout_seconds: PositiveFloat = 5.0  # for one Python program, and for one call of the environment
    search_corpus: str = ""  # for search: a JSONL or Parquet file of passages
    search_top_k: PositiveInt = 3  # per search
    tool_role: Literal["tool", "user"] = "tool"
    call_format: Literal["template", "hermes", "llama3", "mistral", "ours"] = "template"

    @property
    def has_tools(self) -> bool:
        """Whether the policy may call anything."""
        return bool(self.tools or self.environment)

    @property
    def module(self) -> str:
        """The module of the environment; empty without one."""
        return self.environment.partition(":")[0]

    def __post_init__(self) -> None:
        if self.environment and ":" not in self.environment:
            raise ConfigError(f"environment = {self.environment!r} is not written as module:Class")
        if (self.options or self.files) and not self.environment:
            raise ConfigError("options and files are those of an environment: name one, or leave them out")
        if len(set(self.tools)) < len(self.tools):
            raise ConfigError("a tool is named twice")
        if ("search" in self.tools) != bool(self.search_corpus):
            raise ConfigError("tools names search and search_corpus is empty, or the reverse: name both or neither")
