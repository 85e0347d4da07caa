"""Agent of the preset ``towns_agent``, written with LangGraph; knows no rlcore."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def search(query: str) -> str:
    """Find the passage that fits some words best."""
    passages = [json.loads(line)["text"] for line in Path("towns.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = [len(set(query.split()) & set(text.replace(":", " ").split())) for text in passages]
    return passages[counts.index(max(counts))] if max(counts) else "nothing found"


def main() -> None:
    """Answer the question of ``RLCORE_TASK``: the model and the tool take turns until the model makes no call."""
    model = ChatOpenAI(model="policy").bind_tools([search])
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": model.invoke(state["messages"])})
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    graph.compile().invoke({"messages": json.loads(os.environ["RLCORE_TASK"])["messages"]})


if __name__ == "__main__":
    main()
