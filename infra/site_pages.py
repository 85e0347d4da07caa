"""Generated parts of the site: settings, metrics, presets, keys of peers and injected faults.

A page of docs/ marks the place with ``<!-- generated: NAME -->``. ``make docs`` calls :func:`on_page_markdown`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.flows.presets import FOLDER, open_draft
from rlcore.metrics import render
from rlcore.tasks.presets.graph import named_start
from rlcore.tasks.presets.key_reference import as_markdown
from rlcore.tasks.presets.peers import KINDS, PEERS, peer_keys

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "benchmarks" / "results" / "faults.jsonl"
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_PLACEHOLDERS = {"model.source": "folder", "data.pairs.adapter": "hh"}
_MESSAGE = 110  # characters of a message in the table of faults


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with its generated parts. MkDocs calls this for every page.

    Raises:
        KeyError: No part has the name of a mark.
    """
    return _MARK.sub(lambda mark: re.sub(r"\A# .*\n+", "", PARTS[mark[1]]()), markdown)


def faults() -> str:
    """Return the table of injected faults from the recorded results."""
    rows = map(json.loads, FAULTS.read_text(encoding="utf-8").splitlines())
    lines = (_row(row["name"], row["caught"], row["steps"], _cell(row["message"])) for row in rows)
    return "\n".join(["| fault | result | after | message |", "|---|---|---|---|", *lines])


def peers() -> str:
    """Return a table for TRL and one for verl: each key with ours, its default and what to know."""
    return "\n\n".join(f"### {title}\n\n" + "\n".join(_peer(name)) for name, title in PEERS.items())


def _peer(peer: str) -> Iterator[str]:
    yield from ("| theirs | ours | default | note |", "|---|---|---|---|")
    for row in (row for row in peer_keys() if row.peer == peer):
        ours = f"`{row.ours}`" if row.ours else f"none; only {' or '.join(map(str, row.only or ())) or 'unset'}"
        defaults = dict.fromkeys(map(str, row.defaults.values()))
        of = "" if peer == "verl" or len(row.trainers) == len(KINDS) else f" ({', '.join(row.trainers)})"
        yield _row(f"`{row.name}`{of}", ours, ", ".join(defaults), row.note)


def presets() -> str:
    """Return a section for each built-in preset: its comment and its stages."""
    return "\n\n".join(_preset(file) for file in sorted(FOLDER.glob("*.toml")))


def _preset(file: Path) -> str:
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").removeprefix(" "))
    table = "\n".join(_stages(open_draft(file.stem, _placeholders(file)).whole.stages))
    return f"## `{file.stem}`\n\n" + "\n".join(comment) + f"\n\n{table}"


def _placeholders(file: Path) -> list[str]:
    """Return overrides for the keys that a preset leaves to those that extend it."""
    required = tomllib.loads(file.read_text(encoding="utf-8")).get("requires", ())
    return [f"{key}={_PLACEHOLDERS.get(key, 'prompts')}" for key in required]


def _stages(stages: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| stage | kind | starts from | data | rewards |", "|---|---|---|---|---|")
    for name, stage in stages.items():
        data: Iterable[str] = getattr(stage, "prompts", None) or getattr(stage, "data", None) or ()
        rewards = dict.fromkeys(term.stage or term.kind for term in getattr(stage.settings, "rewards", ()))
        yield _row(f"`{name}`", stage.kind, f"`{named_start(stage)}`", ", ".join(data), ", ".join(rewards))


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cell(text: str) -> str:
    short = text.splitlines()[0][:_MESSAGE] if text else ""
    return re.sub(r"[|<>]", lambda found: f"&#{ord(found[0])};", short)


PARTS: Mapping[str, Callable[[], str]] = {
    "settings": as_markdown,
    "metrics": render,
    "presets": presets,
    "peers": peers,
    "faults": faults,
}
