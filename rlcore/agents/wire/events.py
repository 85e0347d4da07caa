"""Server-sent events. A whole answer is sampled first, then sent as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from rlcore.agents.wire.conversation import Json

_EMPTY: Mapping[str, Json] = {
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "reasoning": {"content": []},
}


def encode_events(events: Iterable[tuple[str, Json | str]]) -> bytes:
    """Return events (name or "", data) as the body of a stream."""
    lines = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        lines.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    return "".join(lines).encode()


def response_events(body: Json) -> Iterator[tuple[str, Json]]:
    """Yield a response as the events of its stream."""
    numbers = count()

    def event(kind: str, **fields: Any) -> tuple[str, Json]:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    begun = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(body["output"]):
        started = {**item, **_EMPTY[item["type"]], "status": "in_progress"}
        yield event("response.output_item.added", output_index=index, item=started)
        for kind, fields in _parts(item):
            yield event(kind, output_index=index, item_id=item["id"], **fields)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{body['status']}", response=body)


def _parts(item: Json) -> Iterator[tuple[str, Json]]:
    """Yield the events within an item."""
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    (part,) = item["content"]
    kind, place, text = part["type"], {"content_index": 0}, part["text"]
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    if text:
        yield f"response.{kind}.delta", {**place, "delta": text, **logprobs}
    yield f"response.{kind}.done", {**place, "text": text, **logprobs}
    yield "response.content_part.done", {**place, "part": part}
