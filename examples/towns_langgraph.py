"""The agent of towns_agent.py, written with LangGraph."""

import json
import os
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def search(query: str) -> str:
    """Find the passage that fits some words best."""
    passages = [json.loads(line)["text"] for line in Path("towns.jsonl").read_text(encoding="utf-8").splitlines()]
    return next((text for text in passages if query in text), "nothing found")


model = ChatOpenAI(model="policy").bind_tools([search])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": model.invoke(state["messages"])})
graph.add_node("tools", ToolNode([search]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
state = graph.compile().invoke({"messages": json.loads(os.environ["RLCORE_TASK"])["messages"]})
print(state["messages"][-1].content)
