"""Described presets: nothing of the dataclasses is missing, and what is said of a key is what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from rlcore.flows.presets import FOLDER, open_preset
from rlcore.strict_config import Above, AtLeast, Below, Between, keys_of
from rlcore.tasks.kinds.rl.kind import RlStage
from rlcore.tasks.presets.key_reference import (
    comments,
    describe,
    fields_of,
    origin_of,
    origins,
    plain,
    select_keys,
    type_text,
)
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.presets.stages import STAGE_KINDS


@dataclass(frozen=True, kw_only=True)
class Noted:
    """Fields with and without a comment."""

    first: int = 0  # of several words: 0 is none
    second: str = "#"

    def method(self) -> int:
        fourth: int = 3  # of no field
        return fourth


def test_a_comment_beside_a_field_is_its_note() -> None:
    assert comments(Noted)["first"] == "of several words: 0 is none"
    assert "second" not in comments(Noted)
    assert [each.note for each in fields_of(Noted)] == ["of several words: 0 is none", ""]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "integer"),
        (Annotated[int, AtLeast(1)], "integer, at least 1"),
        (Annotated[float, Above(0.0), Below(0.5)], "float, above 0, below 0.5"),
        (Annotated[float, Between(0.0, 1.0)] | None, "float, from 0 to 1"),
        (Literal["a", "b"] | None, '"a" or "b"'),
        (tuple[str, ...], "list of: string"),
        (Mapping[str, Annotated[float, Above(0.0)]], "table of: float, above 0"),
        (str | int | bool, "string, integer or boolean"),
    ],
)
def test_a_type_in_words(kind: Any, text: str) -> None:
    assert type_text(kind) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "left out"),
        (True, "true"),
        ("a\nb", '"a\\nb"'),
        ((1, 2), "[1, 2]"),
        ({"a.b": 1, "c": "d"}, '{ "a.b" = 1, c = "d" }'),
        ({}, "{}"),
    ],
)
def test_a_value_as_toml_writes_it(value: Any, text: str) -> None:
    assert plain(value) == text


def test_every_key_of_every_kind_of_stage_is_described() -> None:
    sections = describe()
    for kind in (RunConfig, *STAGE_KINDS.values()):
        (section,) = [each for each in sections if each.kind is kind]
        tables = {each.path.removeprefix(f"{section.path}.").partition(".")[0] for each in sections}
        assert set(keys_of(kind)) <= {key.name for key in section.keys} | tables
        assert section.text


def test_a_preset_is_described_with_its_names_values_and_what_it_left_out() -> None:
    sections = {each.path: each for each in describe(open_preset("smollm2"))}
    assert {"stages.grpo", "stages.grpo.rewards.0", "data.prompts"} <= sections.keys()
    assert sections["stages.grpo"].kind is RlStage
    values = {key.name: key.value for key in sections["stages.grpo"].keys}
    assert (values["init_from"], values["group_size"]) == ('"sft"', "8")
    assert set(sections[""].nested) == {"promotion", "retrain"}


def test_the_file_that_set_a_key_last_is_named(tmp_path: Path) -> None:
    (tmp_path / "low.toml").write_text(
        'name = "low"\nseed = 1\nitems = [{ a = 1, b = 2 }]\n[x]\na = 1\nb = 2\n[y]\na = 1\n[z]\noptions = { c = 1 }\n'
    )
    (tmp_path / "top.toml").write_text(  # with a byte order mark, as editors on Windows write it
        '\ufeffextends = "low"\nname = "top"\nwithout = ["y"]\nitems = [{ a = 3 }]\n[x]\nb = 3\n'
    )
    found = origins(tmp_path / "top.toml", tmp_path, ("x.a=5", "new={ d = 1 }"))
    names = ("name", "seed", "x.a", "x.b", "y.a", "z.options", "items.0.a", "items.0.b", "new.d")
    assert {name: origin_of(name, found) for name in names} == {
        "name": "top.toml",
        "seed": "low.toml",
        "x.a": "--set",
        "x.b": "top.toml",
        "y.a": "",
        "z.options": "low.toml",
        "items.0.a": "top.toml",
        "items.0.b": "",
        "new.d": "--set",
    }


def test_a_committed_preset_is_found_from_a_folder_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "tiny"\nname = "mine"\n')
    found = origins(tmp_path / "mine.toml", FOLDER)
    assert (found["name"], found["stages.grpo.group_size"]) == ("mine.toml", "tiny.toml")


@pytest.mark.parametrize(
    ("prefix", "paths", "num_keys"),
    [
        ("stages.grpo.kl", ["stages.grpo.kl"], 5),
        ("stages.grpo.kl.target", ["stages.grpo.kl"], 1),
        ("seed", [""], 1),
        ("hardware", ["hardware"], 5),
        ("hardwar", [], 0),
        ("stages.grpo.k", [], 0),
    ],
)
def test_a_path_chooses_a_section_or_one_key(prefix: str, paths: list[str], num_keys: int) -> None:
    found = select_keys(describe(open_preset("tiny")), prefix)
    assert ([each.path for each in found], sum(len(each.keys) for each in found)) == (paths, num_keys)
