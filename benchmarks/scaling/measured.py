"""One, two and four ranks of this machine, and what the simulation predicts: ``python -m benchmarks.scaling.measured``.

Stage times are fitted to runs of one rank with two sizes of a batch; two and four ranks are predicted from them, and
run. It needs a machine on which nothing else runs: the ranks share its cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import rlcore
from benchmarks.scaling.simulation import Costs, Fleet, Load, simulate
from rlcore.config import CheckpointConfig, PlacementConfig
from rlcore.models.runtime import Runtime
from rlcore.training.building import LearnerPlan
from rlcore.training.group import LearnerGroup
from rlcore.types import Prompt, Rollout

GROUP, LENGTH = 8, 48
SMALL, LARGE = 16, 64
"""Groups of a batch."""
RANKS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Medians over the iterations of a run: seconds of each stage, and completion tokens."""

    rollout: float
    update: float
    sync: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Of a whole iteration."""
        return self.rollout + self.update + self.sync


def digits(rollouts: Sequence[Rollout]) -> list[float | Sequence[float] | None]:
    """The share of a completion's characters that are digits."""
    return [sum(map(str.isdigit, rollout.text)) / max(1, len(rollout.text)) for rollout in rollouts]


def measured(start: Path, groups: int, ranks: int, iterations: int) -> Measured:
    """A run of so many ranks that are processes of this machine; the engine is in this one."""
    config = rlcore.RlConfig(
        algorithm="grpo",
        num_iterations=iterations,
        prompts_per_iteration=groups,
        group_size=GROUP,
        learning_rate=1e-5,
        rewards=(),
        sampling=rlcore.SamplingConfig(max_new_tokens=LENGTH),
        checkpoints=CheckpointConfig(iterations=iterations),
    )
    plan = LearnerPlan(start=start, critic_start=start, config=config, seed=0)
    placement = PlacementConfig(backend="processes", learner_ranks=ranks)
    runtime = Runtime(device=torch.device("cpu"), compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        reward = rlcore.function_reward(digits)
        parts = rlcore.native_parts(start, config, prompts=prompts_of(start), reward=reward, folder=Path(folder))
        with closing(LearnerGroup(plan, placement, runtime, note=print)) as learner:
            history = rlcore.train(replace(parts, learner=learner)).history[1:]  # the first one warms up
    return Measured(
        rollout=median(history, "seconds/rollout"),
        update=median(history, "seconds/update"),
        sync=median(history, "seconds/sync"),
        tokens=median(history, "rollouts/tokens"),
    )


def prompts_of(start: Path) -> list[Prompt]:
    """Questions of about the same length."""
    questions = {f"{number} + {number} = ?": str(2 * number) for number in range(10, 74)}
    return rlcore.chat_prompts(rlcore.ChatTokenizer.load(start), questions)


def median(history: Sequence[Mapping[str, float]], name: str) -> float:
    """The median of a metric over iterations."""
    return statistics.median(row[name] for row in history)


def fitted(small: Measured, large: Measured, prompt_tokens: float) -> Costs:
    """The stage times of which two runs of one rank were made; ``prompt_tokens``: of a prompt."""
    sequences = (SMALL * GROUP, LARGE * GROUP)
    steps = [found.tokens / count for found, count in zip((small, large), sequences, strict=True)]
    each = [found.rollout / length for found, length in zip((small, large), steps, strict=True)]
    sequence = (each[1] - each[0]) / (sequences[1] - sequences[0])
    trained = [found.tokens + prompt_tokens * groups for found, groups in ((small, SMALL), (large, LARGE))]
    token = (large.update - small.update) / (trained[1] - trained[0])
    return Costs(
        step=each[0] - sequence * sequences[0],
        sequence=sequence,
        update=small.update - token * trained[0],
        trained=token,
        sync=large.sync,
        slots=sequences[1],
    )


def predicted(costs: Costs, load: Load, ranks: int, cores: int) -> float:
    """Seconds of an iteration with so many ranks, by the simulation."""
    return simulate(costs, Fleet(samplers=1, ranks=ranks, cores=cores), load, staleness=0, iterations=1).seconds


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=9)
    iterations, cores = parser.parse_args().iterations, os.cpu_count() or 1
    torch.set_num_threads(1)  # of each process: ranks and cores are compared one to one
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "model"
        rlcore.import_model(rlcore.ModelConfig(source="scratch"), start, seed=0)
        prompt = statistics.mean(len(each.token_ids) for each in prompts_of(start))
        runs = {ranks: measured(start, LARGE, ranks, iterations) for ranks in RANKS}
        costs = fitted(measured(start, SMALL, 1, iterations), runs[1], prompt)
    length = runs[1].tokens / (LARGE * GROUP)
    load = Load(
        sequences=LARGE * GROUP, prompt_tokens=prompt * LARGE, median=length, spread=0.0, longest=round(length) + 1
    )
    print(f"{cores} cores, {load.sequences} completions of {length:.0f} tokens; {costs}")
    print("| ranks | rollout s | update s | sync s | measured s | predicted s | off |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks, found in runs.items():
        guess = predicted(costs, load, ranks, cores)
        print(
            f"| {ranks} | {found.rollout:.2f} | {found.update:.2f} | {found.sync:.2f} | {found.seconds:.2f} | "
            f"{guess:.2f} | {guess / found.seconds - 1.0:+.0%} |"
        )


if __name__ == "__main__":
    main()
