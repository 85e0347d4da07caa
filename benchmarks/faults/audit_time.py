"""The audit's share of a run's time: ``python -m benchmarks.faults.audit_time [--larger] [--iterations N]``.

GRPO on the shape of the preset tiny, or with ``--larger`` on one of 106 M parameters: SmolLM2-135M but for its
embeddings. Weights are random. A row for the share that is the default, and one where each iteration is looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.lab import Diary
from benchmarks.faults.models import SUMS
from rlcore.config import (
    AuditConfig,
    HealthConfig,
    KlConfig,
    ModelConfig,
    RewardTerm,
    RlConfig,
    SamplingConfig,
    ShapeConfig,
)
from rlcore.loop import train
from rlcore.loop.native import chat_prompts, native_parts
from rlcore.models.importing import import_model
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.tokenization import ChatTokenizer

TINY: Mapping[str, int] = {"hidden_size": 192, "num_layers": 2, "num_heads": 6, "num_kv_heads": 6}
LARGER: Mapping[str, int] = {"hidden_size": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3}
# A length pays: rollouts of random weights then differ in their rewards.
TERMS = (RewardTerm(kind="math"), RewardTerm(kind="length", options={"limit": 40, "buffer": 39}))


def measured(start: Path, config: RlConfig, audit: AuditConfig, folder: Path) -> tuple[float, float, float]:
    """Seconds of an iteration, the audit's share of them, and how many rollouts were looked at."""
    prompts = chat_prompts(ChatTokenizer.load(start), {question: str(total) for question, total in SUMS.items()})
    reward = build_rewards(config.rewards, resources=RewardResources())
    parts = native_parts(start, config, prompts=prompts, reward=reward, folder=folder, seed=0)
    diary, started = Diary(), time.perf_counter()
    train(dataclasses.replace(parts, health=HealthConfig(action="off", audit=audit)), diary)
    seconds = (time.perf_counter() - started) / config.num_iterations
    parts.learner.close()
    parts.reward.close()
    last = diary.rows[-1]
    return seconds, last["audit/share"], last["audit/rollouts"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--larger", action="store_true")
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape: dict[str, Any] = dict(LARGER if given.larger else TINY)
    shape |= {"intermediate_size": 1536 if given.larger else 640, "max_positions": 128}
    config = RlConfig(
        prompts_per_iteration=4 if given.larger else 16,
        group_size=4 if given.larger else 8,
        algorithm="grpo",
        num_iterations=given.iterations,
        learning_rate=1e-6,
        rewards=TERMS,
        sampling=SamplingConfig(max_new_tokens=40),
        kl=KlConfig(coefficient=0.005),
    )
    with tempfile.TemporaryDirectory(prefix="rlcore-audit-") as folder:
        start = Path(folder) / "start"
        import_model(ModelConfig(source="scratch", shape=ShapeConfig(**shape)), start, seed=0)
        print("| audit | rollouts of an iteration | seconds of an iteration | share | rollouts looked at |")
        print("|---|---|---|---|---|")
        for name, audit in (("default", AuditConfig()), ("each iteration", AuditConfig(share=1.0))):
            seconds, share, looked = measured(start, config, audit, Path(folder) / name)
            rollouts = config.prompts_per_iteration * config.group_size
            print(f"| {name} | {rollouts} | {seconds:.2f} | {share:.1%} | {looked:.0f} |", flush=True)


if __name__ == "__main__":
    main()
