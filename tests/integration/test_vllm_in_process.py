"""vLLM in one process with the trainer, in an environment that holds both: the interpreter in ENGINE_PYTHON.

`make test-engine` runs it. What is asserted here was found by in_process_run.py there.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration import vllm_runs

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("in_process_run.py")
NEEDED = "import torch, transformers, safetensors, jinja2, vllm, rlcore.checks.canaries, rlcore.sampling.native"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert vllm_runs.PYTHON, "ENGINE_PYTHON names no interpreter: run `make test-engine`"
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    probe = subprocess.run([vllm_runs.PYTHON, "-c", NEEDED], env=variables, capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"{vllm_runs.PYTHON} does not hold the trainer too: {probe.stderr.strip().splitlines()[-1]}")
    checkpoint = vllm_runs.make_checkpoint(tmp_path_factory.mktemp("in-process") / "model")
    ran = subprocess.run(
        [vllm_runs.PYTHON, str(SCRIPT), str(checkpoint)], env=variables, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    vllm_runs.say(line)
    values: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return values


def test_the_engine_is_the_trainer_before_and_after_three_syncs_of_a_tied_model(found: dict[str, Any]) -> None:
    assert found["before"] <= 1e-4
    assert found["after_three_syncs"] <= 1e-4
    assert found["versions"] == [3]


def test_draws_are_those_of_the_seed_and_the_place_whatever_the_batch(found: dict[str, Any]) -> None:
    assert found["draws_of_the_batch"]
    assert found["distinct"]
    assert found["long_fails_alone"] == [[True] * 3, [False] * 3]


def test_stale_partial_and_tied_head_faults_are_caught_and_mended(found: dict[str, Any]) -> None:
    assert found["stale"] == found["partial"] == found["head"] == "StaleSamplerError"
    assert found["after_the_faults"] <= 1e-4


def test_weights_that_do_not_fit_change_nothing(found: dict[str, Any]) -> None:
    assert "do not fit the engine's model" in found["refused"]
    assert found["version_after_refusal"] == 7  # three syncs, three faulty ones and the one that mended them


def test_vllms_senders_between_gpus_announce_what_they_send_and_reach_the_server_by_its_routes(
    found: dict[str, Any],
) -> None:
    builtin = found["builtin"]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert builtin["routes"] == ["/get_world_size", *update]  # asked for NCCL's meeting; nothing for IPC
    assert builtin["world_size"] == 4  # three workers and the trainer
    assert builtin["sent"] == builtin["announced"]
    assert builtin["first"] == ["float32", builtin["first"][1]]
    assert builtin["ipc_without_a_gpu"]


def test_a_second_stage_of_the_process_starts_an_engine_of_its_own(found: dict[str, Any]) -> None:
    assert found["second_start"] <= vllm_runs.TOLERANCE


def test_threads_and_generators_of_the_process_are_left_as_they_were(found: dict[str, Any]) -> None:
    assert found["process_kept"]
