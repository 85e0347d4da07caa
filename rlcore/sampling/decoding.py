"""Batched decoding: one forward pass per token for all unfinished sequences, each with its own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache

from rlcore.sampling.kv_cache import Gaps, SharedPromptLayer, find_gaps, group_rows

Choose = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Watch = Callable[[int, int, int], None]
"""Listener of each step: the tokens that it made, the unfinished sequences after it, and its number from 1."""
MAX_PREFILL_TOKENS = 32_768  # per forward pass: every row computes its own copy of the prompt
_COMPACT_AT = 0.9  # fraction of unfinished rows at which ended rows are dropped: dropping moves rows of every layer
_CHUNK = 2**19  # logits sampled at once on a CPU: larger buffers leave the processor's cache


def unwatched(made: int, live: int, step: int) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Completions of S sequences.

    Attributes:
        tokens: int64 [S, N], valid up to ``lengths``.
        logprobs: float32 [S, N].
        lengths: [S].
        stopped: [S], True if an EOS id, the last token, ended it.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor


def decode(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniforms: torch.Tensor,
    *,
    choose: Choose,
    eos_ids: torch.Tensor,
    watch: Watch = unwatched,
) -> Decoded:
    """Complete each prompt by at most N tokens. Equal prompts share one prefill.

    Args:
        model: Model with :data:`rlcore.sampling.kv_cache.GROUPED_ATTENTION`, in evaluation mode.
        prompts: S prompts, not empty.
        uniforms: float32 [S, N] in [0, 1), the random number of each token.
        choose: Maps (logits [R, V], uniforms [R]) to tokens [R] and their log-probabilities [R].
        eos_ids: int64 [E].
    """
    num_sequences, num_tokens = uniforms.shape
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=uniforms.device)
    logprobs = torch.zeros_like(uniforms)
    lengths = torch.full((num_sequences,), num_tokens, device=uniforms.device)
    stopped = torch.zeros_like(lengths, dtype=torch.bool)
    batch, logits = _prefill(model, prompts, num_tokens)
    num_live = num_sequences
    for step in range(num_tokens):
        rows = batch.rows
        chosen, tokens_logprobs = choose(logits, uniforms[rows, step])
        tokens[rows, step], logprobs[rows, step] = chosen, tokens_logprobs
        ending = rows[torch.isin(chosen, eos_ids) & ~stopped[rows]]
        lengths[ending], stopped[ending] = step + 1, True
        live = ~stopped[rows]
        num_made, num_live = num_live, int(live.sum())
        watch(num_made, num_live, step + 1)
        if num_live == 0 or step + 1 == num_tokens:
            break
        if num_live <= _COMPACT_AT * len(rows):
            gaps = find_gaps(live, num_live)
            batch.close(gaps)
            chosen = gaps.close(chosen)
        logits = batch.advance(chosen)
    return Decoded(tokens, logprobs, lengths, stopped)


class _Batch:
    """Rows that are decoded together.

    Attributes:
        rows: [R], sequences.
        mask: bool [R, P + N], False on the left padding of shorter prompts.
        lengths: int64 [R, 1], of the prompts.
        sharing: Prompt of each row.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, mask: torch.Tensor, origin: torch.Tensor) -> None:
        self.model, self.cache, self.mask = model, cache, mask[origin]
        self.rows = torch.arange(len(origin), device=origin.device)
        self.width = cache.get_seq_length()
        self.lengths = self.mask[:, : self.width].sum(-1, keepdim=True)
        self.sharing = group_rows(cache, origin, mask[:, : self.width])

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token [R] to each row and return the logits [R, V] of the next."""
        length = self.cache.get_seq_length()
        logits: torch.Tensor = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask[:, : length + 1],
            position_ids=self.lengths + (length - self.width),
            past_key_values=self.cache,
            use_cache=True,
            sharing=self.sharing,
        ).logits
        return logits[:, -1]

    def close(self, gaps: Gaps) -> None:
        prompts, origin = gaps.close(self.sharing.origin).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        for layer in self.cache.layers:
            layer.select(gaps, prompts)
        self.rows, self.mask, self.lengths = map(gaps.close, (self.rows, self.mask, self.lengths))
        self.sharing = group_rows(self.cache, origin, self.sharing.mask[prompts])


def _prefill(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], num_tokens: int
) -> tuple[_Batch, torch.Tensor]:
    distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
    width = max(map(len, distinct))
    token_ids = torch.zeros(len(distinct), width, dtype=torch.int64)
    mask = torch.ones(len(distinct), width + num_tokens, dtype=torch.bool)
    for prompt, index in distinct.items():
        token_ids[index, width - len(prompt) :] = torch.tensor(prompt)
        mask[index, : width - len(prompt)] = False
    mask = mask.to(model.device)
    cache = Cache(layer_class_to_replicate=SharedPromptLayer)
    logits = model(
        input_ids=token_ids.to(model.device),
        attention_mask=mask[:, :width],
        position_ids=(mask[:, :width].cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    origin = torch.tensor([distinct[prompt] for prompt in prompts], device=model.device)
    return _Batch(model, cache, mask, origin), logits[origin]


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample each row from ``softmax(logits / temperature)`` by inverting its cumulative distribution.

    Args:
        logits: [R, V].
        uniforms: float32 [R] in [0, 1).
        temperature: Above 0; of all rows, or [R, 1].

    Returns:
        Tokens, int64 [R], and their log-probabilities, float32 [R]. Non-finite logits give non-finite
        log-probabilities.
    """
    if logits.device.type != "cpu" or logits.numel() <= _CHUNK:
        return _invert(logits, uniforms, temperature)
    rows = max(1, _CHUNK // logits.shape[-1])
    chunks = [slice(start, start + rows) for start in range(0, len(logits), rows)]
    temperatures = [temperature[chunk] if isinstance(temperature, torch.Tensor) else temperature for chunk in chunks]
    parts = [_invert(logits[chunk], uniforms[chunk], each) for chunk, each in zip(chunks, temperatures, strict=True)]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _invert(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    above_peak = logits.float() / temperature
    above_peak.sub_(above_peak.amax(-1, keepdim=True))
    # The only other buffer of the vocabulary's width: exponentials, then their sums, in place.
    cumulative = above_peak.exp()
    torch.cumsum(cumulative, -1, out=cumulative)
    total = cumulative[:, -1:]
    # right=True finds the first entry above the target, so a token of probability 0 is never drawn.
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], (above_peak.gather(-1, tokens) - total.log())[:, 0]


def argmax_tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest token of each row of logits [R, V], int64 [R], and its log-probability, float32 [R]."""
    logprobs, tokens = logits.float().log_softmax(-1).max(-1)
    return tokens, logprobs


def decode_by_library(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniforms: torch.Tensor,
    *,
    choose: Choose,
    eos_ids: torch.Tensor,
    watch: Watch = unwatched,
) -> Decoded:
    """Complete each prompt as :func:`decode`, by the library's ``generate``, which manages other states than keys.

    Rows of equal length form a batch: padding before a prompt would pass through a recurrent state. Ended rows are
    computed, and unfinished for ``watch``, until the last of their part ends.
    """
    num_tokens = uniforms.shape[1]
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=uniforms.device)
    logprobs = torch.zeros_like(uniforms)
    num_live = len(prompts)
    for rows in _parts(prompts):
        chosen = _Chosen(choose, uniforms[rows], partial(watch, len(rows), num_live))
        ids = torch.tensor([prompts[row] for row in rows], device=model.device)
        settings = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=eos_ids.tolist() or None,
            pad_token_id=0,
        )
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList([chosen]),
        )
        count = len(chosen.tokens)
        tokens[rows, :count], logprobs[rows, :count] = torch.stack(chosen.tokens, 1), torch.stack(chosen.logprobs, 1)
        num_live -= len(rows)
    is_end = torch.isin(tokens, eos_ids)
    stopped = is_end.any(-1)
    lengths = torch.where(stopped, is_end.int().argmax(-1) + 1, num_tokens)
    return Decoded(tokens, logprobs, lengths, stopped)


class _Chosen(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Logits processor that samples the tokens, [R] of each step, and forces them on the library."""

    def __init__(self, choose: Choose, uniforms: torch.Tensor, watch: Callable[[int], None]) -> None:
        self._choose, self._uniforms, self._watch = choose, uniforms, watch
        self.tokens: list[torch.Tensor] = []
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens, logprobs = self._choose(scores, self._uniforms[:, len(self.tokens)])
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self._watch(len(self.tokens))
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[:, None], 0.0)


def _parts(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[int]]:
    """Yield rows of prompts of equal length, as many as one prefill may compute."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    for length, rows in by_length.items():
        most = max(1, MAX_PREFILL_TOKENS // length)
        for start in range(0, len(rows), most):
            yield rows[start : start + most]
