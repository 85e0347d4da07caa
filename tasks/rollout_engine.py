"""The rollout engine of a run: built in, or vLLM servers, started for it or running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlcore.config import SamplingConfig
from rlcore.errors import ConfigError
from rlcore.sampling.base import Sampler
from rlcore.sampling.native import NativeSampler
from rlcore.sampling.replicas import open_servers
from rlcore.sampling.vllm_process import ServerSpec
from rlcore.sampling.weight_files import exchange_folder, max_positions
from rlcore.tokenization import ChatTokenizer
from tasks.runtime import Runtime


@contextmanager
def open_engine(
    model: Path, tokenizer: ChatTokenizer, config: SamplingConfig, runtime: Runtime, progress: Callable[[str], None]
) -> Iterator[Sampler]:
    """The engine that ``config`` names, serving the checkpoint ``model`` as version 0.

    Raises:
        ConfigError: ``max_model_len`` is more than the model has.
        SamplingError: the server does not start.
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
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    urls = engine.urls or ("",) * engine.replicas
    specs = [
        ServerSpec(
            model=model.resolve(),
            exchange=exchange_folder(engine.exchange, num_bytes=num_bytes * len(urls)),
            config=engine,
            dtype=str(engine_dtype(config, runtime)).removeprefix("torch."),
            max_model_len=engine.max_model_len or positions,
            max_concurrent=-(-config.max_concurrent // len(urls)),
            url=url,
        )
        for url in urls
    ]
    with open_servers(specs, tokenizer, progress) as sampler:
        yield sampler


def engine_dtype(config: SamplingConfig, runtime: Runtime) -> torch.dtype:
    """The precision that the engine computes in."""
    if config.engine.kind == "native" or config.engine.dtype == "auto":
        return runtime.compute_dtype
    dtype: torch.dtype = getattr(torch, config.engine.dtype)
    return dtype


def sync_dtype(config: SamplingConfig, runtime: Runtime) -> torch.dtype:
    """The coarser precision of engine and trainer: it bounds how well the two can agree."""
    return max(engine_dtype(config, runtime), runtime.compute_dtype, key=lambda dtype: torch.finfo(dtype).eps)
