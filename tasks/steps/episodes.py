"""The tools of a run: which episodes its stages sample, and the engine that plays them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from data_contracts.errors import ContractError
from data_contracts.search_corpus import read_corpus
from rlcore.config import EpisodeConfig
from rlcore.errors import DataError
from rlcore.sampling.base import Sampler
from rlcore.sampling.episodes import EpisodeSampler
from rlcore.sandbox.pool import SandboxPool
from rlcore.tokenization import ChatTokenizer
from rlcore.tools.search import Passage
from rlcore.tools.table import ToolResources, build_tools
from tasks.home.artifacts import file_sha256
from tasks.preset.run import RunConfig
from tasks.preset.sections import Sections, section_of
from tasks.preset.stages import sampling_of


@contextmanager
def with_tools(engine: Sampler, tokenizer: ChatTokenizer, config: EpisodeConfig) -> Iterator[Sampler]:
    """The engine itself where no tools are named, else one that plays episodes on it.

    Raises:
        DataError: the search tool's corpus cannot be read or breaks its contract.
        ModelError: the chat template cannot show a tool's output.
    """
    if not config.tools:
        yield engine
        return
    with ExitStack() as stack:
        sandbox = stack.enter_context(SandboxPool()) if "python" in config.tools else None
        resources = ToolResources(passages=_passages(config), sandbox=sandbox)
        yield EpisodeSampler(engine, tokenizer, build_tools(config, resources), config)


def episodes_of(config: RunConfig) -> EpisodeConfig:
    """The episodes in which the checkpoints of a run are evaluated: those of its stages that sample, which agree."""
    found = (sampling for stage in config.stages.values() if (sampling := sampling_of(stage)))
    return next((sampling.episodes for sampling in found), EpisodeConfig())


def evaluation_sections(config: RunConfig) -> Sections:
    """What an evaluation reads: its settings, the machine's and its engine's, and the episodes of the RL runs."""
    evaluation, hardware = (section_of(config, name) for name in ("evaluation", "hardware"))
    engine, episodes = config.engine_of(config.evaluation), episodes_of(config)
    return Sections({"evaluation": evaluation, "hardware": hardware, "engine": engine, "episodes": episodes})


def corpus_digest(config: EpisodeConfig) -> str:
    """SHA-256 of the search tool's corpus, empty without one.

    Raises:
        DataError: the file cannot be read.
    """
    if not config.corpus:
        return ""
    try:
        return file_sha256(Path(config.corpus))
    except OSError as error:
        raise DataError(
            f"cannot read the corpus: {error.strerror}", where=config.corpus, fix="set sampling.episodes.corpus"
        ) from error


def evaluation_corpus(config: Sections) -> str:
    """:func:`corpus_digest` of the episodes that are evaluated."""
    return corpus_digest(config.episodes)


def _passages(config: EpisodeConfig) -> list[Passage]:
    if not config.corpus:
        return []
    try:
        rows = read_corpus(Path(config.corpus))
    except ContractError as error:
        raise DataError(error.what, where=error.where, fix=error.fix) from error
    return [Passage(passage_id=name, text=text) for name, text in rows]
