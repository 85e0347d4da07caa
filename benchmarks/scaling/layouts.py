"""Table of layouts in docs/scaling.md: ``python -m benchmarks.scaling.layouts`` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rlcore.config import EngineConfig, KlConfig, RewardTerm, RlConfig, SamplingConfig, UpdateConfig
from rlcore.hardware.memory_plan import ModelSize, format_bytes
from rlcore.tasks.pipeline.layouts import GPUS, IterationShape, best_layout

CARD, COUNTS = "h100", (1, 8, 64, 512)
# Hidden size, layers, widths of keys and of the feed-forward layer, vocabulary, and True if the head is tied.
SHAPES: Mapping[str, tuple[int, int, int, int, int, bool]] = MappingProxyType(
    {
        "0.5 B": (896, 24, 128, 4864, 151_936, True),
        "1.5 B": (1536, 28, 256, 8960, 151_936, True),
        "7.6 B": (3584, 28, 512, 18_944, 152_064, False),
        "32 B": (5120, 64, 1024, 27_648, 152_064, False),
        "70 B": (8192, 80, 1024, 28_672, 128_256, False),
    }
)
RUN = RlConfig(
    algorithm="grpo",
    num_iterations=100,
    prompts_per_iteration=256,
    group_size=16,
    learning_rate=1e-6,
    rewards=(RewardTerm(kind="math"),),
    sampling=SamplingConfig(max_new_tokens=4096, max_concurrent=4096, engine=EngineConfig(kind="vllm")),
    update=UpdateConfig(tokens_per_microbatch=8192),
    kl=KlConfig(coefficient=0.001),
)


def size_of(name: str) -> ModelSize:
    """Return the size of a model of that many parameters, shaped like Qwen2.5 or Llama 3."""
    hidden, layers, keys, feed_forward, vocabulary, tied = SHAPES[name]
    linear = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, feed_forward)] * 3
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return ModelSize(
        num_parameters=layers * (sum(i * o for i, o in linear) + 2 * hidden) + embeddings + hidden,
        num_layers=layers,
        hidden=hidden,
        keys=keys,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        linear=tuple(("", i, o) for _ in range(layers) for i, o in linear),
        adaptable=frozenset(),
    )


def rows() -> Iterator[tuple[str, ...]]:
    """Yield each model, with the layout and the seconds of an iteration for each number of GPUs."""
    for name in SHAPES:
        work = IterationShape(size=size_of(name), rl=RUN, prompt_tokens=512, recompute=True)
        cells = []
        for count in COUNTS:
            found = best_layout(work, GPUS[CARD], count)
            if isinstance(found, str):
                cells.append("does not fit")
                continue
            dealt = "in turn" if found.shared else f"{found.ranks} + {found.engines} × {found.width}"
            cells.append(
                f"{dealt}, {format_bytes(int(found.held))}: {found.seconds(0):,.0f} s, {found.seconds(1):,.0f} s"
            )
        yield (name, *cells)


def table() -> str:
    """Render the table as Markdown."""
    head = ("model", *(f"{count} {CARD.upper()}" for count in COUNTS))
    lines = [head, ("---",) * len(head), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
