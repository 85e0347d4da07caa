"""Cache keys: what is in them, what a plan says of a change, the machine, and the time of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import HardwareConfig, to_dict
from rlcore.flows.presets import open_preset
from rlcore.hardware.machine import find_machine
from rlcore.tasks.keys.cache_keys import differences, explain_miss, function_of, key_of
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.preflight.preflight import time_lines
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.cache import Record, StageCache
from rlcore.tasks.store.settings import Home

INGREDIENTS: dict[str, Any] = {
    "stage": {"name": "grpo", "version": 1, "kind": "policy"},
    "inputs": {"sft": "aa", "prompts": "bb"},
    "external": "",
    "code": {"rlcore.tasks.kinds.rl.step": "11", "rlcore.types": "22"},
    "arguments": {},
    "config": {"grpo": {"learning_rate": 0.1, "rewards": [{"kind": "math", "weight": 1.0}]}},
    "machine": {"device": "cpu", "precision": "float32", "instructions": "AVX512", "gpu": ""},
    "seed": 0,
    "versions": {"torch": "2.13.0"},
}


def record(key: str = "k", *, created: str = "2026-11-21T10:00:00.000+00:00", **changed: Any) -> Record:
    ref = ArtifactRef(kind="policy", uri="artifacts/policy/ab", sha256="ab", bytes=1)
    return Record(
        key=key,
        ref=ref,
        ingredients=INGREDIENTS | changed,
        metrics={"x": 0.5},
        code="c",
        environment="e",
        created=created,
        seconds=1.5,
    )


def a_function(*arguments: object, **named: object) -> None: ...


def test_the_key_is_the_digest_of_the_canonical_json() -> None:
    # printf '{"a":[1,"x"],"b":null}' | sha256sum
    expected = "854ef06dc57f5dfed10206344ab2d02e0b6c84b0e19436703a5afd0f1f9f2687"
    assert key_of({"b": None, "a": [1, "x"]}) == expected


def test_a_number_that_json_cannot_write_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        key_of({"a": float("nan")})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": {"grpo": {"learning_rate": 0.2, "rewards": [{"kind": "math", "weight": 1.0}]}}},
         "grpo.learning_rate changed (0.1 -> 0.2)"),
        ({"config": {"grpo": {"learning_rate": 0.1, "rewards": [{"kind": "math", "weight": 2.0}]}}},
         "grpo.rewards.0.weight changed (1.0 -> 2.0)"),
        ({"code": {"rlcore.tasks.kinds.rl.step": "11", "rlcore.types": "33"}}, "code changed: rlcore.types"),
        ({"code": {"rlcore.tasks.kinds.rl.step": "11"}}, "code changed: rlcore.types"),
        ({"inputs": {"sft": "cc", "prompts": "bb"}}, "data changed: sft"),
        ({"external": "f"}, "source files changed"),
        ({"external": {"my_rewards.py": "f"}}, "source files changed: my_rewards.py"),
        ({"seed": 1}, "seed changed"),
        ({"versions": {"torch": "2.14.0"}}, "versions changed: torch"),
        ({"machine": {"device": "cpu", "precision": "bfloat16", "instructions": "AVX2", "gpu": ""}},
         "machine changed: precision float32 -> bfloat16, instructions AVX512 -> AVX2"),
        ({"machine": {"device": "cuda", "precision": "float32", "instructions": "", "gpu": "H200"}},
         "machine changed: device cpu -> cuda"),
        ({"arguments": {"section": "ppo"}}, 'section changed (unset -> "ppo")'),
        ({"config": {"grpo": {"learning_rate": 0.1, "rewards": [{"kind": "mine:brief", "options": {}, "weight": 1.0}]}},
          "code": {"rlcore.tasks.kinds.rl.step": "11", "rlcore.brief": "44"}, "external": {"mine.py": "f"}},
         'grpo.rewards.0.kind changed ("math" -> "mine:brief")'),
        ({"stage": {"name": "grpo", "version": 2, "kind": "policy"}}, "stage changed: version"),
        ({"seed": 1, "inputs": {"sft": "cc", "prompts": "bb"}}, "data changed: sft; seed changed"),
    ],
)  # fmt: skip
def test_every_ingredient_that_changed_is_named(change: dict[str, Any], reason: str) -> None:
    assert explain_miss(INGREDIENTS | change, [record()]) == reason


def test_there_is_no_reason_when_nothing_changed_and_a_plain_one_when_nothing_is_known() -> None:
    assert explain_miss(INGREDIENTS, [record()]) == ""
    assert explain_miss(INGREDIENTS, []) == "first run"


def test_an_input_that_is_not_known_yet_is_no_difference() -> None:
    known = {"inputs": {"prompts": "bb"}}
    assert differences(INGREDIENTS, INGREDIENTS | known, unknown=["sft"]) == {}
    assert differences(INGREDIENTS, INGREDIENTS | known) == {"inputs": ("sft",)}


def test_the_reason_is_the_difference_to_the_nearest_result_and_then_the_newest() -> None:
    far = record("far", created="2026-11-21T12:00:00.000+00:00", seed=7, external="x")
    old = record("old", created="2026-11-21T10:00:00.000+00:00", seed=1)
    new = record("new", created="2026-11-21T11:00:00.000+00:00", external="y")
    assert explain_miss(INGREDIENTS, [far, old, new]) == "source files changed"


def test_a_long_list_of_changes_is_cut() -> None:
    change = {"config": {f"x{i}": i for i in range(9)}}
    assert explain_miss(INGREDIENTS | change, [record(config={})]).endswith("x4 changed (unset -> 4) and 4 more")


def test_bound_arguments_belong_to_the_key_and_the_module_is_that_of_the_function_inside() -> None:
    assert function_of(a_function) == (__name__, {})
    assert function_of(partial(partial(a_function, 1), 2, section="ppo")) == (
        __name__, {"0": 1, "1": 2, "section": "ppo"},
    )  # fmt: skip


ASK = """
import json, sys
from rlcore.config import HardwareConfig
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.store.remembered import remembering
from rlcore.tasks.store.settings import find_home

