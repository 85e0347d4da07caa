"""Cache keys, and differences of key inputs from those of earlier work.

The key is the SHA-256 of the key inputs: name and version of the stage, digests of its inputs (never paths), of each
module that it can reach, of external data, its preset sections, the machine if a model computes, the seed, and the
versions of Python and of the imported libraries. Settings that only watch a stage are ``observers``, and inputs that
only these read are ``observed``: the key leaves both out. Of datasets that a stage trains on, only the training rows
count, whose digests are ``trained``. If a rule stopped the stage, the ``outcome`` belongs to the key of its result. The
cache stores all of them with the result, so that ``plan`` can explain why a stage runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from rlcore.tasks.store.cache import KeyInputs
from rlcore.tasks.store.storage import flatten

OBSERVERS, OBSERVED, OUTCOME, TRAINED = "observers", "observed", "outcome", "trained"
_MAX_NAMES, _MAX_VALUE = 5, 60
_WORDS = {  # the key inputs, with the words by which ``plan`` names a change
    "stage": "stage changed",
    "inputs": "data changed",
    "external": "source files changed",
    "code": "code changed",
    "arguments": "",
    "config": "",
    "machine": "machine changed",
    "seed": "seed changed",
    "versions": "versions changed",
}
_SETTINGS, _FOLLOWING = {"arguments", "config"}, {"external", "code", "versions"}


class Earlier(Protocol):
    """Protocol of earlier work of a stage: the record of a result, or the checkpoints of an attempt."""

    @property
    def ingredients(self) -> KeyInputs: ...

    @property
    def created(self) -> str: ...


E = TypeVar("E", bound=Earlier)
Differences = Mapping[str, tuple[str, ...]]


def key_of(ingredients: KeyInputs) -> str:
    """Return the SHA-256 of the canonical JSON of the key inputs, without observers and what they read."""
    counted = {name: value for name, value in ingredients.items() if name not in (OBSERVERS, OBSERVED, TRAINED)}
    if TRAINED in ingredients:
        counted["inputs"] = _counted_inputs(ingredients)
    text = json.dumps(counted, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _counted_inputs(ingredients: KeyInputs) -> dict[str, str]:
    return {**ingredients.get("inputs", {}), **ingredients.get(TRAINED, {})}


def without_outcome(ingredients: KeyInputs) -> KeyInputs:
    """Return the key inputs of the stage itself, whatever its outcome was."""
    return {name: value for name, value in ingredients.items() if name != OUTCOME}


def split_observers(counted: Mapping[str, Any], observers: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide sections of a stage, as JSON values, into those that count and its ``observers``.

    An observer is a whole section, or a key of one: ``health``, ``stage.eval_every``.
    """
    kept, watching = dict(counted), dict[str, Any]()
    for section, _, key in (name.partition(".") for name in observers):
        if not key:
            watching[section] = kept.pop(section)
        elif key in kept[section]:
            watching[section] = {**watching.get(section, {}), key: kept[section][key]}
            kept[section] = {name: value for name, value in kept[section].items() if name != key}
    return kept, watching


def whole_config(ingredients: KeyInputs) -> dict[str, Any]:
    """Return the sections of a stage with its observers, as the preset had them."""
    found = dict(ingredients["config"])
    for name, values in ingredients.get(OBSERVERS, {}).items():
        found[name] = {**found.get(name, {}), **values} if isinstance(values, Mapping) else values
    return found


def level_of(ingredients: KeyInputs) -> float | None:
    """Return the confidence level of the intervals that a stage measured; None if it measures none."""
    config = whole_config(ingredients)
    found: float | None = config.get("confidence", config.get("evaluation", {}).get("confidence"))
    return found


def read_by(ingredients: KeyInputs) -> Mapping[str, str]:
    """Return the digests of all inputs of a stage, with those that only its observers read."""
    return {**ingredients["inputs"], **ingredients.get(OBSERVED, {})}


def function_of(run: Callable[..., Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the module of a stage's function, and the arguments that ``functools.partial`` has bound."""
    if not isinstance(run, partial):
        return run.__module__, {}
    return run.func.__module__, {**{str(place): value for place, value in enumerate(run.args)}, **run.keywords}


def differences(old: KeyInputs, new: KeyInputs, *, unknown: Collection[str] = ()) -> Differences:
    """Return the names that differ, by kind of key input; inputs named ``unknown`` are left out."""
    found = {}
    for kind in (each for each in _WORDS if old.get(each) != new.get(each)):
        before, after = (flatten(_counted_inputs(each) if kind == "inputs" else each.get(kind)) for each in (old, new))
        names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        names -= set(unknown) if kind == "inputs" else set()
        if names:
            found[kind] = tuple(sorted(names))
    return found


def nearest(
    ingredients: KeyInputs, earlier: Collection[E], *, unknown: Collection[str] = ()
) -> tuple[E, Differences] | None:
    """Return the most similar earlier work, of equally similar ones the newest, with its differences; None: none."""
    newest_first = sorted(earlier, key=lambda each: each.created, reverse=True)
    found = [(each, differences(each.ingredients, ingredients, unknown=unknown)) for each in newest_first]
    return min(found, key=lambda each: sum(map(len, each[1].values())), default=None)


def explain_miss(
    ingredients: KeyInputs, earlier: Collection[Earlier], *, unknown: Collection[str] = (), first: str = "first run"
) -> str:
    """Explain a cache miss: the differences of these key inputs from the most similar earlier work, or ``first``.

    Empty if only unknown inputs differ.
    """
    found = nearest(ingredients, earlier, unknown=unknown)
    return describe(found[0].ingredients, ingredients, found[1]) if found else first


def describe(old: KeyInputs, new: KeyInputs, found: Differences) -> str:
    """Describe the differences of two sets of key inputs, with both values of each setting.

    A setting explains the modules, packages and files that it brings or takes away: besides it only changed ones are
    named.
    """
    named = {kind: [name for name in names if name] for kind, names in found.items()}
    settings = named.keys() & _SETTINGS
    for kind in named.keys() & _FOLLOWING if settings else ():
        both = flatten(old.get(kind)).keys() & flatten(new.get(kind)).keys()
        named[kind] = [name for name in named[kind] if name in both]
        if not named[kind]:
            del named[kind]
    for kind in settings:
        named[kind] = setting_changes(old.get(kind, {}), new[kind], named[kind])
    if "machine" in named:
        named["machine"] = _moves(old.get("machine", {}), new["machine"])
    return "; ".join(_listed(_WORDS[kind], names) for kind, names in named.items())


def setting_changes(old: Mapping[str, Any], new: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """List changes such as ``learning_rate changed (1e-05 -> 2e-05)``; settings of the stage itself have short keys.

    Options of a kind that was replaced are not named.
    """
    before, after = flatten(old), flatten(new)
    replaced = tuple(f"{name.removesuffix('kind')}options" for name in names if name.endswith(".kind"))
    return [
        f"{name.removeprefix('stage.')} changed ({_shown(before, name)} -> {_shown(after, name)})"
        for name in names
        if not replaced or not name.startswith(replaced)
    ]


def _shown(values: Mapping[str, Any], name: str) -> str:
    text = json.dumps(values[name]) if name in values else "unset"
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _moves(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """List changes such as ``precision float32 -> bfloat16``, the most informative first."""
    changed = [name for name, value in new.items() if value != old.get(name) and value and old.get(name)]
    return [f"{name} {old[name]} -> {new[name]}" for name in changed]


def _listed(text: str, names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{f'{text}: ' * bool(text)}{', '.join(names[:_MAX_NAMES])}{more}" if names else text
