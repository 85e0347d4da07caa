"""The table of TRL's keys against TRL itself: every name exists, and every default is TRL's."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import DatasetMixtureConfig, DPOConfig, GRPOConfig, ModelConfig, RewardConfig, ScriptArguments, SFTConfig
from trl.scripts.grpo import GRPOScriptArguments

from rlcore.tasks.presets.peers import PeerKey, peer_keys

pytestmark = pytest.mark.peers

ARGUMENTS = (ModelConfig, DatasetMixtureConfig, ScriptArguments, GRPOScriptArguments)
CONFIGS = {"grpo": GRPOConfig, "dpo": DPOConfig, "sft": SFTConfig, "reward": RewardConfig}
LAUNCHER = {"num_processes"}  # of accelerate
EARLIER = {"max_prompt_length", "warmup_ratio"}  # of earlier versions, which many files still have


def rows_of(trainer: str) -> list[PeerKey]:
    return [row for row in peer_keys() if row.peer == "trl" and trainer in row.trainers]


@pytest.mark.parametrize("trainer", CONFIGS)
def test_names_and_defaults_are_trls(trainer: str) -> None:
    fields: dict[str, Any] = {
        each.name: each.default for kind in (*ARGUMENTS, CONFIGS[trainer]) for each in dataclasses.fields(kind)
    }
    rows = {row.name: row for row in rows_of(trainer) if row.name not in LAUNCHER | EARLIER}
    assert rows.keys() - fields.keys() == set()
    unlike = {
        name: (row.defaults[trainer], fields[name])
        for name, row in rows.items()
        if trainer in row.defaults and fields[name] != row.defaults[trainer]
    }
    assert unlike == {}


def test_names_and_defaults_are_verls() -> None:
    package = find_spec("verl")  # not imported: that needs packages which its configuration does not
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0], "trainer", "config", "_generated_ppo_trainer.yaml")
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    missing, unlike = [], {}
    for row in (row for row in peer_keys() if row.peer == "verl"):
        *tables, name = row.name.split(".")
        table: Any = document
        for each in tables:
            table = table.get(each, {})
        if name not in table:
            missing.append(row.name)
        elif "ppo" in row.defaults and table[name] != row.defaults["ppo"]:
            unlike[row.name] = (row.defaults["ppo"], table[name])
    assert (missing, unlike) == ([], {})
