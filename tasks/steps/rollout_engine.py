"""Sampler of a stage: its engine, native or vLLM servers, and episodes with tools or agents on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from rlcore.choices import choices
from rlcore.config import AgentConfig, EngineConfig, EpisodeConfig, SamplingConfig, player_of
from rlcore.data_contracts.contracts.search_corpus import read_corpus
from rlcore.data_contracts.errors import ContractError
from rlcore.environments.environment import import_environment
from rlcore.environments.episodes import EpisodeSampler
from rlcore.environments.search import Passage
from rlcore.environments.table import ToolResources, build_tools
from rlcore.errors import DataError
from rlcore.models.runtime import Runtime
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.sandbox.pool import SandboxPool
from rlcore.tasks.steps.runtime import Workload
from rlcore.tasks.steps.vllm_engine import open_vllm_servers
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt


def longest(prompts: Sequence[Prompt], max_new_tokens: int, agent: AgentConfig | None = None) -> int:
    """Return the tokens of the longest prompt and its completion; an agent may write a longer prompt."""
    return max([agent.max_prompt_tokens if agent else 0, *(len(each.token_ids) for each in prompts)]) + max_new_tokens


def sampling_engine(sampling: SamplingConfig) -> EngineConfig:
    """Return the engine of a section, which stages receive with it."""
    assert sampling.engine is not None
    return sampling.engine


@contextmanager
def open_engine(
    model: Path,
    tokenizer: ChatTokenizer,
    *,
    config: EngineConfig,
    work: Workload,
    runtime: Runtime,
    progress: Callable[[str], None],
) -> Iterator[Sampler]:
    """Open the engine of ``config``, serving the checkpoint ``model`` as version 0.

    A policy that is a LoRA on it is sent as such to servers that rlcore started, else merged into its base.
    Raises:
        ConfigError: ``max_model_len`` exceeds the model's, GPUs do not exist, or the weight transfer is impossible.
        SamplingError: the server does not start.
    """
    with ENGINES[config.kind](model, tokenizer, config, work, runtime, progress) as engine:
        yield engine


@contextmanager
def _native(
    model: Path,
    tokenizer: ChatTokenizer,
    config: EngineConfig,
    work: Workload,
    runtime: Runtime,
    progress: Callable[[str], None],
) -> Iterator[Sampler]:
    served = runtime.of_native_engine(work.adapter).load_frozen(model)
    yield NativeSampler(served, tokenizer, max_concurrent=work.max_concurrent)


_Open = Callable[
    [Path, ChatTokenizer, EngineConfig, Workload, Runtime, Callable[[str], None]], AbstractContextManager[Sampler]
]
ENGINES: Mapping[str, _Open] = choices("engine.kind", {"native": _native, "vllm": open_vllm_servers})


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
