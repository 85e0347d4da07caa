"""vLLM in this process, where one environment holds vLLM and the trainer. It draws what a vLLM server draws.

vLLM changes what belongs to the whole process. It seeds every global generator. On a CPU it also makes
``torch.set_num_threads`` do nothing. Both are put back when vLLM has started, and every request has its own seed.

On a GPU the engine rests while the learner updates. It gives up its weights and its cache, because new weights come
after every update. It wakes when they come, and stays awake until the next update.
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
    """A rollout engine in this process; see :class:`rlcore.sampling.base.Sampler` and :func:`open_in_process`.

    ``llm`` is vLLM's own object. ``sleeps``: it was started so that it can rest. ``free`` gives back GPU memory that
    this process keeps for later. The engine serves ``spec.model`` as version 0.
    """

    def __init__(
        self, llm: Any, spec: ServerSpec, tokenizer: ChatTokenizer, *, sleeps: bool, free: Callable[[], None]
    ) -> None:
        self._llm, self._spec, self._tokenizer, self._sleeps, self._free = llm, spec, tokenizer, sleeps, free
        self._shapes = checkpoint_shapes(spec.model)
        self._rests = False
        self.policy_version = 0

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """A group of completions per prompt. A completion that the engine aborts is a failed rollout.

        Raises:
            SamplingError: the model computes NaN.
        """
        limit, count = self._spec.max_model_len, params.num_samples
        numbers = range(len(prompts)) if places is None else places
        obstacles = [rejection_reason(prompt, params.max_new_tokens, limit=limit) for prompt in prompts]
        asked = [
            (prompt, derive_seed(seed, place, sample))
            for prompt, place, obstacle in zip(prompts, numbers, obstacles, strict=True)
            for sample in range(count)
            if not obstacle
        ]
        made = iter(self._complete(asked, params))
        return [
            [FailedRollout(prompt=prompt, reason=obstacle) if obstacle else next(made) for _ in range(count)]
            for prompt, obstacle in zip(prompts, obstacles, strict=True)
        ]

    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Hand the weights over one at a time, as they lie in memory, and drop what the old ones computed.

        A resting engine wakes in two steps, so that its cache and what the loading needs are never there together.

        Raises:
            SamplingError: the names or shapes differ. The engine then serves what it served before.
        """
        state = to_checkpoint_names(state, self._spec.model)
        if problems := shape_mismatches(self._shapes, state):
            raise SamplingError(
                f"these weights do not fit the engine's model: {'; '.join(problems[:5])}",
                where=f"policy version {policy_version}",
                fix="send the whole state_dict() of a model of the same architecture",
            )
        weights = Converted(state, shapes=self._shapes, dtype=getattr(torch, self._spec.dtype))  # each made when read
        if self._rests:
            self._free()  # vLLM maps memory of its own, and gets none that PyTorch keeps for later
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("take_weights", args=(weights,))
        if self._rests:
            self._free()
            self._llm.wake_up(tags=["kv_cache"])
            self._rests = False
        if not self._llm.reset_prefix_cache():
            raise SamplingError("the engine keeps the prefix cache of the old weights")
        self.policy_version = policy_version

    def rest(self) -> None:
        """Drop weights and cache, so that an update has the GPU; the next :meth:`load_weights` wakes the engine."""
        if self._sleeps and not self._rests:
            self._llm.sleep(level=2)
            self._rests = True

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Log-probability of each completion token under the weights that are being served."""
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0 if temperature == 1.0 else -1}
        (output,) = self._generate([[*prompt_ids, *completion_ids]], [settings])
        rows = [
            {str(token): {"logprob": entry.logprob} for token, entry in row.items()}
            for row in output.prompt_logprobs[len(prompt_ids) :]
        ]
        return rescored(rows, completion_ids, temperature=temperature)

    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """The parts whose weights are not these in the engine's precision."""
        seed, dtype = self.policy_version, getattr(torch, self._spec.dtype)
        answers = self._llm.collective_rpc("weight_sums", args=(seed,))
        return differing_parts(answers, state, is_adapter=False, dtype=dtype, seed=seed)

    def close(self) -> None:
        """End the engine and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()

    def _complete(
        self, asked: Sequence[tuple[Prompt, int]], params: SamplingParams
    ) -> Iterator[Rollout | FailedRollout]:
        settings = [settings_of(params, seed, self._tokenizer) for _, seed in asked]
        outputs = self._generate([list(prompt.token_ids) for prompt, _ in asked], settings)
        return (self._rollout(prompt, output) for (prompt, _), output in zip(asked, outputs, strict=True))

    def _generate(self, prompts: Sequence[list[int]], settings: Sequence[Mapping[str, Any]]) -> list[Any]:
        if self._rests:
            raise SamplingError("the engine rests without weights", fix="load_weights brings it the next ones")
        from vllm import SamplingParams as VllmParams

        texts = [{"prompt_token_ids": token_ids} for token_ids in prompts]
        outputs: list[Any] = self._llm.generate(
            texts, [VllmParams(**each, detokenize=False) for each in settings], use_tqdm=False
        )
        return outputs

    def _rollout(self, prompt: Prompt, output: Any) -> Rollout | FailedRollout:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            return FailedRollout(prompt=prompt, reason=f"the engine ended it with {completion.finish_reason!r}")
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
    """An engine in this process, whose memory is freed on the way out. ``sleeps``: it shares a GPU with a learner.

    Raises:
        SamplingError: vLLM is not installed in this environment.
    """
    if not is_installed():
        raise SamplingError(
            "vLLM is not installed in this environment",
            where="engine.kind",
            fix='take kind = "vllm", a server with an environment of its own; or install vllm beside the library',
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
    """Put back what vLLM changes in the whole process: generators, the number of threads and how it is set."""
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
    # One process: weights are handed over as they lie in memory. Its cores are the learner's too: none is bound.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM

    return LLM(str(spec.model), **arguments(spec, sleeps=sleeps))


def arguments(spec: ServerSpec, *, sleeps: bool) -> dict[str, Any]:
    """What vLLM is told beside the model. It is told the number of its GPU unless that is the first."""
    chosen: dict[str, Any] = {
        "dtype": spec.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_concurrent,
        "gpu_memory_utilization": spec.memory_fraction,
        "enforce_eager": spec.eager,
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
