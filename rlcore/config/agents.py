"""Settings of episodes that programs of the user play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Literal

from rlcore.config.bounds import PositiveFloat, PositiveInt
from rlcore.config.episodes import EpisodeConfig
from rlcore.errors import ConfigError

RESERVED = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "RLCORE_TASK", "HOME", "TMPDIR")
"""Environment variables that rlcore sets for each episode."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Program that plays the episodes by calls of an OpenAI-compatible API, which the policy answers.

    ``command`` starts it, or ``function`` (``module:function``, called with the task). Each episode has its own process
    and an empty working folder with copies of ``files``. ``columns``: columns of the task's row that it may read; none
    by default, because they may contain the answer. ``env``: further environment variables, without secrets.
    ``max_prompt_tokens``: of a first request, with system message and tools; ``sampling.max_new_tokens`` limits
    everything after it. ``branches``: the samples of an episode whose history was changed: train on all, on the one
    with the last answer, or refuse such an episode. ``on_crash``: an episode whose agent fails has no score, or an
    empty answer and the own reward 0. ``sandbox``: bubblewrap, without files and network of this machine.
    """

    command: tuple[str, ...] = ()
    function: str = ""
    files: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: PositiveFloat = 600.0  # of an episode
    max_calls: PositiveInt = 32  # of an episode
    max_prompt_tokens: PositiveInt = 1024
    max_concurrent: PositiveInt = 16  # agents at the same time
    branches: Literal["train", "main", "refuse"] = "train"
    on_crash: Literal["unscored", "zero"] = "unscored"
    sandbox: bool = False

    @property
    def module(self) -> str:
        """Module of the function, or ""."""
        return self.function.partition(":")[0]

    @property
    def without_folders(self) -> AgentConfig:
        """Return the config with files as bare names: cache keys cover their content, not their location."""
        return replace(self, files=tuple(PurePath(file).name for file in self.files))

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.function):
            raise ConfigError("give either command, such as ['python', 'agent.py'], or function = 'module:function'")
        if self.function and not all(self.function.partition(":")):
            raise ConfigError(f"function = {self.function!r} is not written as module:function")
        if own := [name for name in RESERVED if name in self.env]:
            raise ConfigError(f"env.{own[0]} is set by rlcore for each episode: leave it out")
        names = [PurePath(file).name for file in self.files]
        if len(set(names)) < len(names):
            raise ConfigError("files has two files of one name, which one working folder cannot hold")


def player_of(episodes: EpisodeConfig, agent: AgentConfig | None) -> Literal["none", "tools", "agent"]:
    """Return the row of the table of players: an agent, episodes with tools, or neither."""
    return "agent" if agent else "tools" if episodes.has_tools else "none"
