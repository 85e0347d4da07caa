"""The engine of a stage: built in, vLLM in this process, or vLLM servers, started for it or running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from rlcore.config import AdapterConfig, EngineConfig, SamplingConfig, TransferKind
from rlcore.errors import ConfigError
from rlcore.hardware.out_of_memory import free_cached
from rlcore.hardware.runtime import Runtime
from rlcore.models.architectures import positions_of
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import open_servers
from rlcore.sampling.vllm.gpu_assignment import (
    Cards,
    choose_transfer,
    deal,
    is_installed,
    memory_fractions,
    on_the_trainers,
    visible_cards,
)
from rlcore.sampling.vllm.in_process import open_in_process
from rlcore.sampling.vllm.process import ADAPTER_RANKS, ServerSpec
from rlcore.sampling.vllm.weights import exchange_folder
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a stage asks of its engine, which is sized for it.

    ``max_tokens``: of the longest prompt and its completion. ``learns``: a learner computes beside the engine, and
    ``learns_meanwhile``, while it samples. ``adapter``: the shape of the policy's, on the checkpoint that is served.
    """

    max_concurrent: int
    max_tokens: int
    learns: bool = False
    learns_meanwhile: bool = False
    adapter: AdapterConfig = field(default_factory=AdapterConfig)


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
    if config.kind == "native":
        yield NativeSampler(runtime.load_frozen(model), tokenizer, max_concurrent=work.max_concurrent)
        return
    free_cached()  # what is free is what the engine may take
    cards = visible_cards(runtime.device, learns=work.learns)
    whole = _whole_spec(model, config, work, runtime, cards)
    if config.kind == "vllm_inprocess":
        own = () if cards.trainer is None else (cards.trainer,)
        (fraction,) = memory_fractions(config, [own], cards)
        alone = replace(whole, devices=own, memory_fraction=fraction)
        turns = bool(own) and work.learns
        with open_in_process(alone, tokenizer, sleeps=turns, free=free_cached, progress=progress) as in_process:
            yield in_process
        return
    specs = server_specs(whole, cards, runtime.device, adapter_rank=work.adapter.rank, can_send=is_installed())
    with open_servers(specs, tokenizer, progress) as servers:
        yield servers


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """For each server its GPUs, its part of them, and whether one is the trainer's; how weights get to all of them."""

    dealt: Sequence[tuple[int, ...]]
    fractions: Sequence[float]
    shares: Sequence[bool]
    transfer: TransferKind


def place(config: EngineConfig, cards: Cards, device: torch.device, *, num_bytes: int, can_send: bool) -> Placement:
    """Where servers go, for weights of ``num_bytes`` from ``device``; ``can_send``: vLLM is installed here too.

    Raises:
        ConfigError: the GPUs are not there, or the weights cannot go the way that is named.
    """
    dealt = [() for _ in config.urls] or deal(config, cards)
    shares = [] if config.urls else on_the_trainers(dealt, cards)
    return Placement(
        dealt=dealt,
        fractions=memory_fractions(config, dealt, cards),
        shares=shares,
        transfer=choose_transfer(config, device, num_bytes=num_bytes, shares=shares, can_send=can_send),
    )


def server_specs(
    whole: ServerSpec, cards: Cards, device: torch.device, *, adapter_rank: int, can_send: bool
) -> list[ServerSpec]:
    """The servers that share the work of ``whole`` and a folder for weights from ``device``.

    Raises:
        ConfigError: the GPUs are not there, or the weights cannot go the way that is named.
    """
    config = whole.config
    num_bytes = sum(path.stat().st_size for path in whole.model.glob("*.safetensors"))
    placed = place(config, cards, device, num_bytes=num_bytes, can_send=can_send)
    exchange = exchange_folder(config.exchange, num_bytes=num_bytes)
    urls = config.urls or ("",) * len(placed.dealt)
    return [
        replace(
            whole,
            exchange=exchange,
            max_concurrent=-(-whole.max_concurrent // len(placed.dealt)),
            url=url,
            transfer=placed.transfer,
            devices=devices,
            memory_fraction=fraction,
            adapter_rank=0 if url or adapter_rank > ADAPTER_RANKS[-1] else adapter_rank,
        )
        for url, devices, fraction in zip(urls, placed.dealt, placed.fractions, strict=True)
    ]


def engine_dtype(config: EngineConfig, runtime: Runtime) -> torch.dtype:
    """The precision that the engine computes in."""
    if config.kind == "native" or config.dtype == "auto":
        return runtime.compute_dtype
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _whole_spec(model: Path, config: EngineConfig, work: Workload, runtime: Runtime, cards: Cards) -> ServerSpec:
    """What one server would serve that has all of the work."""
    return ServerSpec(
        model=model.resolve(),
        exchange=Path(),  # of servers alone
        config=config,
        dtype=str(engine_dtype(config, runtime)).removeprefix("torch."),
        max_model_len=_model_length(model, config, work),
        max_concurrent=work.max_concurrent,
        prefill_in_parts=cards.count > 0,
        eager=config.eager if config.eager is not None else cards.count == 0,
        trainer_moves=work.learns_meanwhile,
    )


def _model_length(model: Path, config: EngineConfig, work: Workload) -> int:
    """Positions that the engine makes room for: those of the longest text, and one to score a whole text."""
    positions = positions_of(model)
    if config.max_model_len > positions:
        raise ConfigError(
            f"the model has {positions} positions",
            where="engine.max_model_len",
            fix="set it to 0: the engine then makes room for the run's longest text",
        )
    return config.max_model_len or min(positions, work.max_tokens + 1)
