"""Seconds that a vLLM server on this machine needs for new weights, by the way that they take: `make bench-sync`.

Per way one server; the first update, with its handshake, is not counted. Random weights, float32.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.peers import work
from rlcore.config import AdapterConfig, EngineConfig, ModelConfig, TransferKind
from rlcore.models.importing import import_model
from rlcore.models.lora import add_adapter
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.server import open_vllm
from rlcore.sampling.vllm.weights import exchange_folder
from rlcore.tokenization import ChatTokenizer
from rlcore.training.local import merged_state

WAYS: tuple[TransferKind, ...] = ("file", "shared_memory", "gloo")
RANK = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter of the engine's environment")
    parser.add_argument("--sizes", nargs="+", choices=["tiny", "smollm2"], default=["tiny", "smollm2"])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "adapter"], default=[*WAYS, "adapter"])
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads; seconds, median (all)")
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = work.make_model(size)
            model.save_pretrained(folder)
            work.make_tokenizer(size).save_pretrained(folder)
            for way in options.ways:
                seconds = measure(model, Path(folder), way, python=options.python, num_updates=options.updates)
                shown = ", ".join(f"{value:.3f}" for value in seconds)
                print(f"{size} {way}: {statistics.median(seconds):.3f} ({shown})", flush=True)
    return 0


def measure(model: LlamaForCausalLM, folder: Path, way: str, *, python: str, num_updates: int) -> list[float]:
    """Seconds of each update but the first: the file written, paused, loaded, cache reset, resumed."""
    adapted = way == "adapter"
    spec = ServerSpec(
        model=folder,
        exchange=exchange_folder(str(folder) if way == "file" else "", num_bytes=0),  # on disk, or in memory
        config=EngineConfig(kind="vllm", python=python, kv_cache_gib=0.25),
        dtype="float32",
        max_model_len=256,
        max_concurrent=4,
        transfer="file" if adapted else way,  # type: ignore[arg-type]
        adapter_rank=RANK if adapted else 0,
    )
    # Nothing is sampled: the tokenizer is that of a small model for chats.
    import_model(ModelConfig(source="scratch"), folder / way, seed=0)
    tokenizer = ChatTokenizer.load(folder / way)
    policy = add_adapter(model, AdapterConfig(rank=RANK), "policy", seed=0) if adapted else model
    with open_vllm(spec, tokenizer, lambda line: None) as engine:
        return [update(engine.load_weights, merged_state(policy), number) for number in range(num_updates + 1)][1:]


def update(load: Callable[..., None], state: Mapping[str, torch.Tensor], number: int) -> float:
    """Seconds of one update."""
    started = time.perf_counter()
    load(state, policy_version=number + 1)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
