"""What each step of training was worth: the checkpoints side by side on the same held-out problems."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from rlcore.evaluation import paired_difference
from tasks.home.storage import read_json, read_table, write_json
from tasks.steps.base import StageContext, StageResult

LABELS = {  # in the order in which the checkpoints are made
    "base": "base",
    "sft": "SFT",
    "grpo": "GRPO",
    "ppo": "PPO",
    "sft_kept": "SFT on kept",
    "grpo_mixed": "GRPO mixed",
}
CONTRASTS = (
    ("SFT", "base"),
    ("GRPO", "SFT"),
    ("PPO", "SFT"),
    ("GRPO", "PPO"),
    ("SFT on kept", "SFT"),
    ("SFT on kept", "GRPO"),
    ("GRPO mixed", "SFT on kept"),
    ("GRPO mixed", "GRPO"),
)
RL_RUNS = ("grpo", "ppo", "grpo_mixed")


def run_compare(context: StageContext) -> StageResult:
    """Figures with intervals and paired tests; ``report/comparison.py`` makes the page. No model computes anew."""
    folders = {
        label: context.inputs[f"evaluate_{name}"]
        for name, label in LABELS.items()
        if f"evaluate_{name}" in context.inputs
    }
    summaries = {label: read_json(folder / "summary.json") for label, folder in folders.items()}
    answers = {label: greedy_answers(folder) for label, folder in folders.items()}
    confidence = context.config.confidence
    differences = {
        f"{new} - {old}": paired_difference(
            answers[new]["correct"].tolist(), answers[old]["correct"].tolist(), confidence=confidence
        )
        for new, old in CONTRASTS
        if new in folders and old in folders
    }
    documents = {name: asdict(paired) for name, paired in differences.items()}
    write_json({"summaries": summaries, "differences": documents}, context.folder / "comparison.json")
    metrics = {f"accuracy/{label}": row["eval/accuracy"] for label, row in summaries.items()}
    metrics |= {f"gain/{name.replace(' - ', '_over_')}": d.difference.mean for name, d in differences.items()}
    write_json(metrics, context.folder / "metrics.json")
    context.tracker.log_metrics(metrics, step=0)
    return StageResult(metrics=metrics)


def greedy_answers(folder: Path) -> pd.DataFrame:
    """The greedy answers of one checkpoint, in the order of the problems."""
    table = read_table(folder / "answers.parquet")
    return table[table["mode"] == "greedy"].sort_values("prompt_id").reset_index(drop=True)
