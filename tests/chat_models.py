"""A small chat model with many EOS ids, and what the evaluation's own sampler answers with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from rlcore.config import ModelConfig, ShapeConfig
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message, Prompt, Rollout

# Heads of 32: the smallest that vLLM takes on a CPU.
SHAPE = ShapeConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, max_positions=128)
QUESTIONS = ("3+4", "12+30-7", "1", "8-2+5-1+6")
MAX_NEW_TOKENS = 24


def make_checkpoint(folder: Path, *, seed: int = 3) -> Path:
    """A checkpoint from scratch, of which every third token ends an answer: so some answers end and others are cut."""
    import_model(ModelConfig(source="scratch", shape=SHAPE, license="Apache-2.0"), folder, seed=seed)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token_id": list(range(1, 262, 3))}))
    return folder


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def our_answers(checkpoint: Path, questions: Sequence[str] = QUESTIONS) -> list[tuple[tuple[int, ...], str]]:
    tokenizer = ChatTokenizer.load(checkpoint)
    turns = [(Message(role="user", content=question),) for question in questions]
    prompts = [
        Prompt(prompt_id=str(place), messages=each, token_ids=tokenizer.render_prompt(each), reference="", task="")
        for place, each in enumerate(turns)
    ]
    model = load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    greedy = SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, num_samples=1, greedy=True)
    rollouts = [group[0] for group in NativeSampler(model, tokenizer).sample(prompts, greedy, seed=0)]
    assert all(isinstance(each, Rollout) for each in rollouts)
    return [(each.completion_ids, each.text) for each in rollouts if isinstance(each, Rollout)]
