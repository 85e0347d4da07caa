"""Rollouts from a vLLM server: token ids go in, token ids and log-probabilities come out, weights have a version.

A request is one completion with its own seed, so its draws do not depend on what else the server computes. Equal
prompts share their prefill in the server's prefix cache. A server that dies is started again with the weights that it
served, and completions that it did not deliver are requested again.
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

MAX_ATTEMPTS = 3  # to get one completion


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """One completion to be made, with its prompt and its seed."""

    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class _Missed:
    """An attempt without a completion; it is made again."""

    reason: str


class VllmSampler:
    """A rollout engine in processes of its own; see :class:`rlcore.sampling.base.Sampler` and :func:`open_vllm`.

    ``spec.max_concurrent`` bounds the requests under way. At first it serves ``spec.model`` as version 0.
    """

    def __init__(self, spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> None:
        """
        Raises:
            SamplingError: the server does not start, or does not answer.
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
        """End the server, if it was started here."""
        self._pool.shutdown(wait=False, cancel_futures=True)  # requests under way end with the server
        if self._process is not None:
            self._process.stop()
        self.sync.close()

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """A group of completions per prompt. One that fails ``MAX_ATTEMPTS`` times is a failed rollout.

        Raises:
            SamplingError: the server cannot be started again, answers nothing at all, or computes NaN.
        """
        numbers = range(len(prompts)) if places is None else places
        groups = [
            [_Request(prompt, derive_seed(seed, place, sample)) for sample in range(params.num_samples)]
            for prompt, place in zip(prompts, numbers, strict=True)
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
        """How busy the server was since the last call."""
        return self._watch.take()

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Hand the weights over; see :meth:`rlcore.sampling.vllm.server_sync.WeightSync.send`."""
        self.sync.send(state, policy_version=policy_version)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Log-probability of each completion token under the weights that are being served.

        The server scores a given text at temperature 1 only. For another temperature they are computed from the scores
        of the whole vocabulary. That is fast enough for a probe, not for a batch.
        """
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0 if temperature == 1.0 else -1}
        payload = self._named() | {"token_ids": [*prompt_ids, *completion_ids], "sampling_params": settings}
        seconds = self._spec.config.timeouts.for_request(1)
        answer = self._asked("/inference/v1/generate", payload, seconds=seconds)
        rows = answer["prompt_logprobs"][len(prompt_ids) :]
        return rescored(rows, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """The parts whose weights differ from these in the server's precision, by the sums that its workers report."""
        seed = self.policy_version
        answer = self._asked("/collective_rpc", {"method": "weight_sums", "args": [seed]})
        dtype = getattr(torch, self._spec.dtype)
        return differing_parts(answer["results"], state, is_adapter=self.served.is_adapter, dtype=dtype, seed=seed)

    def _asked(self, path: str, payload: Mapping[str, Any], **settings: float) -> Any:
        """The answer to a question about the weights; a server that is dead is started again, and asked once more."""
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
        """Add a completion of every request to ``made``, each exactly once."""
        reasons: dict[_Request, str] = {}
        num_asked = len(pending)
        for attempt in range(MAX_ATTEMPTS):
            if attempt and pending:
                self._progress(f"engine: retry completions={len(pending)} reason={reasons[pending[0]]}")
                self._watch.asked_again += len(pending)
                self._restart_server()
            outcomes = self._pool.map(lambda request: self._one(request, params), pending)
            for request, outcome in zip(pending, outcomes, strict=True):
                if isinstance(outcome, _Missed):
                    reasons[request] = outcome.reason
                else:
                    made[request] = outcome
            pending = [request for request in pending if request not in made]
        if pending and len(pending) == num_asked:
            raise SamplingError(f"the engine completes nothing: {reasons[pending[0]]}", fix=self._last_words())
        for request in pending:
            made[request] = FailedRollout(prompt=request.prompt, reason=reasons[request])

    def _one(self, request: _Request, params: SamplingParams) -> Rollout | FailedRollout | _Missed:
        payload = self._named() | {
            "token_ids": list(request.prompt.token_ids),
            "sampling_params": settings_of(params, request.seed, self._tokenizer),
        }
        seconds = self._spec.config.timeouts.for_request(params.max_new_tokens)
        try:
            status, answer = call(self.control.address, "/inference/v1/generate", payload, seconds=seconds)
        except EngineUnreachableError as error:
            return _Missed(str(error))
        if status == 400:
            return FailedRollout(prompt=request.prompt, reason=f"the engine refused: {str(answer)[:300]}")
        if status != 200:
            return _Missed(f"HTTP {status}: {str(answer)[:300]}")
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            return _Missed(f"the engine ended it with {choice['finish_reason']!r}")
        return rollout_of(request.prompt, choice, self._tokenizer)

    def _named(self) -> dict[str, Any]:
        """The name of the adapter that a request is for. Before the first adapter the base is the policy."""
        return {"model": ADAPTER} if self.served.is_adapter else {}

    def is_alive(self) -> bool:
        """Whether the server answers, and says that its engine runs."""
        return is_healthy(self.control.address)

    def start(self) -> None:
        """Start a fresh server. It reads the weights that were served last from a file.

        Raises:
            SamplingError: it does not start, it is not ours to start, or there is neither a file nor room for one.
        """
        if self._spec.url:
            raise SamplingError(
                "the engine is broken, and it is not ours to start again",
                where=self._spec.url,
                fix="start it again, then this run: it goes on from its newest checkpoint",
            )
        if self._process is not None:
            if not self.is_alive():
                self._progress(f"the engine is dead, {self._last_words()}")
            self._process.stop()
        self._process = ServerProcess(self._spec)
        self._process.wait_until_ready(self._progress)
        self._attach(self._process.address)
        if self.served.path == self._spec.model:
            self.control.name_version(self.policy_version)
            return
        group = ControlGroup([self.control])
        way = FileTransfer(group, len(checkpoint_shapes(self._spec.model)))
        try:
            publish(group, self.served, self.policy_version, way.send)
        except OSError as error:
            raise SamplingError(f"the weights did not reach the engine: {error}") from error

    def _attach(self, address: Address) -> None:
        self.control = EngineControl(address, last_words=self._last_words)

    def _restart_server(self) -> None:
        if not self.is_alive():
            self.start()

    def _last_words(self) -> str:
        said = self._process.log_tail() if self._process is not None else "it logs where it was started"
        return f"the engine's last lines:\n{said}"


@contextmanager
def open_vllm(spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> Iterator[VllmSampler]:
    """An engine that serves its checkpoint. All its processes end, and its files are removed, on the way out."""
    with open_alone(spec, tokenizer, progress) as sampler:
        sampler.sync.begin()
        yield sampler


@contextmanager
def open_alone(spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> Iterator[VllmSampler]:
    """As :func:`open_vllm`, but a server that ran before still serves what it served."""
    sampler = None
    try:
        yield (sampler := VllmSampler(spec, tokenizer, progress))
    finally:
        if sampler is not None:
            sampler.close()
        shutil.rmtree(spec.exchange, ignore_errors=True)
