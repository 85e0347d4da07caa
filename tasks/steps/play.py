"""Sampler of a stage: its engine, or episodes with tools or agents on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from rlcore.choices import choices
from rlcore.config import AgentConfig, EpisodeConfig, player_of
from rlcore.data_contracts.contracts.search_corpus import read_corpus
from rlcore.data_contracts.errors import ContractError
from rlcore.environments.environment import import_environment
from rlcore.environments.episodes import EpisodeSampler
from rlcore.environments.search import Passage
from rlcore.environments.table import ToolResources, build_tools
from rlcore.errors import DataError
from rlcore.sampling.base import Sampler
from rlcore.sandbox.pool import SandboxPool
from rlcore.text.tokenization import ChatTokenizer


@contextmanager
def open_player(
    engine: Sampler, tokenizer: ChatTokenizer, config: EpisodeConfig, agent: AgentConfig | None = None
) -> Iterator[Sampler]:
    """Return the engine itself without tools and agent, else a sampler that plays episodes on it.

    Raises:
        ConfigError: the environment cannot be imported, or is invalid.
        DataError: the search corpus cannot be read or breaks its contract.
        ModelError: the chat template cannot render a tool's output.
    """
    with PLAYERS[player_of(config, agent)](engine, tokenizer, config, agent) as sampler:
        yield sampler


def _alone(
    engine: Sampler, tokenizer: ChatTokenizer, config: EpisodeConfig, agent: AgentConfig | None
) -> AbstractContextManager[Sampler]:
    return nullcontext(engine)


def _with_agent(
    engine: Sampler, tokenizer: ChatTokenizer, config: EpisodeConfig, agent: AgentConfig | None
) -> AbstractContextManager[Sampler]:
    from rlcore.agents.sampler import AgentSampler  # brings a server

    assert agent is not None
    return nullcontext(AgentSampler(engine, tokenizer, agent))


@contextmanager
def _with_tools(
    engine: Sampler, tokenizer: ChatTokenizer, config: EpisodeConfig, agent: AgentConfig | None
) -> Iterator[Sampler]:
    with ExitStack() as stack:
        sandbox = stack.enter_context(SandboxPool()) if "python" in config.tools else None
        resources = ToolResources(passages=_passages(config), sandbox=sandbox)
        tools = build_tools(config, resources)
        environment = import_environment(config.environment, config.options) if config.environment else None
        yield EpisodeSampler(engine, tokenizer, tools, config, environment)


_Play = Callable[[Sampler, ChatTokenizer, EpisodeConfig, AgentConfig | None], AbstractContextManager[Sampler]]
PLAYERS: Mapping[str, _Play] = choices("episodes", {"none": _alone, "tools": _with_tools, "agent": _with_agent})


def _passages(config: EpisodeConfig) -> list[Passage]:
    if not config.search_corpus:
        return []
    try:
        rows = read_corpus(Path(config.search_corpus))
    except ContractError as error:
        raise DataError(error.what, where=error.where, fix=error.fix) from error
    return [Passage(passage_id=name, text=text) for name, text in rows]
