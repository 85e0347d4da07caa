"""Cache keys, and differences of a key from those of earlier results.

The key is the SHA-256 of the key inputs: name and version of the stage, digests of its inputs (never paths), of each
module that it can reach, of external data, its preset sections, the machine if a model computes, the seed, and the
versions of Python and of the imported libraries. The cache stores them with the result, so that ``plan`` can explain
why a stage runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from rlcore.tasks.store.cache import KeyInputs, Record
from rlcore.tasks.store.nested import flatten

_MAX_NAMES = 5
_WORDS = {  # the key inputs, with the words by which ``plan`` names a change
    "stage": "stage changed",
    "inputs": "data changed",
    "external": "source files changed",
    "code": "code changed",
    "arguments": "arguments changed",
    "config": "configuration changed",
    "machine": "machine changed",
    "seed": "seed changed",
    "versions": "versions changed",
}


def key_of(ingredients: KeyInputs) -> str:
    """Return the SHA-256 of the canonical JSON of the key inputs."""
    text = json.dumps(ingredients, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def function_of(run: Callable[..., Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the module of a stage's function, and the arguments that ``functools.partial`` has bound."""
    if not isinstance(run, partial):
        return run.__module__, {}
    return run.func.__module__, {**{str(place): value for place, value in enumerate(run.args)}, **run.keywords}


def differences(old: KeyInputs, new: KeyInputs, *, unknown: Collection[str] = ()) -> Mapping[str, tuple[str, ...]]:
    """Return the names that differ, by kind of key input; inputs named ``unknown`` are left out."""
    found = {}
    for kind in _WORDS:
        before, after = flatten(old.get(kind)), flatten(new.get(kind))
        names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        names -= set(unknown) if kind == "inputs" else set()
        if names:
            found[kind] = tuple(sorted(names))
    return found


def explain_miss(ingredients: KeyInputs, records: Collection[Record], *, unknown: Collection[str] = ()) -> str:
    """Explain a cache miss: the differences of these key inputs from the most similar record.

    Of equally similar records the newest counts. Empty if a record differs only in the unknown inputs.
    """
    if not records:
        return "no earlier result"
    newest_first = sorted(records, key=lambda record: record.created, reverse=True)
    found = [(record, differences(record.ingredients, ingredients, unknown=unknown)) for record in newest_first]
    record, nearest = min(found, key=lambda each: sum(map(len, each[1].values())))
    named = {kind: [name for name in names if name] for kind, names in nearest.items()}
    if "machine" in named:
        named["machine"] = _moves(record.ingredients.get("machine", {}), ingredients["machine"])
    return "; ".join(_describe(_WORDS[kind], names) for kind, names in named.items())


def _moves(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """List changes such as ``precision float32 -> bfloat16``, the most informative first."""
    changed = [name for name, value in new.items() if value != old.get(name) and value and old.get(name)]
    return [f"{name} {old[name]} -> {new[name]}" for name in changed]


def _describe(text: str, names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{text}: {', '.join(names[:_MAX_NAMES])}{more}" if names else text
