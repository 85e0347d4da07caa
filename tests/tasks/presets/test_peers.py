"""The table of peers' keys: each of ours exists, and the page agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlcore.tasks.presets.key_reference import describe
from rlcore.tasks.presets.peers import KINDS, meant, peer_keys
from rlcore.tasks.presets.stages import STAGE_KINDS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "coming-from.md"


def keys_of_kind(kind: str) -> set[str]:
    """All keys of a preset whose stages are of this kind, with the placeholder <name>."""
    others = {each for name, each in STAGE_KINDS.items() if name != kind}
    found, inside_other = set(), False
    for section in describe():
        if section.path == "stages.<name>":
            inside_other = section.kind in others
        if not (inside_other and section.path.startswith("stages.")):
            found |= {f"{section.path}.{key.name}".lstrip(".") for key in section.keys}
            found.add(section.path.removesuffix(".<number>"))
    return found


@pytest.mark.parametrize("trainer", KINDS)
def test_every_key_of_ours_exists_in_its_kind_of_stage(trainer: str) -> None:
    known = keys_of_kind(KINDS[trainer])
    wanted = {
        row.key("<name>", KINDS[trainer], "<name>") for row in peer_keys() if row.ours and trainer in row.trainers
    }
    assert wanted - known == set()


def test_each_row_says_what_becomes_of_the_key() -> None:
    assert [row.name for row in peer_keys() if bool(row.ours) == (row.only is not None)] == []


def test_the_page_agrees_with_the_table() -> None:
    rows = [row for row in peer_keys() if {"grpo", "ppo"} & {*row.trainers}]
    ours = {row.name: row.key("<name>", "rl", "<name>").removeprefix("stages.<name>.") for row in rows}
    lines = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(lines) >= 10
    for cells in lines:
        trl, verl, here = (re.findall("`(.+?)`", cell)[0] for cell in cells)
        assert ours[trl] == here
        assert [key for name, key in ours.items() if f".{name}".endswith(f".{verl}") and name != trl] == [here]


def test_a_name_in_the_wrong_table_leads_to_the_table_around_it() -> None:
    preset = {"stages": {"a": {"kind": "rl"}, "b": {"kind": "dpo"}}, "data": {"mine": {"contract": "prompts"}}}
    hints = {
        "stages.a.critic.lr": "stages.a.critic.learning_rate",
        "stages.a.lr": "stages.a.learning_rate",
        "stages.b.max_steps": "stages.b.num_epochs",
        "stages.a.kl.beta": "stages.a.kl.coefficient",
        "stages.a.max_prompt_length": "data.mine.max_tokens",
        "num_generations": "stages.a.group_size",
        "warmup_ratio": "stages.a.update.optim.warmup_steps",
    }
    found = {path: meant(preset, path, 1).partition("?")[0] for path in hints}
    assert found == {path: f"did you mean {key}" for path, key in hints.items()}
    assert meant(preset, "stages.a.name", 1) == meant(preset, "stages.a.no_such", 1) == ""
