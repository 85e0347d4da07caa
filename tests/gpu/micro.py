"""Models of a few thousand weights, sequences for them, and what they should compute: by the library, in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rlcore.config import OptimConfig, RlConfig, SamplingConfig, UpdateConfig
from rlcore.hardware.precision import set_compute_dtype
from rlcore.models.architectures import choose_kernels
from rlcore.text.packing import TokenSequence
from rlcore.types import TrainingSample

VOCABULARY = 262  # that of the tokenizer of models from scratch
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def make(kind: type[PretrainedConfig], **settings: Any) -> PreTrainedModel:
    """A model of an architecture with random float32 weights, on the CPU; the same every time."""
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(kind(**(SHAPE | settings)))
    return model


def placed(model: PreTrainedModel, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A copy as a run loads it: on the device, with our attention, its products in ``dtype``."""
    ours = copy.deepcopy(model).to(device)
    choose_kernels(ours)
    return set_compute_dtype(ours, dtype)


def sequences(num_prompts: int = 3, group_size: int = 3, *, longest: int = 24) -> list[TokenSequence]:
    """Groups of random completions of 1 to ``longest`` tokens, for prompts of 2 to 20."""
    draws = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, VOCABULARY, (count,), generator=draws).tolist())

    def count(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draws))

    prompts = [tokens(count(2, 20)) for _ in range(num_prompts)]
    return [
        TokenSequence(prompt_ids=prompt, completion_ids=tokens(count(1, longest)))
        for prompt in prompts
        for _ in range(group_size)
    ]


def exactly(
    model: PreTrainedModel, asked: list[TokenSequence], *, temperature: float = 1.0
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities [T] of each completion and the gradient of their sum by each weight, one by one in float64."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    found = []
    for one in asked:
        tokens = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
        logits = exact(tokens, use_cache=False).logits[0, len(one.prompt_ids) - 1 : -1] / temperature
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(one.completion_ids)[:, None])[:, 0])
    torch.cat(found).sum().backward()
    gradients = {name: weight.grad for name, weight in exact.named_parameters() if weight.grad is not None}
    return [each.detach() for each in found], gradients


def samples(asked: list[TokenSequence], *, seed: int = 0) -> list[TrainingSample]:
    draws = torch.Generator().manual_seed(seed)
    made = []
    for one in asked:
        length = len(one.completion_ids)
        made.append(
            TrainingSample(
                episode=len(made),
                group=len(made),
                prompt_ids=one.prompt_ids,
                completion_ids=one.completion_ids,
                loss_mask=torch.ones(length, dtype=torch.bool),
                sampler_logprobs=torch.full((length,), -5.5),
                old_logprobs=torch.full((length,), -5.5),
                ref_logprobs=torch.full((length,), -5.5),
                advantages=torch.randn(1, generator=draws).expand(length).clone(),
                values=torch.zeros(length),
                returns=torch.randn(length, generator=draws),
            )
        )
    return made


def rl_config(algorithm: str = "grpo", **settings: Any) -> RlConfig:
    given = {
        "num_iterations": 20,
        "prompts_per_iteration": 4,
        "group_size": 8,
        "learning_rate": 3e-3,
        "rewards": (),
        "sampling": SamplingConfig(max_new_tokens=8),
        "update": UpdateConfig(optim=OptimConfig()),
    }
    return RlConfig(algorithm=algorithm, **(given | settings))


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).cpu().clone()


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double().cpu() - exact).norm() / exact.norm())
