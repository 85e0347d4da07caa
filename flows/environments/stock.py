"""A database of articles, another one in each episode, that the policy asks in SQL."""

from __future__ import annotations

from data_contracts import stock
from rlcore.tools.read_only_sql import ReadOnlyDatabase
from rlcore.types import Prompt


class Stock:
    """The figures of some articles: the table ``stock``, which can only be read."""

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
