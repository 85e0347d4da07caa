"""A reward model or a critic as transformers has it, on the trunk of a policy."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification


def make_scalar_model(policy: LlamaForCausalLM, *, seed: int) -> LlamaForSequenceClassification:
    """On a copy of the policy's trunk; the head, without bias, is drawn by the seed."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    torch.manual_seed(seed)
    made = LlamaForSequenceClassification(config)
    made.model.load_state_dict(policy.model.state_dict())
    return made
