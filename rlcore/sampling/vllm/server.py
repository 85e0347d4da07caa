"""Rollouts from a vLLM server: token ids in, token ids and log-probabilities out, with versioned weights.

Each request is one completion with its own seed, so its samples do not depend on other requests. Equal prompts share
their prefill in the server's prefix cache. A dead server is restarted with the weights that it served, and its missing
completions are requested again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.errors import SamplingError
from rlcore.progress import advance
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl, EngineUnreachableError, address_of, call
from rlcore.sampling.vllm.process import ServerProcess, ServerSpec, is_healthy
from rlcore.sampling.vllm.requests import rejection_reason, rescored, rollout_of, settings_of
from rlcore.sampling.vllm.server_load import EngineWatch
from rlcore.sampling.vllm.server_sync import ADAPTER, WeightSync, publish
from rlcore.sampling.vllm.transfer import FileTransfer
from rlcore.sampling.vllm.weights import Weights, checkpoint_shapes, differing_parts
from rlcore.seeding import derive_seed
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

MAX_ATTEMPTS = 3  # per completion


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """Completion to sample, with its prompt and seed."""

    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class _Missed:
    """Failed attempt at a completion, which is retried."""

    reason: str


class VllmSampler:
    """Rollout engine in separate processes; see :class:`rlcore.sampling.base.Sampler` and :func:`open_vllm`.

    ``spec.max_concurrent`` bounds concurrent requests. Initially it serves ``spec.model`` as version 0.
    """

    def __init__(self, spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> None:
        """Start the server or connect to it.

        Raises:
            SamplingError: The server does not start, or does not answer.
        """
        self._spec, self._tokenizer, self._progress = spec, tokenizer, progress
        self.served, self.policy_version = Weights(path=spec.model), 0
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
        """Stop the server if it was started here."""
        self._pool.shutdown(wait=False, cancel_futures=True)  # running requests end with the server
        if self._process is not None:
            self._process.stop()
        self.sync.close()

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of completions per prompt. A completion that fails ``MAX_ATTEMPTS`` times is a failed rollout.

        Raises:
            SamplingError: The server cannot be restarted, completes nothing, or computes NaN.
        """
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
        """Return the server load since the last call."""
        return self._watch.take()

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Send the weights; see :meth:`rlcore.sampling.vllm.server_sync.WeightSync.send`."""
        self.sync.send(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the log-probability of each completion token under the served weights.

        The server scores a text only at temperature 1. Other temperatures are computed from the scores of the whole
        vocabulary, which is fast enough for checks but not for batches.
        """
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

    def _ask(self, path: str, payload: Mapping[str, Any], **settings: float) -> Any:
        """Return the answer to a request about the weights. A dead server is restarted, and the request repeated."""
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
        """Add a completion or a failure of every request to ``made``."""
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
        """Return the adapter of a request. Before the first adapter, the base is the policy."""
        return {"model": ADAPTER} if self.served.is_adapter else {}

    def is_alive(self) -> bool:
        """Return True if the server answers and reports a running engine."""
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
        self._process = ServerProcess(self._spec)
        self._process.wait_until_ready(self._progress)
        self._attach(self._process.address)
        if self.served.path == self._spec.model:
            self.control.set_version(self.policy_version)
            return
        group = ControlGroup([self.control])
        way = FileTransfer(group, len(checkpoint_shapes(self._spec.model)))
        try:
            publish(group, self.served, self.policy_version, way.send)
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
def open_vllm(spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> Iterator[VllmSampler]:
    """Open an engine that serves its checkpoint. Its processes are stopped and its files removed on exit."""
    with open_alone(spec, tokenizer, progress) as sampler:
        sampler.sync.begin()
        yield sampler


@contextmanager
def open_alone(spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> Iterator[VllmSampler]:
    """Open an engine as :func:`open_vllm`, but an external server continues to serve its current weights."""
    sampler = None
    try:
        yield (sampler := VllmSampler(spec, tokenizer, progress))
    finally:
        if sampler is not None:
            sampler.close()
        shutil.rmtree(spec.weight_dir, ignore_errors=True)
