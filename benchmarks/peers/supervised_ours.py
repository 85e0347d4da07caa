"""Our reward model and our SFT on the supervised work: ``python -m benchmarks.peers.supervised_ours rm|sft``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from transformers import LlamaForCausalLM

from benchmarks.peers import supervised, work
from benchmarks.peers.arena import Meter, peak_mib
from rlcore.config import OptimConfig, RewardModelConfig, SftConfig
from rlcore.demonstrations import Demonstration
from rlcore.models.heads import ScalarModel
from rlcore.models.tree_attention import TREE_ATTENTION
from rlcore.packing import TokenSequence
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_model import train_reward_model
from rlcore.training.sft import train_sft

TOKENS_PER_MICROBATCH = 2048
OPTIM = OptimConfig(beta2=0.999)
Report = Callable[[int, Mapping[str, float]], None]


def make_policy() -> LlamaForCausalLM:
    """With the attention that a loaded model has."""
    model = work.make_model("tiny")
    model.set_attn_implementation(TREE_ATTENTION)
    return model


def reward_model() -> Callable[[Report], None]:
    """The pairs and the model; what is returned trains it."""
    rate = supervised.LEARNING_RATE
    config = RewardModelConfig(
        num_epochs=supervised.NUM_STEPS,
        batch_size=supervised.NUM_EXAMPLES,
        learning_rate=rate,
        head_learning_rate=rate,
        tokens_per_microbatch=TOKENS_PER_MICROBATCH,
        optim=OPTIM,
    )
    pairs = [
        TokenPair(set_id=str(number), prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected)
        for number, (prompt, chosen, rejected) in enumerate(supervised.examples())
    ]
    model = ScalarModel.on_trunk(make_policy())
    with torch.no_grad():
        model.head.weight.copy_(supervised.make_classifier().score.weight)
    return lambda report: train_reward_model(model, pairs, config, seed=0, report=report)


def sft() -> Callable[[Report], None]:
    """The demonstrations and the model; what is returned trains it, and evaluates one demonstration at the end."""
    config = SftConfig(
        num_steps=supervised.NUM_STEPS,
        batch_size=supervised.NUM_EXAMPLES,
        learning_rate=supervised.LEARNING_RATE,
        tokens_per_microbatch=TOKENS_PER_MICROBATCH,
        optim=OPTIM,
    )
    rows = [
        Demonstration(sequence=TokenSequence(prompt_ids=prompt, completion_ids=chosen), loss_mask=(True,) * len(chosen))
        for prompt, chosen, _ in supervised.examples()
    ]
    model = make_policy()
    return lambda report: train_sft(model, rows, rows[:1], config, seed=0, report=report)


def main(stage: str) -> None:
    bare, losses = peak_mib(), list[float]()
    train = {"rm": reward_model, "sft": sft}[stage]()
    meter = Meter(bare_mib=bare)
    train(lambda step, metrics: losses.append(metrics[f"{stage}/loss"]))
    meter.report("ours", losses=losses)


if __name__ == "__main__":
    main(sys.argv[1])
