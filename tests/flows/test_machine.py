"""Machines that compute other numbers share no result: keys of every preset's stages, and the plan of a micro run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rlcore.flows.presets import open_preset
from rlcore.flows.stages import promotion_stages, stages
from rlcore.tasks.keys.cache_keys import function_of, key_of
from rlcore.tasks.keys.key_inputs import key_inputs
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.store.code_hash import closure
from tests.flows.conftest import ROOT, environment, flows_command, run_flows
from tests.flows.micro import PRESETS

ON_CPU = ("hardware.device=cpu", "hardware.num_threads=1")


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    return promotion_stages(config, None) if config.promotion else stages(config)


def keys(config: RunConfig) -> Mapping[str, tuple[str, bool]]:
    """Key of each stage, apart from its inputs and files outside, and whether it has a machine."""
    found = {}
    for stage in stages(config):
        ingredients = {**key_inputs(stage, config, {}), "external": ""}
        found[stage.name] = (key_of(ingredients), bool(ingredients["machine"]))
    return found


def reasons(plan: str) -> dict[str, tuple[str, str]]:
    """State and reason of each stage of a printed plan."""
    lines = [line for line in plan.splitlines() if not line.startswith("memory:")]
    rows = [line.split(maxsplit=2) for line in lines]
    return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}


@pytest.mark.parametrize("name", PRESETS)
def test_every_stage_that_loads_a_model_to_compute_has_the_machine_in_its_key(name: str) -> None:
    config = open_preset(name)
    computing = {
        stage.name for stage in stages_of(config) if "rlcore.tasks.steps.runtime" in closure(function_of(stage.run)[0])
    }
    with_machine = {stage.name for stage in stages_of(config) if "hardware" in stage.sections(config).declared}
    assert with_machine - {"import_sft"} == computing
    assert ("import_sft" in with_machine) == (config.model.source == "scratch")


def test_two_configurations_of_different_precision_share_no_key_of_a_stage_that_computes() -> None:
    found = {
        dtype: keys(open_preset("tiny", [*ON_CPU, f"hardware.dtype={dtype}"]))
        for dtype in ("auto", "float32", "bfloat16", "float16")
    }
    assert found["auto"] == found["float32"]
    for name, (key, has_machine) in found["float32"].items():
        others = {found[dtype][name][0] for dtype in ("bfloat16", "float16")}
        assert len({key, *others}) == (3 if has_machine else 1), name


def test_nothing_of_a_finished_run_is_taken_over_in_another_precision(micro_home: Path) -> None:
    same = reasons(run_flows("plan", micro_home, "hardware.dtype=float32").stdout)
    assert {state for state, _ in same.values()} == {"cached"}
    other = reasons(run_flows("plan", micro_home, "hardware.dtype=bfloat16").stdout)
    assert "cached" not in {state for state, _ in other.values()}
    computing = [name for name, (_, has_machine) in keys(open_preset("tiny")).items() if has_machine]
    assert {"sft", "reward_model", "grpo", "ppo", "evaluate_grpo"} <= set(computing)
    for name in computing:
        assert other[name][1].startswith("machine changed: precision float32 -> bfloat16"), name


@pytest.mark.slow
def test_another_instruction_set_takes_nothing_over_either(
    micro_home: Path,
) -> None:
    """In a process of its own: torch chooses its instruction set once."""
    lowered = environment(micro_home) | {"ATEN_CPU_CAPABILITY": "default"}
    command = flows_command("plan", "hardware.dtype=float32")
    done = subprocess.run(command, capture_output=True, text=True, env=lowered, cwd=ROOT, check=True)
    plan = reasons(done.stdout)
    expected = "cached" if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else "run"
    assert (plan["sft"][0], plan["evaluate_sft"][0]) == (expected, expected)
    assert expected == "cached" or " -> DEFAULT" in plan["grpo"][1]
