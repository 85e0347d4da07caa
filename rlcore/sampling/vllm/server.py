"""Rollouts from a vLLM server: token ids in, token ids and log-probabilities out, with versioned weights.

Each request is one completion with its own seed, independent of others; the prefix cache shares the prefill of equal
prompts. A dead server is restarted with the weights that it served, and missing completions are requested again.

A server on the learner's GPU sleeps during an update. It wakes for new weights, and its cache at the first request, so
that cache and memory for loading are not allocated together.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlcore.errors import SamplingError
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.progress import advance
from rlcore.sampling.base import SamplingParams, rejection_reason
from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl, EngineUnreachableError, address_of, call
from rlcore.sampling.vllm.process import ServerProcess, ServerSpec, is_healthy
from rlcore.sampling.vllm.server_sync import ADAPTER, WEIGHTS, WeightSync, publish
from rlcore.sampling.vllm.transfer import send_file
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, differing_parts
from rlcore.seeding import derive_seed
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

MAX_ATTEMPTS = 3  # per completion
_CACHE = "kv_cache"  # vLLM's tag of the memory of keys and values
_NO_NUMBER = -9999.0  # vLLM's value for a log-probability of NaN
_WATCH_SECONDS = 0.25
_PAGE_SECONDS = 5.0
_LINE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{.*\})? (\S+)$", re.MULTILINE)
_PEAKS = {
    "num_requests_running": "engine/running",
    "num_requests_waiting": "engine/waiting",
    "kv_cache_usage_perc": "engine/kv_cache_usage",
}
_COUNTS = ("generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class _Missed:
    """Failed attempt, which is retried."""

    reason: str


class VllmSampler:
    """Rollout engine in separate processes; see :class:`rlcore.sampling.base.Sampler` .

    ``spec.max_concurrent`` bounds concurrent requests. Initially it serves ``spec.model`` as version 0.
    """

    def __init__(self, spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> None:
        """Start the server or connect to it.

        Raises:
            SamplingError: The server does not start, or does not answer.
        """
        self._spec, self._tokenizer, self._progress = spec, tokenizer, progress
        self.served, self.policy_version = Weights(path=spec.model), 0
        self.asleep: tuple[str, ...] = ()
        self.control: EngineControl
        self.sync = WeightSync([self], spec)
        self._process: ServerProcess | None = None
        self._watch = EngineWatch()
        self._pool = ThreadPoolExecutor(spec.max_concurrent, thread_name_prefix="vllm")
        if spec.url:
            self._attach(address_of(spec.url))
        else:
            self.start()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)  # running requests end with the server
        if self._process is not None:
            self._process.stop()
        self.sync.close()

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of completions per prompt. A completion that fails ``MAX_ATTEMPTS`` times is a failed rollout.

        Raises:
            SamplingError: The server is asleep, cannot be restarted, completes nothing, or computes NaN.
        """
        self._wake_cache()
        numbers = range(len(prompts)) if places is None else places
        groups = [
            [_Request(prompt, derive_seed(seed, index, sample)) for sample in range(params.num_samples)]
            for prompt, index in zip(prompts, numbers, strict=True)
        ]
        limit = self._spec.max_model_len
        made: dict[_Request, Rollout | FailedRollout] = {
            request: FailedRollout(prompt=request.prompt, reason=obstacle)
            for group in groups
            for request in group
            if (obstacle := rejection_reason(request.prompt, params.max_new_tokens, limit=limit))
        }
        with self._watch.over(lambda: self.control.address):
            self._complete([request for group in groups for request in group if request not in made], params, made)
        return [[made[request] for request in group] for group in groups]

    def take_metrics(self) -> dict[str, float]:
        return self._watch.take()

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Send the weights; see :meth:`rlcore.sampling.vllm.server_sync.WeightSync.send`."""
        self.sync.send(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the log-probability of each completion token under the served weights.

        The server scores only at temperature 1; others are computed from the whole vocabulary's scores, fast enough for
        checks only.
        """
        self._wake_cache()
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0 if temperature == 1.0 else -1}
        payload = self._adapter() | {"token_ids": [*prompt_ids, *completion_ids], "sampling_params": settings}
        seconds = self._spec.config.timeouts.for_request(1)
        answer = self._ask("/inference/v1/generate", payload, seconds=seconds)
        rows = answer["prompt_logprobs"][len(prompt_ids) :]
        return rescored(rows, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the parts whose weights differ in the server's precision, by the checksums of its workers."""
        seed = self.policy_version
        answer = self._ask("/collective_rpc", {"method": "weight_checksums", "args": [seed]})
        dtype = getattr(torch, self._spec.dtype)
        return differing_parts(answer["results"], state, is_adapter=self.served.is_adapter, dtype=dtype, seed=seed)

    def sleep(self) -> None:
        """Release the GPU that the server shares with the learner, until :meth:`load_weights`.

        Weights are dropped (vLLM's level 2), but the base of a LoRA rests in main memory (level 1).

        Raises:
            SamplingError: The server refused.
        """
        if not self._spec.sleeps or self.asleep:
            return
        try:
            self.control.ask(f"/sleep?level={1 if self._spec.lora_rank else 2}", {})
        except SamplingError:
            if self.is_alive():
                raise
        self.asleep = (WEIGHTS, _CACHE)

    def _wake_cache(self) -> None:
        """Allocate the cache after new weights, without which it answers no request."""
        if not self.asleep:
            return
        empty_cache()  # the server allocates outside of this process
        status = self._ask(f"/wake_up?tags={_CACHE}", {})["status"]
        if status != "awake":
            raise SamplingError(f"the engine is {status!r} after a wake-up", fix=self._log_tail())
        self.asleep = ()

    def _ask(self, path: str, payload: Mapping[str, Any], **settings: float) -> Any:
        """Return the answer about the weights; a dead server is restarted, and the request repeated."""
        if WEIGHTS in self.asleep:
            raise SamplingError("the engine is asleep and has no weights", fix="call load_weights first")
        try:
            return self.control.ask(path, payload, **settings)
        except SamplingError:
            if self.is_alive():
                raise
            self._restart_server()
            return self.control.ask(path, payload, **settings)

    def _complete(
        self, pending: list[_Request], params: SamplingParams, made: dict[_Request, Rollout | FailedRollout]
    ) -> None:
        reasons: dict[_Request, str] = {}
        num_requests, total = len(pending), len(made) + len(pending)
        for attempt in range(MAX_ATTEMPTS):
            if attempt and pending:
                self._progress(f"engine: retry completions={len(pending)} reason={reasons[pending[0]]}")
                self._watch.num_retries += len(pending)
                self._restart_server()
            outcomes = self._pool.map(lambda request: self._one(request, params), pending)
            for request, outcome in zip(pending, outcomes, strict=True):
                if isinstance(outcome, _Missed):
                    reasons[request] = outcome.reason
                else:
                    made[request] = outcome
                advance("answers", len(made), total)
            pending = [request for request in pending if request not in made]
        if pending and len(pending) == num_requests:
            raise SamplingError(
                f"the engine completed none of {num_requests} requests: {reasons[pending[0]]}", fix=self._log_tail()
            )
        for request in pending:
            made[request] = FailedRollout(prompt=request.prompt, reason=reasons[request])

    def _one(self, request: _Request, params: SamplingParams) -> Rollout | FailedRollout | _Missed:
        payload = self._adapter() | {
            "token_ids": list(request.prompt.token_ids),
            "sampling_params": settings_of(params, request.seed, self._tokenizer),
        }
        seconds = self._spec.config.timeouts.for_request(params.max_new_tokens)
        try:
            status, answer = call(self.control.address, "/inference/v1/generate", payload, seconds=seconds)
        except EngineUnreachableError as error:
            return _Missed(str(error))
        if status == 400:
            return FailedRollout(prompt=request.prompt, reason=f"the engine rejected the request: {str(answer)[:300]}")
        if status != 200:
            return _Missed(f"HTTP {status}: {str(answer)[:300]}")
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            return _Missed(f"the engine ended the completion with {choice['finish_reason']!r}")
        return rollout_of(request.prompt, choice, self._tokenizer)

    def _adapter(self) -> dict[str, Any]:
        """Return the adapter of a request; before the first one the base is the policy."""
        return {"model": ADAPTER} if self.served.is_adapter else {}

    def is_alive(self) -> bool:
        return is_healthy(self.control.address)

    def start(self) -> None:
        """Restart the server with the weights that it served last, read from a file.

        Raises:
            SamplingError: The server does not start, is external, or there is no file and no room for one.
        """
        if self._spec.url:
            raise SamplingError(
                "the external engine failed, and rlcore cannot restart it",
                where=self._spec.url,
                fix="restart it, then rerun: the run resumes from its newest checkpoint",
            )
        if self._process is not None:
            if not self.is_alive():
                self._progress(f"engine: restart, {self._log_tail()}")
            self._process.stop()
        empty_cache()  # the server may use the free memory
        self._process, self.asleep = ServerProcess(self._spec), ()
        self._process.wait_until_ready(self._progress)
        self._attach(self._process.address)
        if self.served.path == self._spec.model:
            self.control.set_version(self.policy_version)
            return
        group = ControlGroup([self.control])
        send = partial(send_file, group, num_tensors=len(checkpoint_shapes(self._spec.model)))
        try:
            publish(group, self.served, self.policy_version, send)
        except OSError as error:
            raise SamplingError(f"the weights could not be sent to the engine: {error}") from error

    def _attach(self, address: Address) -> None:
        self.control = EngineControl(address, log_tail=self._log_tail)

    def _restart_server(self) -> None:
        if not self.is_alive():
            self.start()

    def _log_tail(self) -> str:
        log = self._process.log_tail() if self._process is not None else "(in the log of the external server)"
        return f"the engine's last lines:\n{log}"


@contextmanager
def open_alone(spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> Iterator[VllmSampler]:
    """Open an engine; stop and remove it on exit. An external server continues to serve its current weights."""
    sampler = None
    try:
        yield (sampler := VllmSampler(spec, tokenizer, progress))
    finally:
        if sampler is not None:
            sampler.close()
        shutil.rmtree(spec.weight_dir, ignore_errors=True)


def settings_of(params: SamplingParams, seed: int, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the sampling settings of one completion. Only rlcore's stop tokens end it, not the checkpoint's."""
    return {
        "temperature": 0.0 if params.greedy else params.temperature,
        "max_tokens": params.max_new_tokens,
        "seed": seed,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": list(tokenizer.eos_ids),
    }


def rollout_of(prompt: Prompt, choice: Mapping[str, Any], tokenizer: ChatTokenizer) -> Rollout:
    """Return the rollout of a completion. If weights changed during sampling, it has the oldest version.

    Raises:
        SamplingError: A log-probability is not a number.
    """
    tokens = tuple(choice["token_ids"])
    logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    version = min(int(span["version"]) for span in choice["weight_versions"])
    if not all(math.isfinite(value) and value > _NO_NUMBER for value in logprobs):
        raise SamplingError(
            f"the model computes NaN or infinity on prompt {prompt.prompt_id!r}",
            where=f"policy version {version}",
            fix="restore an earlier checkpoint and lower the learning rate",
        )
    return Rollout(
        prompt=prompt,
        completion_ids=tokens,
        sampler_logprobs=logprobs,
        loss_mask=(True,) * len(tokens),
        policy_version=version,
        finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
        text=tokenizer.decode(tokens),
    )


def rescored(rows: Sequence[Mapping[str, Any]], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
    """Return the log-probability of each token at ``temperature`` from those at temperature 1.

    ``rows``: scores by token id, of the whole vocabulary unless the temperature is 1: ``log p_T(x) = log p(x) / T - log
    sum_v p(v)^(1 / T)``.
    """
    if temperature == 1.0:
        return [row[str(token)]["logprob"] for token, row in zip(completion_ids, rows, strict=True)]
    tables = [{int(token): entry["logprob"] / temperature for token, entry in row.items()} for row in rows]
    return [
        table[token] - torch.tensor(list(table.values()), dtype=torch.float64).logsumexp(0).item()
        for token, table in zip(completion_ids, tables, strict=True)
    ]


class EngineWatch:
    """Statistics of a server between two calls of :meth:`take`, within :meth:`over`.

    A server that publishes no statistics (``--disable-log-stats``) gives only ``engine/retries``.
    """

    def __init__(self) -> None:
        self.num_retries = 0
        self._peaks: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._seconds = 0.0

    @contextmanager
    def over(self, address: Callable[[], Address]) -> Iterator[None]:
        """Watch a block in which the server samples; a restart changes its address."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(address, done), name="vllm-metrics", daemon=True)
        before, started = read_page(address()), time.monotonic()
        watcher.start()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - started
            done.set()
            watcher.join()
            self._count(before, read_page(address()))

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        metrics = {"engine/retries": float(self.num_retries), **self._peaks}
        if self._counts and self._seconds > 0.0:
            queries = self._counts["prefix_cache_queries"]
            metrics["engine/tokens_per_second"] = self._counts["generation_tokens"] / self._seconds
            metrics["engine/preemptions"] = self._counts["num_preemptions"]
            metrics["engine/prefix_cache_hit_rate"] = self._counts["prefix_cache_hits"] / queries if queries else 0.0
        self.num_retries, self._peaks, self._counts, self._seconds = 0, {}, {}, 0.0
        return metrics

    def _watch(self, address: Callable[[], Address], done: threading.Event) -> None:
        while not done.wait(_WATCH_SECONDS):
            page = read_page(address())
            for name, metric in _PEAKS.items():
                if name in page:
                    self._peaks[metric] = max(page[name], self._peaks.get(metric, 0.0))

    def _count(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add the increase between two readings; a restarted server counts from 0."""
        if not all(name in after for name in _COUNTS):
            return
        restarted = any(after[name] < before.get(name, 0.0) for name in _COUNTS)
        for name in _COUNTS:
            new = after[name] - (0.0 if restarted else before.get(name, 0.0))
            self._counts[name] = self._counts.get(name, 0.0) + new


def read_page(address: Address) -> dict[str, float]:
    """Return the server's statistics by name, summed over its engines; empty if it publishes none."""
    with contextlib.suppress(EngineUnreachableError):
        status, page = call(address, "/metrics", None, seconds=_PAGE_SECONDS)
        if status == 200 and isinstance(page, str):
            return parse_page(page)
    return {}


def parse_page(page: str) -> dict[str, float]:
    """Parse lines ``vllm:name{labels} value``, by name without ``_total``: the maximum of fractions, else the sum."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        if name in _PEAKS or name in _COUNTS:
            together = max if name == "kv_cache_usage_perc" else float.__add__
            found[name] = together(found.get(name, 0.0), float(value))
    return found
