"""The supervised work, the same for every arm: steps of a reward model, and of SFT, on the tiny random Llama.

32 prompts of 66 to 128 tokens with two completions of 8 to 96 tokens, the EOS included: the pairs of the reward model;
SFT learns the first of each. One optimizer step takes all 32, so that every arm has the same batches in whatever order
and rows it computes them: AdamW (0.9, 0.999, no decay), constant learning rate 1e-4, gradient clipped at norm 1,
float32. Tokens are random: the loss falls because 32 examples can be learned by heart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import LlamaForSequenceClassification

from benchmarks.peers import work
from benchmarks.peers.arena import Timing, by_arm, median, memory_mib, spread, table
from benchmarks.peers.scalar import make_scalar_model

NUM_EXAMPLES, NUM_STEPS, LEARNING_RATE = 32, 3, 1e-4
Example = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def examples() -> list[Example]:
    """Prompt, chosen and rejected completion as token ids; the completions end by the EOS."""
    generator = torch.Generator().manual_seed(4)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, work.PROMPT_VOCABULARY, (length,), generator=generator).tolist())

    def length(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    return [
        (tokens(length(66, 128)), (*tokens(length(7, 95)), work.EOS), (*tokens(length(7, 95)), work.EOS))
        for _ in range(NUM_EXAMPLES)
    ]


def make_classifier() -> LlamaForSequenceClassification:
    """The reward model that both sides begin with."""
    return make_scalar_model(work.make_model("tiny"), seed=1)


def render(timings: Sequence[Timing]) -> str:
    """The loss of each step first, then what the steps cost."""
    arms = by_arm(timings)
    losses = {arm: runs[0]["losses"] for arm, runs in arms.items()}
    steps = [f"loss {number + 1}" for number in range(NUM_STEPS)]
    curves = [(arm, *(f"{loss:.6f}" for loss in curve), _gap(curve, losses)) for arm, curve in losses.items()]
    costs = [_cost(arm, runs, median(arms.get("ours", runs), "cpu_seconds")) for arm, runs in arms.items()]
    header = ("arm", "n", "wall s", "CPU s (range)", "of ours", "peak MiB above the bare process")
    return f"{table(('arm', *steps, 'largest difference'), curves)}\n\n{table(header, costs)}"


def _gap(curve: Sequence[float], losses: Mapping[str, Sequence[float]]) -> str:
    first = next(iter(losses.values()))
    return f"{max(abs(a - b) for a, b in zip(curve, first, strict=True)):.1e}"


def _cost(arm: str, runs: Sequence[Timing], ours: float) -> tuple[str, ...]:
    times = f"{median(runs, 'cpu_seconds') / ours:.2f}x"
    wall = f"{median(runs, 'wall_seconds'):.1f}"
    return arm, str(len(runs)), wall, spread(runs, "cpu_seconds"), times, f"{memory_mib(runs):.0f}"
