"""The engine of a stage: built in, vLLM in this process, or vLLM servers, started for it or running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlcore.choices import choices
from rlcore.config import EngineConfig, SamplingConfig
from rlcore.hardware.runtime import Runtime
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.tasks.steps.vllm_engine import open_vllm_in_process, open_vllm_servers
from rlcore.tasks.steps.workload import Workload
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt


def longest(prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Tokens of the longest prompt and its completion."""
    return max((len(prompt.token_ids) for prompt in prompts), default=0) + max_new_tokens


def sampling_engine(sampling: SamplingConfig) -> EngineConfig:
    """The engine that a section samples with: a stage is given its sections with one."""
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
    """The engine that ``config`` names, serving the checkpoint ``model`` as version 0.

    A policy that is an adapter on it is sent as such where the server is one of ours, else merged into its base.

    Raises:
        ConfigError: ``max_model_len`` is more than the model has, the GPUs are not there, or the weights cannot go the
            way that is named.
        SamplingError: the server does not start, or vLLM is not installed here.
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
    yield NativeSampler(runtime.load_frozen(model), tokenizer, max_concurrent=work.max_concurrent)


_Open = Callable[
    [Path, ChatTokenizer, EngineConfig, Workload, Runtime, Callable[[str], None]], AbstractContextManager[Sampler]
]
ENGINES: Mapping[str, _Open] = choices(
    "engine.kind", {"native": _native, "vllm": open_vllm_servers, "vllm_inprocess": open_vllm_in_process}
)
