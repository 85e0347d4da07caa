"""Settings of episodes that programs of the user play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Literal

from rlcore.config.bounds import PositiveInt
from rlcore.config.episodes import EpisodeConfig
from rlcore.errors import ConfigError
from rlcore.strict_config import Between

RESERVED = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "RLCORE_TASK", "HOME", "TMPDIR")
"""Environment variables that rlcore sets for each episode."""
_MAX_REWARD = 1e6  # so that the statistics of a group are finite


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Program that plays the episodes by calls of an OpenAI-compatible API, which the policy answers.

    ``command`` starts it, or ``function`` (``module:function``, called with the task). Each episode has its own process
    and an empty working folder with copies of ``files``, which may be folders. ``columns``: columns of the task's row
    that it may read; none by default, because they may contain the answer. ``env``: further environment variables,
    without secrets.
    ``max_prompt_tokens``: of a first request, with system message and tools; ``sampling.max_new_tokens`` limits
    everything after it. ``branches``: the samples of an episode whose history was changed: train on all, on the one
    with the last answer, or refuse such an episode. ``on_crash``: an episode whose agent fails has no score, or an
    empty answer and the own reward 0. ``reward_range``: least and greatest reward that it may post. ``sandbox``:
    bubblewrap, with limits, without files and network of this machine, except ``sandbox_read``: more paths that it may
    read. Without, it has the rights of the user, and reads the keys of other episodes.
    """

    command: tuple[str, ...] = ()
    function: str = ""
    files: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: Annotated[float, Between(0.1, 604_800.0)] = 600.0  # of an episode
    max_calls: PositiveInt = 32  # of an episode
    max_prompt_tokens: PositiveInt = 1024
    max_concurrent: PositiveInt = 16  # agents at the same time
    branches: Literal["train", "main", "refuse"] = "train"
    on_crash: Literal["unscored", "zero"] = "unscored"
    reward_range: tuple[float, ...] = (0.0, 1.0)
    sandbox: bool = True
    sandbox_read: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Module of the function, or ""."""
        return self.function.partition(":")[0]

    @property
    def without_folders(self) -> AgentConfig:
        """Return the config with files as bare names: cache keys cover their content, not their location."""
        return replace(self, files=tuple(PurePath(file).name for file in self.files), sandbox_read=())

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
        if len(bounds := self.reward_range) != 2 or not -_MAX_REWARD <= bounds[0] < bounds[1] <= _MAX_REWARD:
            what = f"must be two numbers from -{_MAX_REWARD:g} to {_MAX_REWARD:g}, the lower first"
            raise ConfigError(f"reward_range = {list(bounds)}: {what}")
        if self.sandbox_read and not self.sandbox:
            raise ConfigError("sandbox_read has no effect with sandbox = false: leave it out")


def player_of(episodes: EpisodeConfig, agent: AgentConfig | None) -> Literal["none", "tools", "agent"]:
    """Return the row of the table of players: an agent, episodes with tools, or neither."""
    return "agent" if agent else "tools" if episodes.has_tools else "none"
