"""Described presets: as sections, as TOML, as a schema for editors, and by the names that peers give their keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest

from rlcore.flows.presets import FOLDER, open_preset, preset_path
from rlcore.strict_config import above, at_least, below, between, keys_of
from rlcore.tasks.presets.graph import STAGE_KINDS
from rlcore.tasks.presets.key_reference import (
    as_toml,
    comments,
    describe,
    fields_of,
    origin_of,
    origins,
    plain,
    preset_schema,
    select_keys,
    type_text,
)
from rlcore.tasks.presets.peers import KINDS, meant, peer_keys
from rlcore.tasks.presets.run import RunConfig, apply_override, load_preset
from tests.architecture.test_documents import by_hand
from tests.flows.micro import PRESETS


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
        (Annotated[int, at_least(1)], "integer, at least 1"),
        (Annotated[float, above(0.0), below(0.5)], "float, greater than 0.0, less than 0.5"),
        (Annotated[float, between(0.0, 1.0)] | None, "float, between 0.0 and 1.0"),
        (Literal["a", "b"] | None, '"a" or "b"'),
        (tuple[str, ...], "list of: string"),
        (Mapping[str, Annotated[float, above(0.0)]], "table of: float, greater than 0.0"),
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


@pytest.mark.parametrize("preset", PRESETS)
def test_a_printed_preset_reads_back_as_itself(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it is printed: files are named from there
    config = open_preset(preset)
    printed = tmp_path / "printed.toml"
    printed.write_text(as_toml(describe(config), origins(preset_path(preset), FOLDER)), encoding="utf-8")
    assert load_preset(printed) == config


def test_each_key_is_printed_with_what_it_may_be_and_where_it_was_set() -> None:
    printed = as_toml(describe(open_preset("tiny", ["seed=7"])), origins(preset_path("tiny"), FOLDER, ["seed=7"]))
    lines = {line.partition(" =")[0]: line for line in printed.splitlines()}
    assert (
        lines["seed"].split("  # ")[1]
        == "integer, at least 0; required; of all random numbers; another seed reruns every stage; set in --set"
    )
    assert "integer, at least 1; default 64; of the periodic" in lines["num_monitor_problems"]
    assert lines["num_monitor_problems"].endswith("set in tiny.toml")
    assert "[[stages.ppo.rewards]]" in printed
    assert "# [retrain]: left out" in printed


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(preset_schema())
    return jsonschema.Draft202012Validator(preset_schema())


def violations(validator: Any, document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the location and message of each error."""
    found = sorted(validator.iter_errors(document), key=str)
    return [(".".join(map(str, error.absolute_path)), error.message) for error in found]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_committed_preset_is_valid(validator: Any, preset: str) -> None:
    assert violations(validator, tomllib.loads((FOLDER / f"{preset}.toml").read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("override", "where", "text"),
    [
        ("stages.grpo.learning_rat=1e-6", "stages.grpo", "learning_rat"),
        ("hardwar.dtype=float32", "", "hardwar"),
        ("stages.grpo.kl.coefficent=0.1", "stages.grpo.kl", "coefficent"),
        ("stages.grpo.learning_rate=fast", "stages.grpo.learning_rate", "number"),
        ("stages.grpo.learning_rate=0.0", "stages.grpo.learning_rate", "minimum"),
        ("stages.grpo.group_size=1.5", "stages.grpo.group_size", "integer"),
        ("hardware.dtype=bf16", "hardware.dtype", "bfloat16"),
        ("stages.grpo.rewards.0.wieght=1.0", "stages.grpo.rewards.0", "wieght"),
        ("stages.grpo.kind=rll", "stages.grpo.kind", "reward_model"),
        ("data.prompts.contract=prompt", "data.prompts.contract", "code_tasks"),
    ],
)
def test_what_is_mistyped_is_found_where_it_stands(validator: Any, override: str, where: str, text: str) -> None:
    document = tomllib.loads((FOLDER / "tiny.toml").read_text(encoding="utf-8"))
    apply_override(document, override)
    ((place, message),) = violations(validator, document)
    assert place == where
    assert text in message


def test_what_a_whole_preset_needs_a_file_that_extends_may_leave_out(validator: Any) -> None:
    part = {"name": "mine", "stages": {"grpo": {"learning_rate": 1e-6}}}
    assert violations(validator, {"extends": "tiny", **part}) == []
    assert {message for _, message in violations(validator, part)} == {
        f"{key!r} is a required property" for key in ("seed", "model", "data", "evaluation")
    }
    assert violations(validator, {"extends": "tiny", "stages": {"grpo": {"learning_rat": 1e-6}}})[0][0] == "stages.grpo"


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


def test_the_page_agrees_with_the_table() -> None:
    rows = [row for row in peer_keys() if {"grpo", "ppo"} & {*row.trainers}]
    ours = {row.name: row.key("<name>", "rl", "<name>").removeprefix("stages.<name>.") for row in rows}
    lines = [line.split("|")[1:-1] for line in by_hand(PAGE).splitlines() if line.startswith("| `")]
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
