"""Workload of ``make bench-gpu``: the update of one GRPO step on a random Qwen3 with given completions.

One prompt and 8 completions, whose lengths range from a quarter of what the context leaves to all of it. Both sides
compute in bfloat16 on a GPU from float32 weights, and step with AdamW. ``qwen3-0.6b`` has that model's shape;
``small`` is for trying the command on a machine without a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.floor import forward_flops
from rlcore.errors import TrainingError

GROUP_SIZE, EOS, LEARNING_RATE = 8, 1, 1e-6
TOKENS_PER_MICROBATCH = 16384
NUM_STEPS, NUM_WARMUP = 4, 1  # the first step compiles kernels and makes the optimizer's state
FLOPS_PER_FORWARD = 3  # forward, and twice that backward
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "small": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Group on a shape: ``context`` tokens are a prompt of a quarter, and its longest completion."""

    shape: str
    context: int
    device: str

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Return the prompt, without EOS."""
        generator = torch.Generator().manual_seed(1)
        return tuple(torch.randint(2, self.vocabulary, (self.context // 4,), generator=generator).tolist())

    @property
    def completions(self) -> list[tuple[int, ...]]:
        """Return the 8 completions, each ending with EOS."""
        generator = torch.Generator().manual_seed(2)
        rows = [torch.randint(2, self.vocabulary, (length,), generator=generator).tolist() for length in self.lengths]
        return [(*row[:-1], EOS) for row in rows]

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each completion: from a quarter of what the prompt leaves to all of it."""
        longest = self.context - self.context // 4
        return torch.linspace(longest / 4, longest, GROUP_SIZE).round().long().tolist()

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return SHAPES[self.shape]["vocab_size"]

    @property
    def useful_flops(self) -> float:
        """Return the minimal FLOP of the update: the prompt once, no padding, the head on completions."""
        lengths = torch.tensor([self.lengths])
        return FLOPS_PER_FORWARD * forward_flops(SHAPES[self.shape], torch.tensor([self.context // 4]), lengths)

    def make_model(self) -> Qwen3ForCausalLM:
        """Make float32 weights on the device, the same in every arm."""
        config = Qwen3Config(
            **SHAPES[self.shape],
            tie_word_embeddings=True,
            max_position_embeddings=40960,
            eos_token_id=EOS,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).to(self.device)


class StepClock:
    """Clock of wall seconds per step, with device synchronization, and of peak memory."""

    def __init__(self, work: Work) -> None:
        self._work, self._marks = work, [_now(work.device)]

    def mark(self) -> None:
        """Record the end of a step."""
        self._marks.append(_now(self._work.device))

    def report(self, arm: str, **others: Any) -> None:
        """Print the steps after the warm-up as one line of JSON."""
        seconds = [end - start for start, end in zip(self._marks, self._marks[1:], strict=False)][NUM_WARMUP:]
        work = self._work
        _print({
            "arm": arm,
            "context": work.context,
            "seconds": statistics.median(seconds),
            "tokens": sum(work.lengths) + GROUP_SIZE * len(work.prompt_ids),
            "useful_flops": work.useful_flops,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if work.device == "cuda" else None,
            **others,
        })  # fmt: skip


def main(run: Callable[[str, Work], None]) -> None:
    """Run an arm: ``ARM SHAPE CONTEXT DEVICE``. If it does not fit into memory, the table has a row for that too."""
    arm, shape, context, device = sys.argv[1:]
    try:
        run(arm, Work(shape=shape, context=int(context), device=device))
    except (torch.OutOfMemoryError, TrainingError) as error:
        _print({"arm": arm, "context": int(context), "failed": str(error).splitlines()[0]})


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def best_product(device: str) -> float:
    """Return the FLOP per second of the device's best matrix product in the precision of the work."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(30):
        start = _now(device)
        left @ right
        seconds.append(_now(device) - start)
    return 2 * size**3 / min(seconds)
