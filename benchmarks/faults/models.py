"""Tiny models for faulty runs, their sums, and a folder for all files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlcore.config import ModelConfig, SftConfig, ShapeConfig
from rlcore.loop.native import chat_prompts
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy, save_model
from rlcore.text.demonstrations import Demonstration, render_conversation
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.sft import train_sft
from rlcore.types import Message, Prompt

SHAPE = ShapeConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64, max_positions=128)
SUMS = {f"{a}+{b}": a + b for a in range(10) for b in range(10)}
MAX_NEW_TOKENS = 32
SFT = SftConfig(num_steps=120, batch_size=16, learning_rate=5e-3)
CPU: Mapping[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


@functools.cache
def home() -> Path:
    """Return a folder for all files, which is removed with the process."""
    kept = tempfile.TemporaryDirectory(prefix="rlcore-faults-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[Any] = []
_numbers = itertools.count()


def new_folder() -> Path:
    """Return a folder that does not exist yet."""
    return home() / f"run-{next(_numbers)}"


@functools.cache
def scratch() -> Path:
    """Make the untrained model."""
    import_model(ModelConfig(source="scratch", shape=SHAPE), home() / "scratch", seed=0)
    return home() / "scratch"


def rows_of(split: str) -> list[tuple[tuple[Message, ...], str]]:
    """Return questions with short answers, half of them wrong."""
    draws, rows = random.Random(0), []
    for question, total in SUMS.items():
        said = total if draws.random() < 0.5 else max(0, total + draws.choice((-2, -1, 1, 2)))
        words = " ".join(draws.choice(("so", "well", "thus", "hence")) for _ in range(draws.randint(1, 4)))
        rows.append(((Message(role="user", content=question),), f"{words} #### {said}"))
    return rows if split == "train" else rows[::2]


def demonstrations(split: str) -> list[Demonstration]:
    """Tokenize the rows."""
    tokenizer = ChatTokenizer.load(scratch())
    return [render_conversation(tokenizer, messages, answer) for messages, answer in rows_of(split)]


def calls(split: str) -> list[Demonstration]:
    """Tokenize the rows with a calculator call before the answer."""
    tokenizer = ChatTokenizer.load(scratch())

    def turns(question: str) -> tuple[Message, ...]:
        said = Message(role="tool", content=str(SUMS[question]))
        return (Message(role="assistant", content=f"<tool:calculator>{question}</tool>"), said)

    rows = rows_of(split)
    return [render_conversation(tokenizer, (*asked, *turns(asked[0].content)), answer) for asked, answer in rows]


def start(*, calling: bool = False, untied: bool = False) -> Path:
    """Train a policy that answers in the format and is sometimes right.

    ``calling``: it calls the calculator first. ``untied``: its head is a separate tensor.
    """
    return _untied() if untied else _start(calling)


@functools.cache
def _untied() -> Path:
    model = load_policy(_start(False), **CPU)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    save_model(model, scratch(), home() / "untied")
    return home() / "untied"


@functools.cache
def _start(calling: bool) -> Path:
    model = load_policy(scratch(), **CPU)
    rows = calls if calling else demonstrations
    config = dataclasses.replace(SFT, num_steps=5 * SFT.num_steps) if calling else SFT  # copying takes longer
    train_sft(model, rows("train"), rows("eval"), config, seed=0, report=lambda *_: None)
    folder = home() / ("calling" if calling else "start")
    save_model(model, scratch(), folder)
    return folder


def prompts() -> list[Prompt]:
    """Return sums with their reference answers."""
    return chat_prompts(ChatTokenizer.load(start()), {question: str(total) for question, total in SUMS.items()})
