"""BM25 search over a local corpus of passages (Robertson and Zaragoza 2009), deterministic and in memory.

``score(q, d) = Σ_{w in q} ln(1 + (N - n_w + ½) / (n_w + ½)) · f · (k1 + 1) / (f + k1 · (1 - b + b · |d| / mean |d|))``,
with N passages, n_w of which contain the word w, and f occurrences of w in the passage d.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.environments.base import ToolFailure, ToolOutput, error_output
from rlcore.errors import DataError

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """Passage of a corpus."""

    passage_id: str
    text: str


class SearchTool:
    """Tool that returns the best passages for a query, one per line: ``[id] text``. :func:`words` splits text."""

    name = "search"
    describes = "Finds the passages of a corpus that fit a query best."

    def __init__(self, passages: Sequence[Passage], *, num_passages: int) -> None:
        """Index the passages.

        Raises:
            DataError: There is no passage.
        """
        if not passages:
            raise DataError("the corpus has no passage", fix="check the file of episodes.search_corpus")
        self._passages, self._num_passages = tuple(passages), num_passages
        counts = [Counter(words(passage.text)) for passage in passages]
        lengths = [max(1, count.total()) for count in counts]
        mean = sum(lengths) / len(lengths)
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for index, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, f in count.items():
                self._postings[word].append((index, f * (K1 + 1) / (f + K1 * (1 - B + B * length / mean))))

    def __call__(self, arguments: Sequence[str]) -> list[ToolOutput | ToolFailure]:
        """Return the best passages for each query."""
        return [self._answer(argument) for argument in arguments]

    def rank(self, query: str) -> list[tuple[Passage, float]]:
        """Return at most ``num_passages`` passages with a word of the query, best first, ties in corpus order."""
        scores: dict[int, float] = defaultdict(float)
        for word in words(query):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self._passages) - len(postings) + 0.5) / (len(postings) + 0.5))
            for index, weight in postings:
                scores[index] += rarity * weight
        best = sorted(scores, key=lambda index: (-scores[index], index))[: self._num_passages]
        return [(self._passages[index], scores[index]) for index in best]

    def _answer(self, query: str) -> ToolOutput:
        if not words(query):
            return error_output("a query needs a word")
        found = [f"[{passage.passage_id}] {' '.join(passage.text.split())}" for passage, _ in self.rank(query)]
        return ToolOutput(text="\n".join(found) or "nothing found")


def words(text: str) -> list[str]:
    """Return the words of a text: runs of letters, digits and underscores, case folded."""
    return _WORD.findall(text.casefold())
