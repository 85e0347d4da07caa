"""Every stage that samples, through real vLLM servers: RL, an evaluation, preference pairs, rejection sampling.

`make test-engine` runs it; the interpreter of the engine's environment is in ENGINE_PYTHON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.tasks.store.storage import read_table
from tests.flows.conftest import ROOT, environment
from tests.flows.test_reasoning import OVERRIDES
from tests.integration import vllm_runs

pytestmark = pytest.mark.engine

STAGES = ("evaluate_sft", "prepare_preferences", "rejection")  # which starts from GRPO's policy
VLLM = ("engine.kind=vllm", f"engine.python={vllm_runs.PYTHON}", "engine.kv_cache_gib=0.25")
SETTINGS = (
    *OVERRIDES,
    "hardware.dtype=float32",
    "data.preferences.adapter=policy",
    "data.preferences.policy=sft",
    "stages.rejection.num_prompts=64",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of runs of the three stages by vLLM and of the evaluation by the native engine."""
    assert vllm_runs.PYTHON, "ENGINE_PYTHON names no interpreter: run `make test-engine`"
    made = tmp_path_factory.mktemp("stages")
    for engine, targets in ((VLLM, STAGES), ((), STAGES[:1])):
        code = (
            f"from rlcore.flows.run import run_targets; run_targets('reasoning', {(*SETTINGS, *engine)!r}, {targets!r})"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment(made), cwd=ROOT, capture_output=True, text=True, check=False
        )
        vllm_runs.say(ran.stderr[-3000:])
        assert ran.returncode == 0, ran.stderr
        assert ("starting vLLM" in ran.stderr) == bool(engine)
    return made


def records(home: Path, stage: str) -> list[dict[str, Any]]:
    """Return the cache records of a stage, the oldest first."""
    found = [json.loads(path.read_text()) for path in (home / "cache" / stage).glob("*.json")]
    return sorted(found, key=lambda record: record["created"])


def test_an_evaluation_by_vllm_is_one_of_its_own_and_says_what_the_native_engine_does(home: Path) -> None:
    tables = [read_table(home / record["ref"]["uri"] / "answers.parquet") for record in records(home, "evaluate_sft")]
    assert len(tables) == 2  # two keys: the engine is in them
    one, other = (table[table["mode"] == "greedy"].set_index("prompt_id")["completion"] for table in tables)
    assert set(one.index) == set(other.index)
    assert (one == other.reindex(one.index)).mean() > 0.9  # the likeliest token may be another where two are as likely


def test_pairs_and_demonstrations_are_sampled_by_vllm_and_pass_their_contracts(home: Path) -> None:
    for stage in STAGES[1:]:
        (record,) = records(home, stage)
        assert record["ref"]["rows"] > 0
        assert record["ref"]["contract"]


def test_rl_is_sampled_by_vllm_and_every_sync_is_proved(home: Path) -> None:
    (record,) = records(home, "grpo")
    history = json.loads((home / record["ref"]["uri"] / "history.json").read_text())
    assert len(history) == 2
    assert all("engine/retries" in row and "sync/logprob_max_diff" in row for row in history)


def test_only_what_samples_with_the_runs_engine_hangs_on_it(home: Path) -> None:
    for stage in ("sft", "grpo"):
        assert len(records(home, stage)) == 1
