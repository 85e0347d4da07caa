"""Our reward model and SFT against TRL's trainers on the same tiny model and batch: loss and gradient, float32."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from rlcore.config import RewardModelConfig, SftConfig
from rlcore.models.heads import ScalarHeadModel
from rlcore.text.demonstrations import Demonstration
from rlcore.text.packing import TokenSequence
from rlcore.training.preferences import TokenPair
from rlcore.training.reward_model import train_reward_model
from rlcore.training.sft import train_sft
from tests.learners import UNCLIPPED, assert_same
from tests.peers.trl_trainers import EOS, QUIET, TOKENIZER, tiny_model

pytestmark = pytest.mark.peers

PAD = TOKENIZER.convert_tokens_to_ids(
    "<|im_start|>"
)  # not the EOS: see test_defects_trainers.py for what happens if it is
PROMPT = (9, 10, 11)
PAIRS = (
    TokenPair(set_id="0.0", prompt_ids=PROMPT, chosen_ids=(20, 21, 22, EOS), rejected_ids=(23, EOS), margin=0.0),
    TokenPair(set_id="0.5", prompt_ids=PROMPT, chosen_ids=(24, EOS), rejected_ids=(25, 26, 27, EOS), margin=0.5),
    TokenPair(set_id="1.0", prompt_ids=(12,), chosen_ids=(28, 29, EOS), rejected_ids=(30, 31, EOS), margin=1.0),
)
COMPLETIONS = (
    TokenSequence(prompt_ids=PROMPT, completion_ids=(20, 21, 22, EOS)),
    TokenSequence(prompt_ids=PROMPT, completion_ids=(23, EOS)),
    TokenSequence(prompt_ids=(12,), completion_ids=(24, 25, 26, 27, 28, EOS)),
)


def gradients(model: torch.nn.Module, *, drop: str = "") -> dict[str, torch.Tensor]:
    """Gradient of each parameter by its name without the prefix ``drop``."""
    named = model.named_parameters()
    return {name.removeprefix(drop): p.grad for name, p in named if p.grad is not None}


def assert_equal_gradients(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """Same names, same numbers up to 1e-5 of the norm."""
    assert first.keys() == second.keys()
    assert_same(*(torch.cat([side[name].flatten() for name in sorted(first)]) for side in (first, second)), 1e-5)


def classifier(seed: int = 0) -> LlamaForSequenceClassification:
    """TRL's reward model: a Llama whose head gives one number."""
    config = copy.deepcopy(tiny_model(seed).config)
    config.num_labels, config.pad_token_id = 1, PAD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForSequenceClassification(config)


def as_ours(theirs: LlamaForSequenceClassification) -> ScalarHeadModel:
    """The same weights in our reward model."""
    backbone = LlamaForCausalLM(theirs.config)
    backbone.model.load_state_dict(theirs.model.state_dict())
    model = ScalarHeadModel.on_backbone(backbone)
    model.head.load_state_dict(theirs.score.state_dict())
    return model


def test_the_bradley_terry_loss_equals_trls_reward_trainer() -> None:
    theirs = classifier()
    ours = as_ours(theirs)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.pad_token_id = PAD
    rows = [
        {
            "chosen_ids": [*pair.prompt_ids, *pair.chosen_ids],
            "rejected_ids": [*pair.prompt_ids, *pair.rejected_ids],
            "margin": pair.margin,
        }
        for pair in PAIRS
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=theirs,
            args=RewardConfig(output_dir=folder, gradient_checkpointing=False, **QUIET),
            train_dataset=Dataset.from_list([{"chosen": "a", "rejected": "b"}]),
            processing_class=tokenizer,
        )
    trainer.model.train()
    their_loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    their_loss.backward()

    my_loss, seen = first_step(
        ours,
        lambda report: train_reward_model(
            ours,
            PAIRS,
            RewardModelConfig(num_epochs=1, batch_size=3, learning_rate=1e-3, head_learning_rate=1e-3, optim=UNCLIPPED),
            seed=0,
            report=report,
        ),
        "rm/loss",
    )
    assert my_loss == pytest.approx(float(their_loss.detach()), rel=1e-6)
    named = {name.removeprefix("backbone.").replace("head.", "score."): grad for name, grad in seen.items()}
    assert_equal_gradients(named, gradients(trainer.model))


def first_step(
    model: torch.nn.Module, train: Callable[[Callable[[int, Mapping[str, float]], None]], None], name: str
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss ``name`` of the one step of a training of ours, and the gradient by parameter that its optimizer saw."""
    losses: list[float] = []
    seen: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    hook = register_optimizer_step_pre_hook(keep)
    try:
        train(lambda step, metrics: losses.append(metrics[name]))
    finally:
        hook.remove()
    return losses[0], seen


def sft_of_trl(model: LlamaForCausalLM, sequences: tuple[TokenSequence, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """TRL's completion-only loss of one batch and its gradient; the labels are made by TRL's own preparation."""
    rows = [
        {
            "input_ids": [*sequence.prompt_ids, *sequence.completion_ids],
            "completion_mask": [0] * len(sequence.prompt_ids) + [1] * len(sequence.completion_ids),
        }
        for sequence in sequences
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                gradient_checkpointing=False,
                completion_only_loss=True,
                per_device_train_batch_size=len(rows),
                **QUIET,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=copy.deepcopy(TOKENIZER),
        )
    (batch,) = trainer.get_train_dataloader()
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), gradients(trainer.model)


def sft_of_ours(model: LlamaForCausalLM, sequences: tuple[TokenSequence, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """Our loss of one step over the batch, and its gradient."""
    rows = [
        Demonstration(sequence=sequence, loss_mask=(True,) * len(sequence.completion_ids)) for sequence in sequences
    ]
    config = SftConfig(num_steps=1, batch_size=len(rows), learning_rate=1e-3, optim=UNCLIPPED)
    return first_step(model, lambda report: train_sft(model, rows, rows, config, seed=0, report=report), "sft/loss")


def test_the_completion_only_loss_equals_trls_sft_trainer() -> None:
    their_loss, their_gradient = sft_of_trl(tiny_model(), COMPLETIONS)
    my_loss, my_gradient = sft_of_ours(tiny_model(), COMPLETIONS)
    assert my_loss == pytest.approx(their_loss, rel=1e-6)
    assert_equal_gradients(my_gradient, their_gradient)
