"""The engines of :mod:`benchmarks.rollout`, each a context that completes tasks of forced lengths and checks them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM, LogitsProcessorList

from benchmarks.peers import work
from benchmarks.peers.forced import ForcedLengths, decode_forced
from rlcore.config import EngineConfig
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.sampling.vllm.client import Address, call
from rlcore.sampling.vllm.process import ServerProcess, ServerSpec

LARGEST, LONGEST = 256, 128  # completions at once, tokens of one


@dataclass(frozen=True, kw_only=True)
class Task:
    """The prompt of each completion, and its length, int64 [S]."""

    prompts: Sequence[tuple[int, ...]]
    lengths: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Engine:
    """``complete`` makes all completions of a task; ``largest``: how many at once it is asked for."""

    complete: Callable[[Task], None]
    cpu_seconds: Callable[[], float] = time.process_time
    largest: int = LARGEST


@contextmanager
def generate(model: LlamaForCausalLM) -> Iterator[Engine]:
    """One padded batch, decoded until its longest row has ended. Log-probabilities of the draws are not computed."""

    def complete(task: Task) -> None:
        width = max(map(len, task.prompts))
        token_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in task.prompts])
        with torch.inference_mode():
            output = model.generate(
                input_ids=token_ids,
                attention_mask=(token_ids != 0).long(),
                logits_processor=LogitsProcessorList([ForcedLengths(width, task.lengths)]),
                generation_config=_settings(int(task.lengths.max())),
            )
        ends = (output[:, width:] == work.EOS).int().argmax(-1) + 1
        assert ends.equal(task.lengths)

    yield Engine(complete=complete)


def _settings(max_new_tokens: int) -> GenerationConfig:
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    return GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=work.EOS, pad_token_id=0, **sampling)


@contextmanager
def continuous_batching(model: LlamaForCausalLM) -> Iterator[Engine]:
    """Paged, requests enter and leave as they end; its own log-probabilities are on.

    Made for flash attention on a GPU. With SDPA each token is masked against the keys of all requests, which at 256
    of them takes minutes: it is asked for 64 at most.
    """
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=640, max_batch_tokens=1024, return_logprobs=True, use_cuda_graph=False, seed=3
    )
    settings = _settings(LONGEST)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=config) as manager:

        def complete(task: Task) -> None:
            wanted = {}
            for prompt, length in zip(task.prompts, task.lengths.tolist(), strict=True):
                wanted[manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=-1)] = length
            while wanted:
                result = manager.get_result(timeout=600)
                assert result is not None and result.is_finished(), result
                assert len(result.generated_tokens) == wanted.pop(result.request_id)

        yield Engine(complete=complete, largest=64)


@contextmanager
def native(model: LlamaForCausalLM) -> Iterator[Engine]:
    """Our engine's decoding: one prefill per prompt, ended rows leave the batch; with log-probabilities."""
    model.requires_grad_(False).eval().set_attn_implementation(GROUPED_ATTENTION)

    def complete(task: Task) -> None:
        assert decode_forced(model, task.prompts, task.lengths).lengths.equal(task.lengths)

    yield Engine(complete=complete)


@contextmanager
def vllm(model: LlamaForCausalLM) -> Iterator[Engine]:
    """A server of its own; one HTTP request per completion, prefix cache on, with log-probabilities.

    Processor time is that of the server's processes and ours.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        work.make_tokenizer("tiny").save_pretrained(folder)
        spec = ServerSpec(
            model=Path(folder),
            exchange=Path(tempfile.mkdtemp(dir=folder)),
            config=EngineConfig(kind="vllm", python=os.environ["ENGINE_PYTHON"], kv_cache_gib=1.0),
            dtype="float32",
            max_model_len=512,
            max_concurrent=LARGEST,
        )
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        server = ServerProcess(spec)
        try:
            server.wait_until_ready(lambda line: None)
            with ThreadPoolExecutor(LARGEST) as pool:
                yield Engine(complete=lambda task: _ask(server.address, pool, task), cpu_seconds=_tree_seconds)
        finally:
            server.stop()


def _ask(address: Address, pool: ThreadPoolExecutor, task: Task) -> None:
    def one(number: int) -> None:
        length = int(task.lengths[number])
        settings = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True, "seed": number, "logprobs": 0}
        payload: Mapping[str, Any] = {"token_ids": list(task.prompts[number]), "sampling_params": settings}
        status, answer = call(address, "/inference/v1/generate", payload, seconds=600.0)
        assert status == 200 and len(answer["choices"][0]["token_ids"]) == length, answer

    list(pool.map(one, range(len(task.prompts))))


def _tree_seconds() -> float:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


ENGINES: Mapping[str, Callable[[LlamaForCausalLM], AbstractContextManager[Engine]]] = {
    "generate": generate,
    "continuous batching": continuous_batching,
    "native": native,
    "vLLM": vllm,
}
