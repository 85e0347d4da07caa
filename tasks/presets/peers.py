"""Keys of TRL and verl, and the key of a preset that means the same: the table ``peers.toml``.

It serves "did you mean" and docs/coming-from.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from rlcore.strict_config import keys_of
from rlcore.tasks.presets.graph import STAGE_KINDS

KINDS: Mapping[str, str] = {"grpo": "rl", "ppo": "rl", "dpo": "dpo", "sft": "sft", "reward": "reward_model"}
"""The kind of stage that does what a trainer of TRL does."""
PEERS: Mapping[str, str] = {"trl": "TRL", "verl": "verl"}
_OPTIM = {"rl": "update.optim"}
_LORA = {"rl": "update.lora", "reward_model": "backbone.lora"}
_PLAIN = ("name", "path")  # last names that say nothing without the table around them


@dataclass(frozen=True, kw_only=True)
class PeerKey:
    """Row of the table; the head of ``peers.toml`` explains its fields.

    ``only``: None if the key has a counterpart. ``defaults``: the peer's default by trainer.
    """

    peer: str
    name: str
    trainers: tuple[str, ...]
    ours: str = ""
    note: str = ""
    defaults: Mapping[str, Any]
    only: tuple[Any, ...] | None = None

    def key(self, stage: str, kind: str, dataset: str) -> str:
        """Return our key in a preset with these names."""
        table = f"stages.{stage}"
        places = {
            "<stage>": table,
            "<optim>": f"{table}.{_OPTIM.get(kind, 'optim')}",
            "<lora>": f"{table}.{_LORA.get(kind, 'lora')}",
            "<dataset>": dataset,
        }
        return ".".join(places.get(part, part) for part in self.ours.split("."))


@cache
def peer_keys() -> tuple[PeerKey, ...]:
    """Return the table."""
    text = resources.files("rlcore.tasks.presets").joinpath("peers.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    return tuple(_read(peer, row) for peer in PEERS for row in document[peer])


def _read(peer: str, row: dict[str, Any]) -> PeerKey:
    trainers = tuple(row.pop("trainers", KINDS if peer == "trl" else ("ppo",)))
    default = row.pop("default", {})
    defaults = default if isinstance(default, Mapping) else dict.fromkeys(trainers, default)
    only = tuple(row.pop("only")) if "only" in row else None
    return PeerKey(peer=peer, trainers=trainers, defaults=defaults, only=only, **row)


def meant(document: Mapping[str, Any], path: str, value: object) -> str:
    """Return what is meant by a key of a preset that is a peer's: "did you mean stages.grpo.group_size?", or "".

    ``value`` may be a table of such keys. The hint names the key that is right in the stage around ``path``.
    """
    kinds = dict(_kinds(document, ""))
    hints = [_hint(row, each, document, kinds) for each in _leaves(path, value) for row in _rows(each, kinds)[:1]]
    return "; ".join(hints)


def _hint(row: PeerKey, path: str, document: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    theirs = f"{PEERS[row.peer]}'s {row.name}"
    if not row.ours:
        values = " or ".join(map(repr, row.only or ()))
        return f"{theirs} has no counterpart: {row.note or f'a preset does as {values} says'}"
    kind = KINDS[row.trainers[0]]
    stages = [stage for stage in document.get("stages", ()) if kinds.get(f"stages.{stage}") == kind]
    stage = _stage_of(path) or (stages[0] if len(stages) == 1 else "<name>")
    data = document.get("data")
    named = list(data) if isinstance(data, Mapping) else []
    dataset = named[0] if len(named) == 1 and isinstance(data, Mapping) and isinstance(data[named[0]], Mapping) else ""
    ours = row.key(stage, kinds.get(f"stages.{stage}", kind), dataset or "<name>")
    return f"did you mean {ours}? It is {theirs}" + (f" ({row.note})" if row.note else "")


def _rows(path: str, kinds: Mapping[str, str]) -> list[PeerKey]:
    """Return the rows that a key may be, the likeliest first: in its stage's kind, then those with its tables."""
    kind = kinds.get(f"stages.{_stage_of(path)}", "")
    found = [(row, _common(row, path)) for row in peer_keys()]
    fitting = [(row, common) for row, common in found if common and _fits(row, kind)]
    tables = path.split(".")[:-1]
    return [
        row
        for row, _ in sorted(fitting, key=lambda each: (-each[1], not set(each[0].ours.split(".")[:-1]) & set(tables)))
    ]


def _fits(row: PeerKey, kind: str) -> bool:
    if not kind or kind in {KINDS[trainer] for trainer in row.trainers}:
        return True
    return row.ours.removeprefix("<stage>.") in keys_of(STAGE_KINDS[kind]) if kind in STAGE_KINDS else False


def _common(row: PeerKey, path: str) -> int:
    """Return the number of last names that a row and a path share; 0 if they are no match."""
    theirs, ours = row.name.split(".")[::-1], path.split(".")[::-1]
    common = next((place for place, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(theirs), len(ours)) if common is None else common
    return 0 if common == 1 and len(theirs) > 1 and theirs[0] in _PLAIN else common


def _stage_of(path: str) -> str:
    parts = path.split(".")
    return parts[1] if parts[0] == "stages" and len(parts) > 2 else ""


def _kinds(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping) and isinstance(node.get("kind"), str):
        yield path, node["kind"]
    if isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _kinds(value, f"{path}.{key}" if path else str(key))


def _leaves(path: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{path}.{name}", item)
    else:
        yield path
