"""Environments of the presets ``stock`` and ``towns``: a database with SQL, and a searchable corpus."""

from __future__ import annotations

from functools import cache

from rlcore.environments.base import CallError
from rlcore.environments.read_only_sql import ReadOnlyDatabase
from rlcore.environments.search import Passage, SearchTool, words
from rlcore.examples import stock, towns
from rlcore.types import Prompt


class Stock:
    """Read-only table ``stock`` with the figures of some articles."""

    def reset(self, prompt: Prompt) -> None:
        self._database = ReadOnlyDatabase({"stock": (stock.COLUMNS, stock.table(prompt.messages[-1].content))})

    def query(self, sql: str) -> str:
        """Runs a query on the table stock, and gives its rows.

        Args:
            sql: one SELECT of SQLite, such as SELECT price FROM stock WHERE id=481
        """
        return self._database.answer(sql)

    def close(self) -> None:
        self._database.close()


class Towns:
    """Passages of ``towns.jsonl``; a search returns the ``num_passages`` best by BM25."""

    def __init__(self, num_passages: int = 1) -> None:
        self._num_passages = num_passages

    def reset(self, prompt: Prompt) -> None:
        """Set up nothing: the corpus is the same in each episode."""

    def search(self, query: str) -> str:
        """Finds the passages that fit some words best.

        Args:
            query: the words, such as the name of a town
        """
        if not words(query):
            raise CallError("a search needs a word")
        found = [passage.text for passage, _ in _corpus(self._num_passages).rank(query)]
        return "\n".join(found) or "nothing found"


@cache
def _corpus(num_passages: int) -> SearchTool:
    passages = [Passage(passage_id=name, text=text) for name, text in towns.passages()]
    return SearchTool(passages, num_passages=num_passages)
