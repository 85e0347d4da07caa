"""Rollouts from a vLLM server: token ids in, token ids and log-probabilities out, new weights through a file.

A request is one completion with a seed of its own, so its draws do not depend on what else the server computes; equal
prompts share their prefill in the server's prefix cache. A server that dies is started again with the weights that it
served, and what it owed is asked for again.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rlcore.errors import SamplingError
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.vllm_http import EngineUnreachableError, address_of, call
from rlcore.sampling.vllm_metrics import EngineWatch
from rlcore.sampling.vllm_process import ServerProcess, ServerSpec, is_healthy
from rlcore.sampling.vllm_requests import rescored, rollout_of, settings_of
from rlcore.sampling.weight_files import checkpoint_shapes, misfits, write_weights
from rlcore.seeding import derive_seed
from rlcore.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

MAX_ATTEMPTS = 3  # to get one completion
_CONTROL_SECONDS = 600.0  # of a weight update


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """One completion to be made: which sample of which prompt."""

    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class _Missed:
    """No completion this time; it is asked for again."""

    reason: str


class VllmSampler:
    """A rollout engine in processes of its own; see :class:`rlcore.sampling.base.Sampler` and :func:`open_vllm`.

    ``spec.max_concurrent`` bounds the requests under way. It serves ``spec.model`` as version 0 to begin with.
    """

    def __init__(self, spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> None:
        """
        Raises:
            SamplingError: the server does not start, or does not answer.
        """
        self._spec, self._tokenizer, self._progress = spec, tokenizer, progress
        self._shapes = checkpoint_shapes(spec.model)
        self._served, self.policy_version = spec.model, 0
        self._process: ServerProcess | None = None
        self._numbers = itertools.count()
        self._watch = EngineWatch()
        self._pool = ThreadPoolExecutor(spec.max_concurrent, thread_name_prefix="vllm")
        if spec.url:
            self._address = address_of(spec.url)
            self._publish(spec.model, 0)
        else:
            self._start()

    def close(self) -> None:
        """End the server, if it was started here, and remove the weight files."""
        self._pool.shutdown(wait=False, cancel_futures=True)  # requests under way end with the server
        if self._process is not None:
            self._process.stop()
        if self._served != self._spec.model:
            self._served.unlink(missing_ok=True)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """A group of completions per prompt; one that fails ``MAX_ATTEMPTS`` times is a failed rollout.

        Raises:
            SamplingError: the server cannot be started again, answers nothing at all, or computes NaN.
        """
        numbers = range(len(prompts)) if places is None else places
        groups = [
            [_Request(prompt, derive_seed(seed, place, sample)) for sample in range(params.num_samples)]
            for prompt, place in zip(prompts, numbers, strict=True)
        ]
        made: dict[_Request, Rollout | FailedRollout] = {
            request: FailedRollout(prompt=request.prompt, reason=obstacle)
            for group in groups
            for request in group
            if (obstacle := self._obstacle(request.prompt, params))
        }
        with self._watch.over(lambda: self._address):
            self._complete([request for group in groups for request in group if request not in made], params, made)
        return [[made[request] for request in group] for group in groups]

    def take_metrics(self) -> dict[str, float]:
        """How busy the server was since the last call."""
        return self._watch.take()

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Hand the weights over as a file: pause, update, drop the prefix cache, resume.

        Raises:
            SamplingError: other names or shapes, or the server refused; it then serves what it served before.
        """
        if problems := misfits(self._shapes, state):
            raise SamplingError(
                f"these weights do not fit the engine's model: {'; '.join(problems[:5])}",
                where=f"policy version {policy_version}",
                fix="send the whole state_dict() of a model of the same architecture",
            )
        path = self._spec.exchange / f"{next(self._numbers)}.safetensors"  # a version may be sent twice
        try:
            write_weights(self._shapes, state, path, dtype=getattr(torch, self._spec.dtype))
            self._publish(path, policy_version)
        except (OSError, SafetensorError, SamplingError) as error:
            path.unlink(missing_ok=True)
            if isinstance(error, SamplingError):  # it may be paused, or hold a part of the weights
                self._start()
            raise SamplingError(f"the weights did not reach the engine: {error}", where=str(path)) from error
        self._replace_served(path)

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Log-probability of each completion token under the weights that are being served.

        The server scores a given text at temperature 1 alone. Others are worked out from the scores of the whole
        vocabulary, which suits a probe, not a batch.
        """
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0 if temperature == 1.0 else -1}
        payload = {"token_ids": [*prompt_ids, *completion_ids], "sampling_params": settings}
        answer = self._ask("/inference/v1/generate", payload, seconds=self._spec.config.request_seconds)
        rows = answer["prompt_logprobs"][len(prompt_ids) :]
        return rescored(rows, completion_ids, temperature=temperature)

    def _complete(
        self, pending: list[_Request], params: SamplingParams, made: dict[_Request, Rollout | FailedRollout]
    ) -> None:
        """Add a completion of every request to ``made``, each exactly once."""
        reasons: dict[_Request, str] = {}
        num_asked = len(pending)
        for attempt in range(MAX_ATTEMPTS):
            if attempt and pending:
                self._progress(f"{len(pending)} completions are asked for again: {reasons[pending[0]]}")
                self._watch.asked_again += len(pending)
                self._revive()
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
        payload = {
            "token_ids": list(request.prompt.token_ids),
            "sampling_params": settings_of(params, request.seed, self._tokenizer),
        }
        seconds = self._spec.config.request_seconds
        try:
            status, answer = call(self._address, "/inference/v1/generate", payload, seconds=seconds)
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

    def _obstacle(self, prompt: Prompt, params: SamplingParams) -> str:
        """Why a prompt cannot be completed; empty when it can."""
        needed = len(prompt.token_ids) + params.max_new_tokens
        if not prompt.token_ids:
            return "the prompt has no tokens"
        if needed > self._spec.max_model_len:
            return f"prompt and completion need {needed} positions, the engine has {self._spec.max_model_len}"
        return ""

    def _publish(self, path: Path, policy_version: int) -> None:
        """Running requests wait (mode ``keep``) and go on with the new weights, their keys and values computed anew."""
        self._ask("/pause?mode=keep", {})
        answer = self._ask("/collective_rpc", {"method": "receive_weights", "args": [str(path.resolve())]})
        if any(result["tensors"] != len(self._shapes) for result in answer["results"]):
            raise SamplingError(f"a worker read other tensors than were sent: {answer['results']}", where=str(path))
        if not self._ask("/reset_prefix_cache?reset_running_requests=true", {})["success"]:
            raise SamplingError("the engine keeps the prefix cache of the old weights", fix=self._last_words())
        self._name_version(policy_version)
        self._ask("/resume", {})

    def _name_version(self, policy_version: int) -> None:
        """The server stamps this on every token that it samples from now on."""
        self._ask("/update_weight_version", {"new_version": str(policy_version)})
        self.policy_version = policy_version

    def _ask(self, path: str, payload: Mapping[str, Any], *, seconds: float = _CONTROL_SECONDS) -> Any:
        try:
            status, answer = call(self._address, path, payload, seconds=seconds)
        except EngineUnreachableError as error:
            raise SamplingError(f"the engine does not answer {path}: {error}", fix=self._last_words()) from error
        if status != 200:
            raise SamplingError(f"the engine refused {path}: {str(answer)[:500]}", fix=self._last_words())
        return answer

    def _start(self) -> None:
        """A fresh server with the weights that were served last.

        Raises:
            SamplingError: it does not start, or it is not ours to start.
        """
        if self._spec.url:
            raise SamplingError(
                "the engine is broken, and it is not ours to start again",
                where=self._spec.url,
                fix="start it again, then this run: it goes on from its newest checkpoint",
            )
        if self._process is not None:
            self._process.stop()
        self._process = ServerProcess(self._spec)
        self._process.wait_until_ready(self._progress)
        self._address = self._process.address
        if self._served == self._spec.model:
            self._name_version(self.policy_version)
        else:
            self._publish(self._served, self.policy_version)

    def _revive(self) -> None:
        if not is_healthy(self._address):
            self._start()

    def _replace_served(self, path: Path) -> None:
        old, self._served = self._served, path
        if old != self._spec.model:
            old.unlink(missing_ok=True)

    def _last_words(self) -> str:
        said = self._process.last_words() if self._process is not None else "it logs where it was started"
        return f"the engine's last lines:\n{said}"


@contextmanager
def open_vllm(spec: ServerSpec, tokenizer: ChatTokenizer, progress: Callable[[str], None]) -> Iterator[VllmSampler]:
    """An engine that is ended, with all its processes and files, on the way out."""
    sampler = None
    try:
        yield (sampler := VllmSampler(spec, tokenizer, progress))
    finally:
        if sampler is not None:
            sampler.close()
        shutil.rmtree(spec.exchange, ignore_errors=True)
