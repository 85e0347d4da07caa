"""Sources whose rows are parts of one example: answers to one prompt in several rows, messages of a tree.

They need all rows at once, so a source is limited to some millions of characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from rlcore.data_contracts.adapters.expressions import Expression
from rlcore.data_contracts.adapters.fields import conversation, text
from rlcore.data_contracts.errors import ContractError, RowError
from rlcore.data_contracts.gate.reading import Item, Items, Source, Wanted
from rlcore.data_contracts.gate.records import Origin, Quarantined, SourceRow, excerpt

GATHERED = {"prompt": "prompt", "responses": "responses", "scores": "scores"}
"""Mapping of the rows that :func:`gather_answers` makes."""
MAX_CHARACTERS = 2 * 10**9
_ROLES = {"prompter": "user", "assistant": "assistant"}


def gather_answers(spec: Mapping[str, Expression], source: Source) -> Source:
    """Return a source of one row per prompt, with the ``completion`` and ``score`` of all its rows, in their order."""
    return _gathered(source, lambda rows: _by_prompt(spec, rows))


def gather_trees(source: Source) -> Source:
    """Return a source of one row per message of oasst's prompters: ``messages``, and ``replies`` from the best on.

    ``ranked``: the replies that have a rank.
    """
    return _gathered(source, _replies)


def _gathered(source: Source, gather: Callable[[Iterable[SourceRow]], Iterable[Item]]) -> Source:
    @cache
    def items() -> list[Item]:
        size, lost, rows = 0, list[Item](), list[SourceRow]()
        for _, item in source.read(None):
            if isinstance(item, Quarantined):
                lost.append(item)
                continue
            size += sum(len(value) for value in item.values.values() if isinstance(value, str))
            if size > MAX_CHARACTERS:
                what = f"its rows have to be gathered, and hold more than {MAX_CHARACTERS:,} characters"
                raise ContractError(what, where=source.name, fix="divide the file, all rows of a prompt in one part")
            rows.append(item)
        return [*lost, *gather(rows)]

    def read(wanted: Wanted | None) -> Items:
        found = items()
        chosen = range(len(found)) if wanted is None else np.flatnonzero(wanted[: len(found)]).tolist()
        for place in chosen:
            yield place, found[place]
        return len(found)

    return Source(name=source.name, label=source.label, read=read, state=source.state)


def _by_prompt(spec: Mapping[str, Expression], rows: Iterable[SourceRow]) -> Iterator[Item]:
    groups: dict[tuple[str, str], tuple[Origin, dict[str, list[Any]], Any]] = {}
    for item in rows:
        try:
            prompt = spec["prompt"].read(item.values)
            turns = conversation(prompt, (spec["prompt"].columns or ("prompt",))[0])
            answer, score = (spec[each].read(item.values) for each in ("completion", "score"))
        except RowError as error:
            yield _lost(item, error)
            continue
        key = item.split, json.dumps(turns)
        _, lists, _ = groups.setdefault(key, (item.origin, {"responses": [], "scores": []}, prompt))
        lists["responses"].append(answer)
        lists["scores"].append(score)
    for (split, _), (origin, lists, prompt) in groups.items():
        yield SourceRow(origin=origin, values={"prompt": prompt, **lists}, split=split)


def _replies(rows: Iterable[SourceRow]) -> Iterator[Item]:
    items: dict[str, SourceRow] = {}
    children: dict[str, list[Mapping[str, Any]]] = {}
    for item in rows:
        try:
            name, _, role = (text(item.values, each) for each in ("message_id", "text", "role"))
            if role not in _ROLES:
                raise RowError("role", "must be prompter or assistant", role)
        except RowError as error:
            yield _lost(item, error)
            continue
        if not item.values.get("deleted"):
            items[name] = item
            children.setdefault(str(item.values.get("parent_id")), []).append(item.values)
    for name, item in items.items():
        replies = [each for each in children.get(name, ()) if each["role"] == "assistant"]
        turns = _path_to(name, items)
        if item.values["role"] == "prompter" and replies and turns:
            replies.sort(key=lambda reply: (reply.get("rank") is None, reply.get("rank") or 0))
            found = [{"text": reply["text"], "rank": reply.get("rank")} for reply in replies]
            ranked = [reply for reply in found if reply["rank"] is not None]
            values = {"messages": turns, "replies": found, "ranked": ranked}
            yield SourceRow(origin=item.origin, values=values, split=item.split)


def _lost(item: SourceRow, error: RowError) -> Quarantined:
    return Quarantined(origin=item.origin, field=error.field, excerpt=excerpt(error.value), reason=error.reason)


def _path_to(name: str, items: Mapping[str, SourceRow]) -> list[dict[str, str]] | None:
    turns: list[dict[str, str]] = []
    at: Any = name
    while at is not None:
        if at not in items or len(turns) > len(items):
            return None
        values = items[at].values
        turns.append({"role": _ROLES[values["role"]], "content": values["text"]})
        at = values.get("parent_id")
    return turns[::-1]
