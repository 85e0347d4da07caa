"""Updates of rlcore: ``python -m benchmarks.peers.gpu_ours ours|"ours, recompute" SHAPE CONTEXT DEVICE``."""

from __future__ import annotations

import torch

from benchmarks.peers.gpu_work import GROUP_SIZE, LEARNING_RATE, NUM_STEPS, TOKENS_PER_MICROBATCH, StepClock, Work, main
from rlcore.algorithms.table import ALGORITHMS
from rlcore.config import OptimConfig, RlConfig, RolloutCorrectionConfig, SamplingConfig, UpdateConfig
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.batching import choose_attention
from rlcore.models.gradient_checkpointing import enable_gradient_checkpointing
from rlcore.training.learner import Learner
from rlcore.types import TrainingSample


def samples(work: Work) -> list[TrainingSample]:
    """Return the group, with advantages -1 and 1 alternating."""
    made = []
    for number, completion_ids in enumerate(work.completions):
        zeros = torch.zeros(len(completion_ids))
        made.append(
            TrainingSample(
                prompt_ids=work.prompt_ids,
                completion_ids=completion_ids,
                loss_mask=torch.ones(len(completion_ids), dtype=torch.bool),
                sampler_logprobs=zeros,
                old_logprobs=zeros,
                ref_logprobs=zeros,
                advantages=torch.full_like(zeros, 1.0 if number % 2 else -1.0),
                values=zeros,
                returns=zeros,
            )
        )
    return made


def run(arm: str, work: Work) -> None:
    """Run the steps of one arm."""
    model = set_compute_dtype(work.make_model(), torch.bfloat16 if work.device == "cuda" else torch.float32)
    choose_attention(model)
    if arm == "ours, recompute":
        enable_gradient_checkpointing(model)
    config = RlConfig(
        algorithm="grpo",
        num_iterations=NUM_STEPS,
        prompts_per_iteration=1,
        group_size=GROUP_SIZE,
        learning_rate=LEARNING_RATE,
        rewards=(),
        sampling=SamplingConfig(max_new_tokens=max(work.lengths)),
        update=UpdateConfig(
            tokens_per_microbatch=TOKENS_PER_MICROBATCH,
            optim=OptimConfig(beta2=0.999),
            rollout_correction=RolloutCorrectionConfig(mode="off"),  # no sampler made these completions
        ),
    )
    learner, group = Learner(model, None, algorithm=ALGORITHMS["grpo"], config=config), samples(work)
    clock = StepClock(work)
    for step in range(NUM_STEPS):
        learner.update(group, seed=step)
        clock.mark()
    clock.report(arm, tokens_per_microbatch=learner.tokens_per_microbatch)


if __name__ == "__main__":
    main(run)
