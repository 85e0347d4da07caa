"""Agent of the preset ``towns_agent``, written with the OpenAI Agents SDK; knows no rlcore."""

from __future__ import annotations

import json
import os
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def search(query: str) -> str:
    """Find the passage that fits some words best."""
    passages = [json.loads(line)["text"] for line in Path("towns.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = [len(set(query.split()) & set(text.replace(":", " ").split())) for text in passages]
    return passages[counts.index(max(counts))] if max(counts) else "nothing found"


def main() -> None:
    """Answer the question of ``RLCORE_TASK``."""
    set_tracing_disabled(True)
    agent = Agent(name="towns", tools=[search], model="policy")
    Runner.run_sync(agent, json.loads(os.environ["RLCORE_TASK"])["messages"], max_turns=2)


if __name__ == "__main__":
    main()
