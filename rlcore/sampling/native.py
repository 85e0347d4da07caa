"""Built-in rollout engine: batched decoding of a Hugging Face causal language model in plain torch.

Samples of a group share their prompt's keys and values. Models that cannot share are decoded by the library, more
slowly. On a CPU, products are oneDNN's with packed weights.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel

from rlcore.errors import SamplingError
from rlcore.hardware.memory import is_large, release_freed
from rlcore.hardware.out_of_memory import empty_cache
from rlcore.hardware.precision import gains_packed, is_linear, linear_of
from rlcore.models.architectures import max_positions, supports_prompt_sharing
from rlcore.progress import advance
from rlcore.sampling.base import SamplingParams, rejection_reason, weight_mismatches
from rlcore.sampling.decoding import Decoded, argmax_tokens, decode, decode_by_library, sample_tokens
from rlcore.sampling.kv_cache import GROUPED_ATTENTION
from rlcore.sampling.vllm.worker.checksums import part_of
from rlcore.seeding import generator
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt, Rollout

logger = logging.getLogger(__name__)
MAX_PREFILL_TOKENS = 32_768  # padded prompt tokens per forward pass: bounds the activations


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    prompt: Prompt
    index: int
    sample_index: int


class _Watch:
    def __init__(self, *, num_answers: int, max_tokens: int) -> None:
        self._num_answers, self._max_tokens, self._tokens = num_answers, max_tokens, 0

    def begin(self, *, num_done: int, num_rows: int) -> None:
        self._last = num_done + num_rows

    def step(self, made: int, live: int, step: int) -> None:
        self._tokens += made
        done = self._last - live
        begun = live * step / self._max_tokens
        advance("answers", done, self._num_answers, fraction=(done + begun) / self._num_answers, tokens=self._tokens)


class NativeSampler:
    """Rollout engine with its own copy of a model's weights; see :class:`rlcore.sampling.base.Sampler`.

    ``max_concurrent``: sequences decoded together. Prompts that are too long give failed rollouts.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: ChatTokenizer, *, policy_version: int = 0, max_concurrent: int = 256
    ) -> None:
        self.policy_version = policy_version
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        self._shares_prompts = supports_prompt_sharing(model)
        if self._shares_prompts:
            self._model.set_attn_implementation(GROUPED_ATTENTION)
        self._model.generation_config = GenerationConfig()  # the model's own config may filter the distribution
        self._tokenizer = tokenizer
        self._max_concurrent = max_concurrent
        self._eos_ids = torch.tensor(tokenizer.eos_ids, device=self._model.device)

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Rollout | FailedRollout]]:
        """Return a group of completions per prompt.

        Raises:
            SamplingError: The model computes NaN or infinity, or a single sequence does not fit into memory.
        """
        groups = [
            [_Request(prompt, index, sample) for sample in range(params.num_samples)]
            for prompt, index in zip(prompts, range(len(prompts)) if places is None else places, strict=True)
        ]
        made: dict[_Request, Rollout | FailedRollout] = {}
        limit = max_positions(self._model.config)
        for request in itertools.chain.from_iterable(groups):
            if obstacle := rejection_reason(request.prompt, params.max_new_tokens, limit=limit):
                made[request] = FailedRollout(prompt=request.prompt, reason=obstacle)
        possible = [request for group in groups for request in group if request not in made]
        waiting = list(_blocks(possible, self._max_concurrent))
        watch = _Watch(num_answers=params.num_samples * len(prompts), max_tokens=params.max_new_tokens)
        with _packed_weights(self._model):
            while waiting:
                watch.begin(num_done=len(made), num_rows=len(waiting[0]))
                decoded = self._decode(waiting[0], params, watch, seed=seed)
                if decoded is None:  # out of memory: samples do not depend on the block
                    waiting = list(_blocks(list(itertools.chain(*waiting)), self._max_concurrent))
                else:
                    block = waiting.pop(0)
                    made |= zip(block, self._rollouts(block, decoded), strict=True)
                    advance("answers", len(made), params.num_samples * len(prompts))
        return [[made[request] for request in group] for group in groups]

    def _decode(self, block: Sequence[_Request], params: SamplingParams, watch: _Watch, *, seed: int) -> Decoded | None:
        """Return the completions of a block; None if memory ran out: later blocks are then smaller."""
        try:
            return (decode if self._shares_prompts else decode_by_library)(
                self._model,
                [request.prompt.token_ids for request in block],
                _uniforms(block, params.max_new_tokens, seed=seed).to(self._model.device),
                choose=argmax_tokens if params.greedy else partial(sample_tokens, temperature=params.temperature),
                eos_ids=self._eos_ids,
                watch=watch.step,
            )
        except torch.OutOfMemoryError as error:
            if len(block) == 1:
                raise SamplingError(
                    f"out of memory with a single sequence: {error}",
                    fix="lower sampling.max_new_tokens, or leave the engine more of the GPU: LoRA "
                    "(update.lora.rank), optim.kind = 'adamw_8bit'",
                ) from error
        empty_cache()  # outside the handler, because the error referenced the cache
        self._max_concurrent = len(block) // 2
        advice = "out of memory: decoding at most %d sequences together from now on; set max_concurrent to it"
        logger.warning(advice, self._max_concurrent)
        return None

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Copy the ``state_dict()`` of a model of the same architecture, converting type and device.

        Raises:
            SamplingError: Names or shapes differ, or tied weights have different values. The engine continues to serve
                the previous weights.
        """
        own: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in self._model.state_dict().items():
            own.setdefault(tensor.data_ptr(), (name, tensor))  # tied names are one tensor
        shapes = {name: tuple(tensor.shape) for name, tensor in own.values()}
        if problems := weight_mismatches(shapes, state):
            raise SamplingError(
                f"these weights do not fit the engine's model: {'; '.join(problems[:5])}",
                where=f"policy version {policy_version}",
                fix="send the whole state_dict() of a model of the same architecture",
            )
        for name, tensor in own.values():
            tensor.copy_(state[name])
        self.policy_version = policy_version

    @torch.inference_mode()
    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the log-probability of each completion token under the served weights."""
        tokens = torch.tensor([[*prompt_ids, *completion_ids]], device=self._model.device)
        count = len(completion_ids)
        kept = {"logits_to_keep": count + 1} if self._shares_prompts else {}
        logits = self._model(tokens, use_cache=False, **kept).logits[0, -count - 1 : -1]
        distribution = (logits.float() / temperature).log_softmax(-1)
        result: list[float] = distribution.gather(-1, tokens[0, -count:, None])[:, 0].tolist()
        return result

    @torch.no_grad()
    def differing_parts(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the parts whose weights differ from these in the engine's precision."""
        own = self._model.state_dict()
        return sorted({part_of(name) for name, held in own.items() if not torch.equal(held, state[name].to(held))})

    def _rollouts(self, block: Sequence[_Request], decoded: Decoded) -> Iterator[Rollout]:
        columns = (decoded.tokens, decoded.logprobs, decoded.lengths, decoded.stopped)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for request, (tokens, logprobs, length, stopped) in zip(block, rows, strict=True):
            if not all(map(math.isfinite, logprobs[:length])):
                raise SamplingError(
                    f"the model computes NaN or infinity on prompt {request.prompt.prompt_id!r}",
                    where=f"policy version {self.policy_version}",
                    fix="restore an earlier checkpoint and lower the learning rate",
                )
            yield Rollout(
                prompt=request.prompt,
                completion_ids=tuple(tokens[:length]),
                sampler_logprobs=tuple(logprobs[:length]),
                loss_mask=(True,) * length,
                policy_version=self.policy_version,
                finish_reason="stop" if stopped else "length",
                text=self._tokenizer.decode(tokens[:length]),
            )


def _blocks(requests: Sequence[_Request], max_concurrent: int) -> Iterator[list[_Request]]:
    """Yield blocks of similar prompt lengths, to reduce padding."""
    block: list[_Request] = []
    prompts: set[tuple[int, ...]] = set()
    for request in sorted(requests, key=lambda request: len(request.prompt.token_ids)):
        token_ids = request.prompt.token_ids
        prefill_tokens = len(prompts | {token_ids}) * len(token_ids)
        if block and (len(block) == max_concurrent or prefill_tokens > MAX_PREFILL_TOKENS):
            yield block
            block, prompts = [], set()
        block.append(request)
        prompts.add(token_ids)
    if block:
        yield block


def _uniforms(block: Sequence[_Request], num_tokens: int, *, seed: int) -> torch.Tensor:
    """Return random numbers in [0, 1), float32 [S, N], a stream per completion, independent of the block."""
    streams = [generator(seed, request.index, request.sample_index) for request in block]
    return torch.stack([torch.rand(num_tokens, generator=stream) for stream in streams])


@contextmanager
def _packed_weights(model: torch.nn.Module) -> Iterator[None]:
    """On a CPU, compute linear layers with copies of their weights in oneDNN's blocked layout.

    PyTorch's own product brings bfloat16 weights into this layout each time, and in float32 it calls MKL.
    """
    layers = [module for module in model.modules() if is_linear(module) and _gains(module.weight)]
    for layer in layers:
        layer.forward = _packed(layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        if layers:
            release_freed()  # the copies' place is too scattered for the activations of an update


def _packed(layer: torch.nn.Linear) -> partial[torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight)
    return partial(linear_of, weight=packed, bias=layer.bias)


def _gains(weight: torch.Tensor) -> bool:
    return gains_packed(weight.device, weight.dtype) and is_large(weight.numel())
