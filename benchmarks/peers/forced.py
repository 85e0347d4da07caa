"""Completions of given lengths in rlcore and transformers: tokens are sampled normally, with EOS only at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM, LogitsProcessor

from benchmarks.peers.work import EOS
from rlcore.sampling.decoding import Decoded, decode, sample_tokens

_END = 2.0  # above every random number: the token at this index is EOS


def decode_forced(engine: LlamaForCausalLM, prompts: Sequence[tuple[int, ...]], lengths: torch.Tensor) -> Decoded:
    """Return the native engine's completion of each prompt by exactly ``lengths`` [S] tokens, the last one EOS."""
    draws = torch.Generator().manual_seed(3)
    uniforms = torch.rand(len(lengths), int(lengths.max()), generator=draws)
    uniforms[torch.arange(len(lengths)), lengths - 1] = _END
    with torch.inference_mode():
        return decode(engine, prompts, uniforms, choose=_choose, eos_ids=torch.tensor([EOS]))


def _choose(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample without EOS, or choose EOS at the end of the completion."""
    ends = uniforms >= _END
    allowed = logits.clone()
    allowed[:, EOS] = float("-inf")
    tokens, logprobs = sample_tokens(allowed, uniforms.masked_fill(ends, 0.5), temperature=1.0)
    eos_logprobs = logits[:, EOS] - logits.logsumexp(-1)
    return tokens.masked_fill(ends, EOS), torch.where(ends, eos_logprobs, logprobs)


class ForcedLengths(LogitsProcessor):
    """Logits processor that forces ``lengths`` [S] of rows with ``prompt_width`` prompt positions in ``generate``."""

    def __init__(self, prompt_width: int, lengths: torch.Tensor) -> None:
        self._prompt_width, self._lengths = prompt_width, lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._prompt_width + 1
        scores[:, EOS] = float("-inf")
        ends = self._lengths == place
        scores[ends] = float("-inf")
        scores[ends, EOS] = 0.0
        return scores
