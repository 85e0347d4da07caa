"""The rollout engine of a run: built in, vLLM in this process, or vLLM servers, started for it or running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from rlcore.config import AdapterConfig, SamplingConfig
from rlcore.errors import ConfigError
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import open_servers
from rlcore.sampling.vllm import open_in_process
from rlcore.sampling.vllm_process import ADAPTER_RANKS, ServerSpec
from rlcore.sampling.vllm_transfer import choose_transfer
from rlcore.sampling.weight_files import exchange_folder, max_positions
from rlcore.tokenization import ChatTokenizer
from tasks.runtime import Runtime


@contextmanager
def open_engine(
    model: Path,
    tokenizer: ChatTokenizer,
    config: SamplingConfig,
    runtime: Runtime,
    progress: Callable[[str], None],
    *,
    adapter: AdapterConfig,
) -> Iterator[Sampler]:
    """The engine that ``config`` names, serving the checkpoint ``model`` as version 0.

    A policy that is an ``adapter`` on it is sent as such where the server is one of ours, else merged into its base.

    Raises:
        ConfigError: ``max_model_len`` is more than the model has, or the weights cannot go the way that is named.
        SamplingError: the server does not start, or vLLM is not installed here.
    """
    engine = config.engine
    if engine.kind == "native":
        yield NativeSampler(runtime.load_frozen(model), tokenizer, max_concurrent=config.max_concurrent)
        return
    positions = max_positions(model)
    if engine.max_model_len > positions:
        raise ConfigError(
            f"the model has {positions} positions", where="sampling.engine.max_model_len", fix="0 takes all of them"
        )
    spec = ServerSpec(
        model=model.resolve(),
        exchange=Path(),  # each server has its own
        config=engine,
        dtype=str(engine_dtype(config, runtime)).removeprefix("torch."),
        max_model_len=engine.max_model_len or positions,
        max_concurrent=config.max_concurrent,
        prefill_in_parts=runtime.device.type != "cpu",
    )
    if engine.kind == "vllm_inprocess":
        with open_in_process(spec, tokenizer, runtime.device, progress) as in_process:
            yield in_process
        return
    with open_servers(server_specs(spec, runtime.device, adapter), tokenizer, progress) as servers:
        yield servers


def server_specs(spec: ServerSpec, device: torch.device, adapter: AdapterConfig) -> list[ServerSpec]:
    """The servers that share the work of ``spec``, each with a folder of its own for weights from ``device``.

    Raises:
        ConfigError: the weights cannot go the way that is named.
    """
    engine = spec.config
    urls = engine.urls or ("",) * engine.replicas
    num_bytes = len(urls) * sum(path.stat().st_size for path in spec.model.glob("*.safetensors"))
    transfer = choose_transfer(engine, device, num_bytes=num_bytes)
    return [
        replace(
            spec,
            exchange=exchange_folder(engine.exchange, num_bytes=num_bytes),
            max_concurrent=-(-spec.max_concurrent // len(urls)),
            url=url,
            transfer=transfer,
            adapter_rank=0 if url or adapter.rank > ADAPTER_RANKS[-1] else adapter.rank,
        )
        for url in urls
    ]


def engine_dtype(config: SamplingConfig, runtime: Runtime) -> torch.dtype:
    """The precision that the engine computes in."""
    if config.engine.kind == "native" or config.engine.dtype == "auto":
        return runtime.compute_dtype
    dtype: torch.dtype = getattr(torch, config.engine.dtype)
    return dtype


def sync_dtype(config: SamplingConfig, runtime: Runtime) -> torch.dtype:
    """The coarser precision of engine and trainer: it bounds how well the two can agree."""
    return max(engine_dtype(config, runtime), runtime.compute_dtype, key=lambda dtype: torch.finfo(dtype).eps)
