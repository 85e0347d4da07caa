"""Known defects of trainers: what TRL does with given completions and batches, and that ours does not."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from rlcore.algorithms.kl import k3_ratio_loss
from rlcore.algorithms.objective import mismatch_correction
from rlcore.config import RolloutCorrectionConfig
from rlcore.models.heads import ScalarHeadModel, score_rewards
from rlcore.models.policy import completion_logprobs
from rlcore.text.packing import TokenSequence, pack
from rlcore.training.experience import is_trainable
from tests.learners import gradients_of, make_learner, update_config
from tests.peers.conftest import Record
from tests.peers.tensors import draw
from tests.peers.trl_trainers import EOS, QUIET, TOKENIZER, make_trainer, padded_inputs, tiny_model
from tests.strategies import random_samples, scored_rollout

pytestmark = pytest.mark.peers

REWARDS = [1.0, 0.8, 0.4, 0.2]
COMPLETIONS = [[9, EOS], [9, 10, 11, 12, 13, EOS], [9, 10, EOS], [9, 10, 11, 12]]  # the last has no EOS


def relative(first: torch.Tensor, second: torch.Tensor) -> float:
    """Relative distance of two gradients."""
    return float((first - second).norm() / second.norm())


def gradient_of_trl(**settings: Any) -> torch.Tensor:
    """The gradient of one optimizer step of TRL over the four completions."""
    trainer = make_trainer(tiny_model(), REWARDS, COMPLETIONS, max_completion_length=6, **settings)
    trainer.train()
    return trainer.gradient


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_the_gradient_does_not_depend_on_micro_batches(loss_type: str, record: Record) -> None:
    whole = gradient_of_trl(loss_type=loss_type, shuffle_dataset=False)
    split = gradient_of_trl(
        loss_type=loss_type, per_device_train_batch_size=1, gradient_accumulation_steps=4, shuffle_dataset=False
    )
    samples = random_samples(0)
    mine = [gradients_of(make_learner(update=update_config(tokens_per_microbatch=n)), samples) for n in (512, 8)]
    ours = relative(mine[1], mine[0])
    assert ours < 1e-9
    theirs = relative(split, whole)
    record(
        f"gradient in 4 micro-batches against 1, relative ({loss_type})",
        "trl",
        theirs=f"{theirs:.2g} (float32)",
        ours=f"{ours:.0e} (float64)",
        reproduced=theirs > 1e-3,
    )


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_dropped_completion_is_in_no_denominator(loss_type: str, record: Record) -> None:
    # The completion without EOS is dropped. Its share of the mean: the gradient of the three others, as a part of what
    # it is when the dropped one is not there at all.
    trainer = make_trainer(tiny_model(), REWARDS, COMPLETIONS, loss_type=loss_type, mask_truncated_completions=True)
    trainer.train()
    (inputs,) = trainer.seen
    kept = inputs["completion_mask"].any(1)
    assert int(kept.sum()) == 3
    without = {
        name: value[kept] if isinstance(value, torch.Tensor) and value.ndim and len(value) == 4 else value
        for name, value in inputs.items()
    }
    fresh = make_trainer(tiny_model(), REWARDS, COMPLETIONS, loss_type=loss_type)
    fresh.model.train()
    fresh.current_gradient_accumulation_steps = 1
    fresh.compute_loss(fresh.model, without).backward()
    alone = torch.cat([p.grad.flatten() for p in fresh.model.parameters() if p.grad is not None])
    theirs = float(trainer.gradient.norm() / alone.norm())

    samples = random_samples(0, num_prompts=1, group_size=4)
    dropped = copy.deepcopy(samples)
    dropped[3].loss_mask.fill_(False)
    ours = float(gradients_of(make_learner(), dropped).norm() / gradients_of(make_learner(), samples[:3]).norm())
    assert ours == pytest.approx(1.0, abs=1e-9)
    record(
        f"gradient with a dropped fourth completion against that of the three alone ({loss_type})",
        "trl",
        theirs=f"{theirs:.3f}",
        ours=f"{ours:.3f}",
        reproduced=theirs != pytest.approx(1.0, abs=1e-3),
    )


def test_truncation_is_what_the_engine_says(record: Record) -> None:
    # The fourth completion ended by a stop string: complete, without EOS. A Rollout of ours carries the engine's word.
    trainer = make_trainer(tiny_model(), REWARDS, COMPLETIONS, mask_truncated_completions=True)
    trainer.train()
    lost = int((~trainer.seen[0]["completion_mask"].any(1)).sum())
    stopped = scored_rollout(0.2, completion_ids=tuple(COMPLETIONS[3]), finish_reason="stop")
    assert is_trainable(stopped, "mask")
    record(
        "complete answers (ended by a stop string) that are dropped as truncated, of 1",
        "trl",
        theirs=str(lost),
        ours="0",
        reproduced=lost > 0,
    )


def test_eos_is_trained_on_where_padding_is_eos(record: Record) -> None:
    trainer = make_trainer(tiny_model(), REWARDS, COMPLETIONS)
    trainer.train()
    trained = int(trainer.seen[0]["completion_mask"].sum())
    assert TOKENIZER.pad_token_id == EOS
    sequences = [TokenSequence(prompt_ids=(5,), completion_ids=tuple(completion)) for completion in COMPLETIONS]
    ours = sum(batch.num_tokens for batch in pack(sequences, tokens_per_microbatch=64, pad_id=EOS))
    assert ours == 15
    record(
        "tokens trained on of 15, with padding = EOS",
        "trl",
        theirs=str(trained),
        ours=str(ours),
        reproduced=trained != sum(map(len, COMPLETIONS)),
    )


def test_the_reward_is_read_at_the_eos_where_padding_is_eos(record: Record) -> None:
    config = copy.deepcopy(tiny_model().config)
    config.num_labels, config.pad_token_id = 1, EOS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = LlamaForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=theirs,
            args=RewardConfig(output_dir=folder, gradient_checkpointing=False, **QUIET),
            train_dataset=Dataset.from_list([{"chosen": "a", "rejected": "b"}]),
            processing_class=copy.deepcopy(TOKENIZER),
        )
    # An ended answer against the same answer that never ended: the scores must differ.
    batch = trainer.data_collator([{"chosen_ids": [9, 10, 11, EOS], "rejected_ids": [9, 10, 11]}])
    with torch.no_grad():
        scores = trainer.model(**batch).logits[:, 0]
    gap = float((scores[0] - scores[1]).abs())

    ours = ScalarHeadModel.with_random_head(tiny_model(), torch.Generator().manual_seed(0))
    mine = score_of(ours, (11, EOS)) - score_of(ours, (11,))
    assert abs(mine) > 1e-3
    record(
        "reward of an ended answer less that of the same answer without its EOS (must not be 0)",
        "trl",
        theirs=f"{gap:.3g}",
        ours=f"{abs(mine):.3g}",
        reproduced=gap == 0.0,
    )


def score_of(model: ScalarHeadModel, completion: tuple[int, ...]) -> float:
    """Our reward of a completion of the prompt (9, 10)."""
    sequence = TokenSequence(prompt_ids=(9, 10), completion_ids=completion)
    return float(score_rewards(model, [sequence], tokens_per_microbatch=64)[0])


def test_the_kl_loss_of_the_trainer_has_the_gradient_of_the_reverse_kl(record: Record) -> None:
    # Exact: every token of the vocabulary as a completion of one token, weighted by its probability.
    reference, prompt = tiny_model(1), (5, 6, 7)
    trainer = make_trainer(tiny_model(), REWARDS, COMPLETIONS, loss_type="grpo")
    trainer.beta, trainer.current_gradient_accumulation_steps = 1.0, 1
    model = trainer.model.train()
    with torch.no_grad():
        ref_logprobs = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    logprobs = tiny_model()(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
    for token in range(len(TOKENIZER)):
        sequence = TokenSequence(prompt_ids=prompt, completion_ids=(token,))
        inputs = padded_inputs([sequence], ref_per_token_logps=[ref_logprobs[token : token + 1]])
        loss = trainer.compute_loss(model, inputs | {"advantages": torch.zeros(1)})
        (loss * float(logprobs[token].exp())).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    fresh = tiny_model()
    own = fresh(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    (own.exp() * (own - ref_logprobs)).sum().backward()
    exact = torch.cat([p.grad.flatten() for p in fresh.parameters() if p.grad is not None])
    error, mine = relative(found, exact), relative(our_kl_gradient(prompt, ref_logprobs, logprobs.exp()), exact)
    assert mine < 1e-5
    record(
        "KL loss by default: relative error of its expected gradient against that of the reverse KL",
        "trl",
        theirs=f"{error:.0e} (float32)",
        ours=f"{mine:.0e} (float32)",
        reproduced=error > 1e-3,
    )


def our_kl_gradient(prompt: tuple[int, ...], ref_logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same expectation with our loss, from one packed batch."""
    model = tiny_model()
    sequences = [TokenSequence(prompt_ids=prompt, completion_ids=(token,)) for token in range(len(TOKENIZER))]
    (batch,) = pack(sequences, tokens_per_microbatch=1024)
    logprobs, _ = completion_logprobs(model, batch)
    loss = k3_ratio_loss(logprobs - ref_logprobs[batch.targets], logprobs - logprobs.detach())
    (weights[batch.targets] * loss).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("length", [8, 64, 512])
