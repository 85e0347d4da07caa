"""Agent of the preset ``towns_agent``: answers a question about a town with a search in a file; knows no rlcore."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"name": "search", "description": "Finds the passage that fits some words best.", "parameters": QUERY}


def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's answer to a conversation."""
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": SEARCH}]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        answer: dict[str, Any] = json.load(reply)["choices"][0]["message"]
    return answer


def search(query: str) -> str:
    """Return the passage with the most words of a query."""
    passages = [json.loads(line)["text"] for line in Path("towns.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = [len(set(query.split()) & set(text.replace(":", " ").split())) for text in passages]
    return passages[counts.index(max(counts))] if max(counts) else "nothing found"


def main() -> None:
    """Answer the question of ``RLCORE_TASK`` in two turns."""
    messages = json.loads(os.environ["RLCORE_TASK"])["messages"]
    messages.append(complete(messages))
    for call in messages[-1].get("tool_calls", []):
        query = str(json.loads(call["function"]["arguments"]).get("query"))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": search(query)})
    if messages[-1]["role"] == "tool":
        complete(messages)


if __name__ == "__main__":
    main()
