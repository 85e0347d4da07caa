"""Training rows that share words with a data set's evaluation prompts, as a run prepares its data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import DataError
from rlcore.flows.run import run_targets
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json, read_table

PRESET = """
extends = "rlvr_grpo"
without = ["data.demonstrations"]
name = "shared"

[model.shape]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 2
intermediate_size = 32
max_positions = 512

[data.prompts]
adapter = "prompts"
path = "{prompts}"
num_train = 20
num_eval = 4
max_tokens = 400

[data.demonstrations]
contract = "demonstrations"
adapter = "demonstrations"
path = "{demonstrations}"
num_train = 20
num_eval = 4
max_tokens = 400
max_quarantined = 0.2
"""
RUN = " ".join(f"word{place}" for place in range(13))
TARGETS = ("prepare_prompts", "prepare_demonstrations")


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def preset(tmp_path: Path) -> str:
    """Prompts, one of which is held out and holds the words; the third demonstration's answer has them too."""
    prompts = [
        {
            "prompt_id": f"p{n}",
            "messages": asks(f"Is {RUN} so?" if n == 20 else f"Tell me of {n}."),
            "reference": str(n),
            "task": "talk",
            "split": "eval" if n >= 20 else "train",
        }
        for n in range(24)
    ]
    demonstrations = [
        {
            "demonstration_id": f"d{n}",
            "messages": asks(f"What is {n + 50}?"),
            "completion": f"It is {RUN}." if n == 2 else f"It is {n}.",
            "reference": "",
            "task": "talk",
            "split": "eval" if n >= 20 else "train",
        }
        for n in range(24)
    ]
    paths = {
        "prompts": written(tmp_path / "prompts.jsonl", prompts),
        "demonstrations": written(tmp_path / "demonstrations.jsonl", demonstrations),
    }
    (tmp_path / "shared.toml").write_text(PRESET.format(**paths))
    return str(tmp_path / "shared.toml")


def test_an_answer_that_holds_the_words_of_an_evaluation_prompt_is_told_quarantined_or_refused(
    tracked_home: Home, preset: str
) -> None:
    made = tracked_home.root / run_targets(preset, (), TARGETS)["prepare_demonstrations"].uri
    rules = {rule["name"]: rule for rule in read_json(made / "report.json")["rules"]}
    assert rules["eval_shares_no_13_words"]["detail"].startswith("1 of ")
    assert len(read_table(made / "train.parquet")) == 20

    action = ("data.demonstrations.ngram_overlap=quarantine",)
    made = tracked_home.root / run_targets(preset, action, TARGETS)["prepare_demonstrations"].uri
    (refused,) = [json.loads(line) for line in (made / "quarantine.jsonl").read_text().splitlines()]
    assert refused["line"] == 3
    assert refused["reason"].startswith("shares 13 words in a row")
    assert "in another dataset" in refused["excerpt"]
    assert RUN[:40] in refused["excerpt"]
    assert len(read_table(made / "train.parquet")) == 19

    with pytest.raises(DataError, match="training rows rejected: 1; each shares 13 words in a row"):
        run_targets(preset, ("data.demonstrations.ngram_overlap=refuse",), TARGETS)
    # 15 words are the whole evaluation prompt, which the answer does not hold
    longer = (*action, "data.demonstrations.ngram_size=16")
    made = tracked_home.root / run_targets(preset, longer, TARGETS)["prepare_demonstrations"].uri
    assert len(read_table(made / "train.parquet")) == 20
