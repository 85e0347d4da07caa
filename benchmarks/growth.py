"""Cost of one update: CPU seconds against group size, prompt, completion, vocabulary, and model.

    python -m benchmarks growth [--repeats 3] [--out .rlcore/bench-growth.json]

One size grows, the others stay at the base; the sizes alternate, and the median of the repeats counts. Each curve has a
floor: the minimal FLOP of an exact update, at the machine's best matrix product. The exponent is the slope of a line
through the logarithms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.floor import forward_flops, peak_flops
from benchmarks.peers.arena import describe
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import RlConfig, SamplingConfig, UpdateConfig
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample

NUM_PROMPTS, TOKENS_PER_MICROBATCH = 2, 2048
FLOPS_PER_FORWARD = 3  # forward, and twice that backward


@dataclass(frozen=True, kw_only=True)
class Work:
    """Update of two groups on a random Llama of ``layers`` layers."""

    group_size: int = 8
    prompt_tokens: int = 128
    completion_tokens: int = 64
    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 4

    @property
    def shape(self) -> dict[str, int]:
        """Return the fields of a ``LlamaConfig``."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 8 * self.hidden // 3,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": self.hidden // 64,
            "max_position_embeddings": 8192,
        }

    @property
    def floor_flops(self) -> float:
        """Return the minimal FLOP of the update."""
        prompts = torch.full((NUM_PROMPTS,), self.prompt_tokens)
        lengths = torch.full((NUM_PROMPTS, self.group_size), self.completion_tokens)
        return FLOPS_PER_FORWARD * forward_flops(self.shape, prompts, lengths)


SWEEPS: dict[str, tuple[int, ...]] = {
    "group_size": (2, 4, 8, 16, 32),
    "prompt_tokens": (64, 128, 256, 512, 1024),
    "completion_tokens": (16, 32, 64, 128, 256),
    "vocabulary": (1024, 4096, 16384, 49152),
    "hidden": (64, 128, 192, 320, 512),
    "layers": (1, 2, 4, 8, 16),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(".rlcore/bench-growth.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name, sizes in SWEEPS.items()}
    peaks = []
    for _ in range(options.repeats):
        peaks.append(peak_flops())
        for name, sizes in SWEEPS.items():
            for size in sizes:
                seconds[name][size].append(time_update(replace(Work(), **{name: size})))
    curves = [curve(name, seconds[name], max(peaks)) for name in SWEEPS]
    report = {
        "machine": describe(1, [os.getloadavg()[0]]),
        "peak_gflops": max(peaks) / 1e9,
        "base": asdict(Work()),
        "curves": curves,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    sys.stdout.write(render(report) + "\n")
    return 0


def time_update(work: Work) -> float:
    """Return CPU seconds of the second update of a fresh learner: the first one makes the optimizer's state."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**work.shape, tie_word_embeddings=True, attn_implementation="sdpa")).eval()
    model.set_attn_implementation(TREE_ATTENTION)
    config = RlConfig(
        algorithm="grpo",
        num_iterations=2,
        prompts_per_iteration=NUM_PROMPTS,
        group_size=work.group_size,
        learning_rate=1e-6,
        rewards=(),
        sampling=SamplingConfig(max_new_tokens=work.completion_tokens),
        update=UpdateConfig(tokens_per_microbatch=TOKENS_PER_MICROBATCH),
    )
    learner = Learner(model, None, algorithm=ALGORITHMS["grpo"], config=config)
    samples = [sample(work, prompt, number) for prompt in range(NUM_PROMPTS) for number in range(work.group_size)]
    learner.update(samples, seed=0)
    start = time.process_time()
    learner.update(samples, seed=1)
    return time.process_time() - start


def sample(work: Work, prompt: int, number: int) -> TrainingSample:
    """Make a random completion of one of the prompts, with an advantage."""
    of_prompt = torch.Generator().manual_seed(prompt)
    of_completion = torch.Generator().manual_seed(1000 * (prompt + 1) + number)
    count = work.completion_tokens
    zeros = torch.zeros(count)
    return TrainingSample(
        prompt_ids=tuple(torch.randint(0, work.vocabulary, (work.prompt_tokens,), generator=of_prompt).tolist()),
        completion_ids=tuple(torch.randint(0, work.vocabulary, (count,), generator=of_completion).tolist()),
        loss_mask=torch.ones(count, dtype=torch.bool),
        sampler_logprobs=torch.full((count,), -float(np.log(work.vocabulary))),
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=torch.full((count,), 1.0 if number % 2 else -1.0),
        values=zeros,
        returns=zeros,
    )


def curve(name: str, seconds: dict[int, list[float]], peak: float) -> dict[str, Any]:
    """Return sizes, median seconds, floor seconds, and the exponents of both."""
    sizes = list(seconds)
    measured = [statistics.median(seconds[size]) for size in sizes]
    floor = [replace(Work(), **{name: size}).floor_flops / peak for size in sizes]
    return {
        "name": name,
        "sizes": sizes,
        "seconds": measured,
        "floor": floor,
        "exponent": exponent(sizes, measured),
        "floor_exponent": exponent(sizes, floor),
    }


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of ln(seconds) over ln(size), by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def render(report: dict[str, Any]) -> str:
    """Render a Markdown table of the sweeps."""
    lines = [
        f"{report['machine']} Best product {report['peak_gflops']:.0f} GFLOP a CPU second; base {report['base']}.",
        "",
        "| grows | sizes | CPU s | of the floor | exponent | floor's exponent |",
        "|---|---|---|---|---|---|",
    ]
    for each in report["curves"]:
        ratios = [spent / least for spent, least in zip(each["seconds"], each["floor"], strict=True)]
        cells = (
            each["name"].replace("_", " "),
            f"{each['sizes'][0]} to {each['sizes'][-1]}",
            f"{each['seconds'][0]:.3f} to {each['seconds'][-1]:.3f}",
            " ".join(f"{ratio:.1f}" for ratio in ratios),
            f"{each['exponent']:.2f}",
            f"{each['floor_exponent']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