with remembering(find_home().source_facts):
    found = known_machine(HardwareConfig(dtype=sys.argv[1]))
print(json.dumps([found.facts, found.warning, "torch" in sys.modules]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.cache.mkdir(parents=True)
    return made


def asked(home: Home, dtype: str = "auto", **variables: str) -> tuple[dict[str, Any], str, bool]:
    """The machine in a process of its own, its warning, and whether torch was imported."""
    environment = os.environ | {"RLCORE_HOME": str(home.root)} | variables
    command = [sys.executable, "-c", ASK, dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    facts, warning, imported = json.loads(done.stdout)
    return facts, warning, imported


@pytest.mark.slow  # PyTorch is imported three times; what a process remembers is in store/test_code_hash.py
def test_the_machine_is_remembered_for_its_instructions_precision_and_torch(home: Home, tmp_path: Path) -> None:
    usual, _, imported = asked(home)
    assert imported
    assert asked(home) == (usual, "", False)
    half, warning, imported = asked(home, "bfloat16", ATEN_CPU_CAPABILITY="default")
    assert (half["precision"], half["instructions"].split()[0], imported) == ("bfloat16", "DEFAULT", True)
    assert half["numerics_digest"] != usual["numerics_digest"]
    assert "no instructions for bfloat16" in warning
    assert asked(home, "bfloat16", ATEN_CPU_CAPABILITY="default") == (half, warning, False)
    assert asked(home) == (usual, "", False)
    own = tmp_path / "own" / "torch"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("raise SystemExit('the other torch was imported')")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        asked(home, PYTHONPATH=str(own.parent))
    assert "the other torch was imported" in caught.value.stderr


def test_a_process_with_torch_believes_torch() -> None:
    config = HardwareConfig(device="cpu", num_threads=3)
    assert known_machine(config).facts == to_dict(find_machine(config))
    assert known_machine(config).resolved == ("device", "dtype", "num_threads")


def home_with(folder: Path, stage: str, config: Mapping[str, object]) -> Home:
    """A state directory with one result, which took 20 s."""
    record = Record(
        key="abc",
        ref=ArtifactRef(kind="dataset", uri="artifacts/dataset/abc", sha256="0" * 64, bytes=12),
        ingredients={"machine": {}, "config": config},
        metrics={},
        code="",
        environment="",
        created="2026-01-02T03:04:05.678+00:00",
        seconds=20.0,
    )
    home = Home(folder)
    StageCache(home.cache).write(stage, record)
    return home


@pytest.mark.parametrize(
    ("stage", "config", "seconds"),
    [
        ("prepare_prompts", {}, 20),
        ("import_sft", {}, 20),
        ("compare", {"evaluation": {"max_new_tokens": 5}}, 20),
        ("grpo", {"stage": {"num_iterations": 10, "prompts_per_iteration": 4, "group_size": 2}}, 40),
    ],
)
def test_time_of_an_earlier_run_is_scaled_by_the_settings_of_its_stage(
    tmp_path: Path, stage: str, config: dict[str, object], seconds: int
) -> None:
    doubled = ["num_iterations=20", "prompts_per_iteration=4", "group_size=2", "sampling.max_new_tokens=1"]
    preset = open_preset("tiny", [f"stages.grpo.{each}" for each in doubled])
    known = f"time: about {seconds} s ({stage} {seconds} s) by earlier runs on this machine"
    home = home_with(tmp_path, stage, config)
    assert time_lines(preset, [stage], home) == [known]
    assert time_lines(preset, [stage, "ppo"], home) == [f"{known}; unknown for ppo"]


def test_a_much_smaller_run_says_nothing(tmp_path: Path) -> None:
    small = {"stage": {"num_iterations": 1, "prompts_per_iteration": 1, "group_size": 2}}
    (line,) = time_lines(open_preset("tiny"), ["grpo"], home_with(tmp_path, "grpo", small))
    assert line == "time: unknown; none of these stages ran on this machine before"
