"""vLLM as the engine of a stage: servers, started or running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlcore.config import EngineConfig, TransferKind
from rlcore.errors import ConfigError
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.models.architectures import positions_of
from rlcore.models.runtime import Runtime
from rlcore.sampling.base import Sampler
from rlcore.sampling.replicas import open_servers
from rlcore.sampling.vllm.gpu_assignment import (
    VisibleGpus,
    assign_gpus,
    choose_transfer,
    is_installed,
    memory_fractions,
    shares_trainer_gpu,
    visible_gpus,
)
from rlcore.sampling.vllm.process import ADAPTER_RANKS, ServerSpec
from rlcore.sampling.vllm.weights import make_weight_dir
from rlcore.tasks.steps.runtime import Workload, engine_dtype
from rlcore.text.tokenization import ChatTokenizer


@contextmanager
def open_vllm_servers(
    model: Path,
    tokenizer: ChatTokenizer,
    config: EngineConfig,
    work: Workload,
    runtime: Runtime,
    progress: Callable[[str], None],
) -> Iterator[Sampler]:
    """Open the servers of ``config``: those of its addresses, or new ones on the GPUs that it names."""
    empty_cache()  # the engine may use the free memory
    cards = visible_gpus(runtime.device, learns=work.learns)
    whole = _whole_spec(model, config, work, runtime, cards)
    specs = server_specs(whole, cards, runtime.device, lora_rank=work.adapter.rank, can_send=is_installed())
    with open_servers(specs, tokenizer, progress) as servers:
        yield servers


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Placement of servers: GPUs, fraction of them, whether shared with the trainer, and the weight transfer."""

    dealt: Sequence[tuple[int, ...]]
    fractions: Sequence[float]
    shares: Sequence[bool]
    transfer: TransferKind


def place(
    config: EngineConfig, cards: VisibleGpus, device: torch.device, *, num_bytes: int, can_send: bool
) -> Placement:
    """Assign servers to GPUs for weights of ``num_bytes`` from ``device``; ``can_send``: vLLM is installed here too.

    Raises:
        ConfigError: the GPUs do not exist, or the weight transfer is impossible.
    """
    dealt = [() for _ in config.urls] or assign_gpus(config, cards)
    shares = [] if config.urls else shares_trainer_gpu(dealt, cards)
    return Placement(
        dealt=dealt,
        fractions=memory_fractions(config, dealt, cards),
        shares=shares,
        transfer=choose_transfer(config, device, num_bytes=num_bytes, shares=shares, can_send=can_send),
    )


def server_specs(
    whole: ServerSpec, cards: VisibleGpus, device: torch.device, *, lora_rank: int, can_send: bool
) -> list[ServerSpec]:
    """Return the specs of servers that share the work of ``whole``, and a folder for weights from ``device``.

    Raises:
        ConfigError: the GPUs do not exist, or the weight transfer is impossible.
    """
    config = whole.config
    num_bytes = sum(path.stat().st_size for path in whole.model.glob("*.safetensors"))
    placed = place(config, cards, device, num_bytes=num_bytes, can_send=can_send)
    exchange = make_weight_dir(config.weight_dir, num_bytes=num_bytes)
    urls = config.urls or ("",) * len(placed.dealt)
    return [
        replace(
            whole,
            weight_dir=exchange,
            max_concurrent=-(-whole.max_concurrent // len(placed.dealt)),
            url=url,
            transfer=placed.transfer,
            devices=devices,
            gpu_memory_utilization=fraction,
            sleeps=whole.sleeps and cards.trainer in devices,
            lora_rank=0 if url or lora_rank > ADAPTER_RANKS[-1] else lora_rank,
        )
        for url, devices, fraction in zip(urls, placed.dealt, placed.fractions, strict=True)
    ]


def _whole_spec(model: Path, config: EngineConfig, work: Workload, runtime: Runtime, cards: VisibleGpus) -> ServerSpec:
    return ServerSpec(
        model=model.resolve(),
        weight_dir=Path(),
        config=config,
        dtype=str(engine_dtype(config, runtime, work.adapter)).removeprefix("torch."),
        max_model_len=_model_length(model, config, work),
        max_concurrent=work.max_concurrent,
        prefill_in_parts=cards.count > 0,
        enforce_eager=config.enforce_eager if config.enforce_eager is not None else cards.count == 0,
        trainer_moves=work.learns_meanwhile,
        sleeps=work.takes_turns,
    )


def _model_length(model: Path, config: EngineConfig, work: Workload) -> int:
    """Return the engine's positions: for the longest text, and one to score a whole text."""
    positions = positions_of(model)
    if config.max_model_len > positions:
        raise ConfigError(
            f"the model has {positions} positions",
            where="engine.max_model_len",
            fix="set it to 0: the engine then makes room for the run's longest text",
        )
    return config.max_model_len or min(positions, work.max_tokens + 1)