def test_the_correction_of_a_sequence_does_not_shrink_with_its_length(length: int, record: Record) -> None:
    # Engine and trainer differ by noise of 0.1 nats per token, of expectation 1 as a ratio; TRL's defaults with vLLM.
    count, sigma = 64, 0.1
    generator = torch.Generator().manual_seed(0)
    completions = torch.randint(2, 200, (count, length), generator=generator).tolist()
    model = tiny_model(max_position_embeddings=length + 8)
    trainer = make_trainer(model, [float(i) for i in range(count)], completions, max_completion_length=length)
    own = trainer_logprobs(trainer, completions)
    noise = torch.randn(count, length, generator=generator) * sigma - 0.5 * sigma**2
    trainer = make_trainer(
        model,
        [float(i) for i in range(count)],
        completions,
        logprobs=(own - noise).tolist(),
        max_completion_length=length,
    )
    trainer.use_vllm = True  # set late: a server is not needed for completions that are given
    trainer.vllm_generation, trainer._last_loaded_step = SimpleNamespace(sync_weights=lambda: None), 0
    trainer.train()
    theirs = float(trainer.seen[0]["importance_sampling_ratio"].mean())
    ours = our_mean_weight(noise)
    assert ours == pytest.approx(1.0, abs=0.05)
    record(
        f"mean correction weight of {count} completions of {length} tokens, 0.1 nats of noise per token",
        "trl",
        theirs=f"{theirs:.2f}",
        ours=f"{ours:.2f}",
        reproduced=theirs < 0.9,
    )


def trainer_logprobs(trainer: Any, completions: list[list[int]]) -> torch.Tensor:
    """Log-probabilities [S, T] of the completions under the trainer's model."""
    ids = torch.tensor([[5, 6, 7, *completion] for completion in completions])
    with torch.no_grad():
        logits = trainer.model(ids).logits[:, 2:-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]


def our_mean_weight(noise: torch.Tensor) -> float:
    """Mean weight over tokens of our default correction, for the same differences of log-probabilities."""
    count, length = noise.shape
    rollouts = draw(0, num_groups=1, group_size=count, width=length, lengths=(length,) * count)
    inputs = rollouts.loss_inputs(rollouts.policy_logprobs, torch.ones(count, length))
    inputs = replace(inputs, sampler_logprobs=inputs.old_logprobs - noise.flatten())
    weights, _, _ = mismatch_correction(inputs, RolloutCorrectionConfig())
    return float(weights.mean())
