"""Sketches of columns: histograms and counts, small enough to keep in every report, from which drift is measured.

What describes the prompt is counted once per prompt, what describes an answer once per row: the counts are then of
things that were drawn one by one, which is what the bounds of chance in :mod:`data_contracts.drift` suppose.
"""

from __future__ import annotations

import unicodedata
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from data_contracts.fields import Messages
from data_contracts.text import words_of

Sketch = Mapping[str, Any]

MAX_CATEGORIES = 50
MAX_CHARACTERS = 2_000  # of a prompt that are looked at for its script and its words
# Upper edges of bins; there is an open last bin. Token counts: two bins per doubling.
TOKEN_EDGES = (1, 2, *(step * 2**power for power in range(12) for step in (3, 4)))
RATIO_EDGES = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 8)
_EDGES: Mapping[str, Sequence[float]] = {
    "margin": (0, 0.5, 1, 2, 4, 8),
    "probability": (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.999),
}
_NAMES = ("task", "source")
_NO_LETTERS, _NO_WORDS = "(no letters)", "(no words)"


def sketch(frame: pd.DataFrame) -> dict[str, Sketch]:
    """A sketch for every column that a frame of kept rows has, or that follows from what it has.

    Of each prompt: number of tokens, of characters per token and of turns, its script, one of its words (the one with
    the smallest CRC-32, so equal prompts give equal words and each word stands for a fixed part of the prompts), and
    the length of the reference. Of each answer: number of tokens. Of each pair: which side is longer, margin,
    probability. Names of tasks and sources as they stand.
    """
    prompts = frame.drop_duplicates("prompt_hash") if "prompt_hash" in frame.columns else frame
    answers = {name: _histogram(frame[name], TOKEN_EDGES) for name in frame.columns if _is_answer_length(name)}
    numbers = {name: _histogram(frame[name], edges) for name, edges in _EDGES.items() if name in frame.columns}
    names = {name: _categories(frame[name].tolist()) for name in _NAMES if name in frame.columns}
    return {**_prompt_sketches(prompts), **answers, **numbers, **names, **_pair_sketches(frame)}


def script_of(text: str) -> str:
    """The writing system of most letters of a text (``latin``, ``cjk``, …), by their names in Unicode."""
    counts = Counter(_script(letter) for letter in text if letter.isalpha())
    return min(counts, key=lambda name: (-counts[name], name)) if counts else _NO_LETTERS


def word_of(text: str) -> str:
    """The word of a text with the smallest CRC-32."""
    return min(set(words_of(text)), key=lambda word: (_crc32(word), word), default=_NO_WORDS)


def _prompt_sketches(prompts: pd.DataFrame) -> dict[str, Sketch]:
    found: dict[str, Sketch] = {}
    if "prompt_tokens" in prompts.columns:
        found["prompt_tokens"] = _histogram(prompts["prompt_tokens"], TOKEN_EDGES)
    if "reference" in prompts.columns:
        found["reference_characters"] = _histogram(prompts["reference"].map(len), TOKEN_EDGES)
    if "messages" not in prompts.columns:
        return found
    messages: list[Messages] = prompts["messages"].tolist()
    texts = ["\n".join(turn["content"] for turn in turns if turn["role"] != "system") for turns in messages]
    found["turns"] = _categories([str(len(turns)) for turns in messages])
    found["script"] = _categories([script_of(text[:MAX_CHARACTERS]) for text in texts])
    found["word"] = _categories([word_of(text[:MAX_CHARACTERS]) for text in texts])
    if "prompt_tokens" in prompts.columns:
        characters = pd.Series([sum(len(turn["content"]) for turn in turns) for turns in messages], dtype=float)
        ratios = characters / prompts["prompt_tokens"].clip(lower=1).reset_index(drop=True)
        found["characters_per_token"] = _histogram(ratios, RATIO_EDGES)
    return found


def _pair_sketches(frame: pd.DataFrame) -> dict[str, Sketch]:
    if not {"chosen_tokens", "rejected_tokens"} <= set(frame.columns):
        return {}
    gap = (frame["chosen_tokens"] - frame["rejected_tokens"]).to_numpy()
    return {"chosen_is": _categories(np.select([gap > 0, gap < 0], ["longer", "shorter"], "as long").tolist())}


def _is_answer_length(name: str) -> bool:
    return name.endswith("_tokens") and name != "prompt_tokens"


def _histogram(values: pd.Series, edges: Sequence[float]) -> Sketch:
    places = np.searchsorted(edges, values.to_numpy(dtype=np.float64), side="left")
    counts = np.bincount(places, minlength=len(edges) + 1)
    summary = {"mean": float(values.mean()), "max": float(values.max())} if len(values) else {"mean": 0.0, "max": 0.0}
    return {"kind": "histogram", "edges": list(edges), "counts": counts.tolist(), **summary}


def _categories(names: Sequence[str]) -> Sketch:
    ranked = sorted(Counter(map(str, names)).items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ranked[MAX_CATEGORIES:])
    return {"kind": "categories", "counts": dict(ranked[:MAX_CATEGORIES]), "others": others}


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "unnamed").split()[0].lower()


@lru_cache(maxsize=65_536)
def _crc32(word: str) -> int:
    return zlib.crc32(word.encode())
