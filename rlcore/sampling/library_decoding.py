"""Decoding by the library's ``generate``, for models whose cache has more than keys and values.

The library manages the state of recurrent layers, short convolutions and latent attention. Rows of equal length form a
batch, so nothing is padded: padding before a prompt would pass through a recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rlcore.sampling.decoding import Choose, Decoded, Watch, unwatched

MAX_PREFILL_TOKENS = 32_768  # per forward pass: every row computes its own copy of the prompt


def decode_by_library(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniforms: torch.Tensor,
    *,
    choose: Choose,
    eos_ids: torch.Tensor,
    watch: Watch = unwatched,
) -> Decoded:
    """Complete each prompt; arguments and result are those of :func:`rlcore.sampling.decoding.decode`.

    The model has an attention of the library's. A row that has ended is computed on until the last of its part ends;
    ``watch`` takes it for unfinished until then.
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
    """Logits processor that samples the tokens and forces the library to take them.

    ``tokens`` and ``logprobs`` are [R] of each step so far. ``watch`` gets the number of each step.
    """

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
    """Yield rows whose prompts have equal length, as many as one prefill may compute."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    for length, rows in by_length.items():
        most = max(1, MAX_PREFILL_TOKENS // length)
        for start in range(0, len(rows), most):
            yield rows[start : start + most]
