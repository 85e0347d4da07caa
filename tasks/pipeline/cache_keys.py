"""The key of a stage's result, and what has changed since an earlier result.

The key is the SHA-256 of the *ingredients*: name and version of the stage, digests of its inputs (never paths), of
every module that it can reach, of data outside the store, its section of the configuration, the machine where it
computes with a model, the seed, and the versions of Python and of the libraries that those modules import. The cache
keeps the ingredients beside the result, so that a plan can say why a stage runs.
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
_WORDS = {  # the ingredients, with the words in which a plan names a change
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
    """SHA-256 of the canonical JSON of the ingredients."""
    text = json.dumps(ingredients, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def function_of(run: Callable[..., Any]) -> tuple[str, Mapping[str, Any]]:
    """The module in which a stage's function is written, and the arguments that ``functools.partial`` has bound."""
    if not isinstance(run, partial):
        return run.__module__, {}
    return run.func.__module__, {**{str(place): value for place, value in enumerate(run.args)}, **run.keywords}


def differences(old: KeyInputs, new: KeyInputs, *, unknown: Collection[str] = ()) -> Mapping[str, tuple[str, ...]]:
    """The names that differ, by kind of ingredient; inputs named ``unknown`` are left out."""
    found = {}
    for kind in _WORDS:
        before, after = flatten(old.get(kind)), flatten(new.get(kind))
        names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        names -= set(unknown) if kind == "inputs" else set()
        if names:
            found[kind] = tuple(sorted(names))
    return found


def explain_miss(ingredients: KeyInputs, records: Collection[Record], *, unknown: Collection[str] = ()) -> str:
    """Explain why the cache has no result for these ingredients: their differences from the most similar record.

    Of equally similar records the newest counts. Empty when a record differs in nothing but the unknown inputs.
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
    """``precision float32 -> bfloat16`` for each field that both machines have, the most telling first."""
    changed = [name for name, value in new.items() if value != old.get(name) and value and old.get(name)]
    return [f"{name} {old[name]} -> {new[name]}" for name in changed]


def _describe(text: str, names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{text}: {', '.join(names[:_MAX_NAMES])}{more}" if names else text
