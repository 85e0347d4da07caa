"""Names in documents exist: make targets, presets, settings by their dotted keys, metrics."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from rlcore.metrics import METRICS, find_metric
from rlcore.strict_config import INLINE
from rlcore.tasks.presets.graph import STAGE_KINDS
from rlcore.tasks.presets.run import RunConfig
from tests.architecture.source_files import ROOT
from tests.architecture.test_documents import DOCUMENTS, by_hand

TOP_FOLDERS = ("rlcore", "tasks", "flows", "data_contracts", "examples", "infra", "tests", "benchmarks", "docs")
FILES = (".py", ".md", ".toml", ".json", ".jsonl")
ROOTS = (
    "stages",
    "data",
    "model",
    "hardware",
    "engine",
    "distributed",
    "evaluation",
    "health",
    "promotion",
    "retrain",
    "budget",
)
TEXTS = {
    str(path.relative_to(ROOT)): by_hand(path) for path in DOCUMENTS if path.name != "CHANGELOG.md"
}  # which names what was
SPANS = [
    (name, span)
    for name, text in TEXTS.items()
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
]  # code, outside of blocks


def named(pattern: str) -> set[tuple[str, str]]:
    return {(name, match) for name, text in TEXTS.items() for match in re.findall(pattern, text, re.MULTILINE)}


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def keys_of(kind: Any) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        held = typing.get_type_hints(kind)[field.name]
        inner = [each for each in (held, *typing.get_args(held)) if dataclasses.is_dataclass(each)]
        if field.metadata == INLINE:
            yield from keys_of(inner[0])
            continue
        yield field.name
        star = "*." if typing.get_origin(held) is not None and "Mapping" in str(held) else ""
        for each in inner:
            yield from (f"{field.name}.{star}{key}" for key in keys_of(each))


@cache
def settings() -> frozenset[str]:
    """Return all keys of a preset; stages and datasets are ``stages.*`` and ``data.*``."""
    stages = {f"stages.*.{key}" for kind in STAGE_KINDS.values() for key in keys_of(kind)}
    return frozenset({*keys_of(RunConfig), *stages})


def is_setting(key: str) -> bool:
    """Return True if a preset has the key, whole or relative to any table: ``update.objective.clip_high``."""
    first, *rest = key.split(".")
    whole = ".".join([first, "*", *rest[1:]]) if first in ("stages", "data") else key
    return any(known == whole or known.endswith(f".{whole}") for known in settings())


TABLES = frozenset(part for key in settings() for part in key.split(".")[:-1]) - {"*"}


def test_every_target_that_a_document_names_is_in_the_makefile() -> None:
    found = named(r"(?:^|`|&& |/python )make ([a-z][a-z-]+)")
    assert {each for each in found if each[1] not in targets()} == set()


def test_every_preset_that_a_document_names_is_committed() -> None:
    committed = {preset.stem for preset in (ROOT / "flows/presets").glob("*.toml")}
    assert {each for each in named(r"PRESET=([a-z0-9_]+)(?![a-z0-9_.])") if each[1] not in committed} == set()


def test_every_setting_that_a_document_names_can_be_set() -> None:
    spans = ((name, re.match(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+(?=$| = | > |=)", span)) for name, span in SPANS)
    keys = {(name, match[0]) for name, match in spans if match and match[0].split(".")[0] in TABLES}
    assert sorted(each for each in keys if not is_setting(each[1]) and not each[1].endswith(FILES)) == []


def test_every_metric_that_a_document_names_is_in_the_glossary() -> None:
    groups = {name.split("/")[0] for name in METRICS if "/" in name} - set(TOP_FOLDERS)
    spans = {each for each in SPANS if re.fullmatch(r"([a-z_]+)/(?!\1$)[a-z_<>/]+", each[1])}  # no a/a: a flow
    assert sorted(each for each in spans if each[1].split("/")[0] in groups and find_metric(each[1]) is None) == []


def test_the_keys_of_settings_are_found() -> None:
    assert {"hardware.dtype", "stages.*.update.tokens_per_microbatch", "data.*.num_train"} <= settings()
    assert is_setting("stages.grpo.update.objective.clip_high")
    assert is_setting("update.objective.clip_high")
    assert not is_setting("update.objective.clip_highest")


SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for package in ("rlcore", "tasks", "flows", "data_contracts", "infra")
    for path in sorted((ROOT / package).rglob("*.py"))
)
INTERNAL = {
    "RLCORE_CODE",
    "RLCORE_LAUNCHER",
    "RLCORE_STARTED_BY",
    "RLCORE_ENGINE_TOKEN",
    "RLCORE_TASK",
}  # set by rlcore


def test_every_variable_that_users_set_is_on_its_page_and_is_read() -> None:
    rows = re.findall(r"^\| (`[A-Z].*?`) \|", TEXTS["docs/environment.md"], re.MULTILINE)
    documented = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert set(re.findall(r"\bRLCORE_[A-Z_]+\b", SOURCES)) - INTERNAL - documented == set()
    outside = {"OMP_NUM_THREADS", "PREFECT_CLIENT_CUSTOM_HEADERS"}  # read by torch and Prefect
    assert sorted(name for name in documented - outside if name not in SOURCES) == []


def test_every_message_of_troubleshooting_is_one_of_ours() -> None:
    table = TEXTS["docs/troubleshooting.md"].partition("## Messages")[2].partition("## Symptoms")[0]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) >= 10
    assert [message for message in messages if message not in SOURCES] == []
