"""Engine of a stage: native, or vLLM servers, started or running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rlcore.choices import choices
from rlcore.config import AgentConfig, EngineConfig, SamplingConfig
from rlcore.models.runtime import Runtime
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.tasks.steps.vllm_engine import open_vllm_servers
from rlcore.tasks.steps.workload import Workload
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
