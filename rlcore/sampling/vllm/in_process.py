"""vLLM in this process, if one environment has vLLM and the trainer. It samples the same tokens as a vLLM server.

vLLM changes state of the whole process. It seeds every global generator, and on a CPU it disables
``torch.set_num_threads``. Both are restored after vLLM has started, and every request has its own seed.

On a GPU the engine sleeps during an update. It releases its weights and its cache, because every update brings new
weights. It wakes when they are loaded.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlcore.errors import SamplingError
from rlcore.models.weight_names import to_checkpoint_names
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.vllm.gpu_assignment import is_installed
from rlcore.sampling.vllm.process import ServerSpec
from rlcore.sampling.vllm.requests import rejection_reason, rescored, rollout_of, settings_of
from rlcore.sampling.vllm.weights import Converted, checkpoint_shapes, differing_parts, shape_mismatches
from rlcore.seeding import derive_seed
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

WORKER_CLASS = "rlcore.sampling.vllm.worker.receiver.WeightReceiver"


class InProcessSampler:
    """Rollout engine in this process; see :class:`rlcore.sampling.base.Sampler` and :func:`open_in_process`.

    Args:
        llm: vLLM's object.
        sleeps: True if it was started with sleep mode.
        free: Releases GPU memory that this process has cached.

    The engine serves ``spec.model`` as version 0.
    """

    def __init__(
        self, llm: Any, spec: ServerSpec, tokenizer: ChatTokenizer, *, sleeps: bool, free: Callable[[], None]
    ) -> None:
        self._llm, self._spec, self._tokenizer, self._sleeps, self._free = llm, spec, tokenizer, sleeps, free
        self._shapes = checkpoint_shapes(spec.model)
        self._is_asleep = False
        self.policy_version = 0

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of completions per prompt. A completion that the engine aborts is a failed rollout.

        Raises:
            SamplingError: The model computes NaN.
        """
        limit, count = self._spec.max_model_len, params.num_samples
        numbers = range(len(prompts)) if places is None else places
        obstacles = [rejection_reason(prompt, params.max_new_tokens, limit=limit) for prompt in prompts]
        requests = [
            (prompt, derive_seed(seed, index, sample))
            for prompt, index, obstacle in zip(prompts, numbers, obstacles, strict=True)
            for sample in range(count)
            if not obstacle
        ]
        made = iter(self._complete(requests, params))
        return [
            [FailedRollout(prompt=prompt, reason=obstacle) if obstacle else next(made) for _ in range(count)]
            for prompt, obstacle in zip(prompts, obstacles, strict=True)
        ]

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Load the weights one tensor at a time from the trainer's memory, and drop the prefix cache.

        A sleeping engine wakes in two steps, so that its cache and the memory for loading are not allocated together.

        Raises:
            SamplingError: Names or shapes differ. The engine continues to serve the previous weights.
        """
        state = to_checkpoint_names(state, self._spec.model)
        if problems := shape_mismatches(self._shapes, state):
            raise SamplingError(
                f"these weights do not fit the engine's model: {'; '.join(problems[:5])}",
                where=f"policy version {policy_version}",
                fix="send the whole state_dict() of a model of the same architecture",
            )
        weights = Converted(state, shapes=self._shapes, dtype=getattr(torch, self._spec.dtype))
        if self._is_asleep:
            self._free()  # vLLM allocates outside of PyTorch's cache
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("take_weights", args=(weights,))
        if self._is_asleep:
            self._free()
            self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        if not self._llm.reset_prefix_cache():
            raise SamplingError("the engine did not drop the prefix cache of the old weights")
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Release weights and cache for an update. The next :meth:`load_weights` wakes the engine."""
        if self._sleeps and not self._is_asleep:
            self._llm.sleep(level=2)
            self._is_asleep = True

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the log-probability of each completion token under the served weights."""
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0 if temperature == 1.0 else -1}
        (output,) = self._generate([[*prompt_ids, *completion_ids]], [settings])
        rows = [
            {str(token): {"logprob": entry.logprob} for token, entry in row.items()}
            for row in output.prompt_logprobs[len(prompt_ids) :]
        ]
        return rescored(rows, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the parts whose weights differ from these in the engine's precision."""
        seed, dtype = self.policy_version, getattr(torch, self._spec.dtype)
        answers = self._llm.collective_rpc("weight_checksums", args=(seed,))
        return differing_parts(answers, state, is_adapter=False, dtype=dtype, seed=seed)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()

    def _complete(
        self, requests: Sequence[tuple[Prompt, int]], params: SamplingParams
    ) -> Iterator[Rollout | FailedRollout]:
        settings = [settings_of(params, seed, self._tokenizer) for _, seed in requests]
        outputs = self._generate([list(prompt.token_ids) for prompt, _ in requests], settings)
        return (self._rollout(prompt, output) for (prompt, _), output in zip(requests, outputs, strict=True))

    def _generate(self, prompts: Sequence[list[int]], settings: Sequence[Mapping[str, Any]]) -> list[Any]:
        if self._is_asleep:
            raise SamplingError("the engine is asleep and has no weights", fix="call load_weights first")
        from vllm import SamplingParams as VllmParams

        texts = [{"prompt_token_ids": token_ids} for token_ids in prompts]
        outputs: list[Any] = self._llm.generate(
            texts, [VllmParams(**each, detokenize=False) for each in settings], use_tqdm=False
        )
        return outputs

    def _rollout(self, prompt: Prompt, output: Any) -> Rollout | FailedRollout:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            return FailedRollout(
                prompt=prompt, reason=f"the engine ended the completion with {completion.finish_reason!r}"
            )
        entries = [row[token] for token, row in zip(completion.token_ids, completion.logprobs, strict=True)]
        choice = {
            "token_ids": completion.token_ids,
            "logprobs": {"content": [{"logprob": entry.logprob} for entry in entries]},
            "weight_versions": [{"version": self.policy_version}],  # no request runs while weights are loaded
            "finish_reason": completion.finish_reason,
        }
        return rollout_of(prompt, choice, self._tokenizer)


