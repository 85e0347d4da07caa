"""Timed workload, the same for every arm: one GRPO step on a random Llama with forced completion lengths.

8 prompts of 66 to 128 tokens, 8 completions each of 8 to 96 tokens (the EOS included), beta 0, AdamW, float32. Models:
``tiny`` (hidden size 256, 6 layers, vocabulary 1,024) and ``smollm2`` (the shape of SmolLM2-135M). Lengths are forced
on both sides, so that both compute the same number of tokens whatever their random numbers are. Rewards alternate
between 0 and 1, so that every group has a signal.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.floor import forward_flops

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS, PROMPT_VOCABULARY, EOS = 8, 8, 96, 1024, 1
LEARNING_RATE = 1e-6
MODELS: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
}


def prompts() -> list[tuple[int, ...]]:
    """Return 8 prompts as token ids."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(66, 128, NUM_PROMPTS).round().long().tolist()
    return [tuple(torch.randint(2, PROMPT_VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


def completion_lengths() -> torch.Tensor:
    """Return the length of each of the 64 completions, prompt by prompt: int64 [64]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(8, MAX_NEW_TOKENS + 1, (NUM_PROMPTS * GROUP_SIZE,), generator=generator)


def make_model(name: str) -> LlamaForCausalLM:
    """Make the policy with the same weights in every arm."""
    config = LlamaConfig(
        **MODELS[name],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def floor_flops(name: str) -> float:
    """Return the FLOP of an exact step: one forward pass to generate, one with its backward pass to train."""
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts()])
    return 4 * forward_flops(MODELS[name], prompt_lengths, completion_lengths().view(NUM_PROMPTS, GROUP_SIZE))


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one word per token (``t17``), so that a prompt text has exactly its token ids."""
    words = {f"t{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0")


class Clock:
    """Clock of a step, and of the generation in it."""

    def __init__(self) -> None:
        self._before = _peak_mib()
        self._wall, self._cpu, self._generation = time.perf_counter(), time.process_time(), 0.0

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Time the block as generation."""
        start = time.process_time()
        yield
        self._generation += time.process_time() - start

    def report(self, arm: str, completion_tokens: int) -> None:
        """Print the timing as one line of JSON. CPU seconds are of all threads, memory is the peak of the process."""
        timing = {
            "arm": arm,
            "wall_seconds": time.perf_counter() - self._wall,
            "cpu_seconds": time.process_time() - self._cpu,
            "generation_cpu_seconds": self._generation,
            "peak_mib": _peak_mib(),
            "before_mib": self._before,
            "completion_tokens": completion_tokens,
        }
        sys.stdout.write(json.dumps(timing) + "\n")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
