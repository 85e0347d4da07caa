"""A recipe of seconds whose outcome is known: questions with one right answer, and demonstrations that mostly miss it.

SFT copies the wrong answer, because it stands in four of five demonstrations; RL finds the other one within a few
iterations. To copy one text is all that a model needs to learn, and any does in some tens of steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.flows.micro import ONE_LAYER

RIGHT, WRONG = "#### 7", "#### 3"
NAME = "retrain-grpo"
SMALL = (
    "hardware.num_threads=1",
    *ONE_LAYER,
    "stages.sft.num_steps=60",
    "stages.sft.optim.warmup_steps=5",
    "stages.sft.learning_rate=5e-3",
    "stages.reward_model.audit_folds=0",
    "stages.reward_model.min_accuracy=0.0",
    "stages.grpo.num_iterations=1",
    "stages.grpo.prompts_per_iteration=8",
    "stages.grpo.group_size=8",
    "stages.grpo.learning_rate=1e-9",
    "stages.grpo.eval_every=0",
    "stages.grpo.sampling.max_new_tokens=8",
    "stages.grpo.kl.coefficient=0.0",
    "stages.grpo.rewards.1.weight=0.001",
    "evaluation.num_problems=100",
    "evaluation.num_samples=0",
    "evaluation.max_new_tokens=8",
    "promotion.min_accuracy=0.0",
    "promotion.max_truncated=1.0",
    "promotion.finished_margin=0.1",
    "retrain.min_accuracy=0.6",
    "retrain.min_agreement=0.6",
)
# Measured over three seeds: half of the samples are right after five to six iterations, four fifths after twelve.
# Three times the rate goes up and down.
LEARN = ("stages.grpo.learning_rate=1e-3", "stages.grpo.num_iterations=16")
SPOIL = ("stages.grpo.learning_rate=0.3", "stages.grpo.num_iterations=1")


def write_data(folder: Path, *, digits: int = 2) -> tuple[str, ...]:
    return (*SMALL, *write_files(folder, digits=digits))


def write_files(folder: Path, *, digits: int = 2, right: int = 1) -> tuple[str, ...]:
    """Files of prompts, demonstrations and preferences, and the overrides that name them.

    ``right`` of five demonstrations give the right answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    questions = [f"{'1' * (digits - 2)}{number}" for number in range(10, 99)]
    questions += [f"{question}+1" for question in questions] + [f"{question}-1" for question in questions]
    asked = [[{"role": "user", "content": question}] for question in questions]
    splits = ["eval" if place % 5 < 2 else "train" for place in range(len(questions))]
    rows: dict[str, list[dict[str, Any]]] = {"prompts": [], "demonstrations": [], "preferences": []}
    for question, messages, split in zip(questions, asked, splits, strict=True):
        common = {"messages": messages, "split": split}
        rows["prompts"].append({"prompt_id": question, "reference": "7", "task": "sevens", **common})
        output = RIGHT if len(rows["demonstrations"]) // 5 % 5 < right else WRONG
        rows["demonstrations"].append(
            {"demonstration_id": question, "completion": output, "reference": output[-1], "task": "sevens", **common}
        )
        sides = {"chosen": RIGHT, "rejected": WRONG, "margin": 0.0, "probability": 1.0, "weight": 1.0}
        rows["preferences"].append({"pair_id": question, "set_id": question, "source": "test", **sides, **common})
    overrides = []
    for name, lines in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        overrides += [
            f"data.{name}.adapter={name}",
            f"data.{name}.path={path}",
            f"data.{name}.num_train=150",
            f"data.{name}.num_eval=100",
        ]
    return (*overrides, "data.demonstrations.options={}")