@contextmanager
def open_in_process(
    spec: ServerSpec,
    tokenizer: ChatTokenizer,
    *,
    sleeps: bool,
    free: Callable[[], None],
    progress: Callable[[str], None],
) -> Iterator[InProcessSampler]:
    """Open an engine in this process, whose memory is freed on exit. ``sleeps``: it shares a GPU with a learner.

    Raises:
        SamplingError: vLLM is not installed in this environment.
    """
    if not is_installed():
        raise SamplingError(
            "vLLM is not installed in this environment",
            where="engine.kind",
            fix='set kind = "vllm", a server with its own environment, or install vllm in this environment',
        )
    progress(f"starting vLLM on {spec.model} ({spec.dtype}) in this process")
    with process_state():
        llm = _start(spec, sleeps=sleeps)
    sampler = InProcessSampler(llm, spec, tokenizer, sleeps=sleeps, free=free)
    try:
        yield sampler
    finally:
        sampler.close()


@contextmanager
def process_state() -> Iterator[None]:
    """Restore the process state that vLLM changes: generators, number of threads, and the function that sets it."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python, numpy, default = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(default)


def _start(spec: ServerSpec, *, sleeps: bool) -> Any:
    # One process, so weights are passed in memory. The learner uses the same cores, so threads are not bound.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM

    return LLM(str(spec.model), **arguments(spec, sleeps=sleeps))


def arguments(spec: ServerSpec, *, sleeps: bool) -> dict[str, Any]:
    """Return vLLM's arguments besides the model. The GPU's index is passed unless it is the first."""
    chosen: dict[str, Any] = {
        "dtype": spec.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_concurrent,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "enforce_eager": spec.enforce_eager,
        "enable_chunked_prefill": spec.prefill_in_parts,
        "enable_sleep_mode": sleeps,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_CLASS,
        "seed": 0,
    }
    if spec.devices not in ((), (0,)):
        chosen["device_ids"] = list(spec.devices)
    if spec.config.kv_cache_gib > 0.0:
        chosen["kv_cache_memory_bytes"] = int(spec.config.kv_cache_gib * 2**30)
    return chosen
