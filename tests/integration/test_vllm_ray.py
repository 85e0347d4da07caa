"""Two ranks and a scorer on a Ray cluster, two real vLLM servers beside them: whole, and with a server killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tests.flows.conftest import ROOT, environment
from tests.flows.homes import folder
from tests.flows.micro import MICRO
from tests.flows.test_placement_ray import NICENESS, descendants, end, until, until_saved
from tests.integration import vllm_runs

pytest.importorskip("ray")
pytestmark = pytest.mark.engine

PLACED = (
    "placement.backend=ray",
    "placement.learner_ranks=2",
    "placement.ray.scorers=1",
    "hardware.dtype=float32",
    "stages.grpo.sampling.engine.kind=vllm",
    f"stages.grpo.sampling.engine.python={vllm_runs.PYTHON}",
    "stages.grpo.sampling.engine.kv_cache_gib=0.25",
    "stages.grpo.sampling.engine.replicas=2",
)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_on_a_cluster_samples_each_prompt_once_from_two_servers(is_killed: bool, tmp_path: Path) -> None:
    assert vllm_runs.PYTHON, "ENGINE_PYTHON names no interpreter: run `make test-engine`"
    code = f"from flows.run import run_targets; run_targets('tiny', {(*MICRO, *PLACED)!r}, ('grpo',))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(tmp_path) | NICENESS,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    until_saved(process, tmp_path, 1)
    left = descendants(process.pid)
    servers = [number for number, command in left.items() if "vllm.entrypoints.openai.api_server" in command]
    if is_killed:
        os.kill(max(servers), signal.SIGKILL)
    said = end(process)
    vllm_runs.say(said[-3000:])
    assert said.count("starting vLLM") == 2 + is_killed
    rows = json.loads((folder(tmp_path, "grpo") / "history.json").read_text())
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    tables = sorted((folder(tmp_path, "grpo") / "rollouts").glob("*.parquet"))
    counts = [Counter(pd.read_parquet(path)["prompt_id"]) for path in tables]
    assert [sorted(each.values()) for each in counts] == [[4, 4, 4, 4]] * 4
    until(lambda: not [each for each in left if Path(f"/proc/{each}").exists()], f"left: {left}")
