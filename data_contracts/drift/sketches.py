"""Sketches of columns: histograms and counts, small enough for every report, from which drift is measured.

Each prompt weighs 1: its properties count once, and its rows (such as the pairs of a ranking) share the weight, so
counts may be fractions. Prompts that come in documents are not independent: each sketch has its *design effect*
(``design_effect``), which the noise bounds in :mod:`rlcore.data_contracts.drift.comparison` use.
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.gate.near_duplicates import BoundedMemo
from rlcore.data_contracts.text import normalised_chunks, words_of

Sketch = Mapping[str, Any]
Floats = NDArray[np.float64]
Effect = Callable[..., float]
"""Design effect of bins [N] with weights [N]; ``is_ordered``: of a histogram."""

GROUP = "group"
"""Column with the document of each row, if the dataset names one."""
MAX_CATEGORIES = 50
NUM_BUCKETS = 1_024  # a power of two, so that drift can merge them
MAX_CHARACTERS = 2_000  # characters of a prompt that are examined for its script and words
# Upper edges of bins; there is an open last bin. Token counts: two bins per doubling.
TOKEN_EDGES = (1, 2, *(step * 2**power for power in range(12) for step in (3, 4)))
RATIO_EDGES = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 8)
_EDGES: Mapping[str, Sequence[float]] = {
    "margin": (0, 0.5, 1, 2, 4, 8),
    "probability": (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.999),
}
_NAMES = ("task", "source")
_DECIMALS = 4  # rounding of fractional counts
_LETTER = re.compile("[A-Za-z]")
_NO_LETTERS, _NO_WORDS = "(no letters)", "(no words)"


def sketch(frame: pd.DataFrame) -> dict[str, Sketch]:
    """Sketch all columns of a frame of kept rows, and columns derived from them.

    Of each prompt: number of tokens, of characters per token and of turns, its script, one of its words (the one with
    the smallest CRC-32, so equal prompts give equal words and each word represents a fixed part of the prompts), and
    the length of the reference. Of each answer: number of tokens. Of each pair: which side is longer, margin,
    probability. Names of tasks and sources are unchanged.

    A histogram has ``edges``, ``counts``, ``mean`` and ``max``. Names have the ``counts`` of the 50 most frequent, and
    ``others`` in total; if there are others, ``buckets`` has the counts of all names by :func:`bucket_of`. Both have
    ``design_effect``: by the column ``group``, or else by the order of the rows.
    """
    weights, effect, own = _weights(frame), _effect(frame), set(frame.columns)
    prompts = frame.drop_duplicates("prompt_hash") if "prompt_hash" in own else frame
    edges: dict[str, Sequence[float]] = {name: TOKEN_EDGES for name in frame.columns if _is_answer_length(name)}
    edges |= {name: each for name, each in _EDGES.items() if name in own}
    numbers = {name: _histogram(frame[name], each, weights, effect) for name, each in edges.items()}
    names = {name: _categories(frame[name].tolist(), weights, effect) for name in _NAMES if name in own}
    return {**_prompt_sketches(prompts, _effect(prompts)), **numbers, **names, **_pair_sketches(frame, weights, effect)}


def script_of(text: str) -> str:
    """Return the writing system of most letters of a text (``latin``, ``cjk``, …), from their names in Unicode."""
    if text.isascii():
        return "latin" if _LETTER.search(text) else _NO_LETTERS
    counts: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        if letter.isalpha():
            counts[_script(letter)] += count
    return min(counts, key=lambda name: (-counts[name], name)) if counts else _NO_LETTERS


def word_of(text: str) -> str:
    """Return the word of a text with the smallest CRC-32."""
    return min(map(_SMALLEST.__getitem__, normalised_chunks(text)), default=_NONE)[1]  # no word contains a blank


def bucket_of(name: str) -> int:
    """Return the bucket of a name among ``NUM_BUCKETS``, by its CRC-32: the same in every sketch."""
    return _crc32(name) % NUM_BUCKETS


def _weights(frame: pd.DataFrame) -> Floats:
    if "prompt_hash" not in frame.columns:
        return np.ones(len(frame))
    sizes = frame.groupby("prompt_hash")["prompt_hash"].transform("size")
    return 1.0 / sizes.to_numpy(dtype=np.float64)


def _effect(frame: pd.DataFrame) -> Effect:
    if GROUP not in frame.columns:
        return lambda places, weights, *, is_ordered: design_effect(places, weights)
    return partial(group_effect, groups=np.unique(frame[GROUP], return_inverse=True)[1])


def _prompt_sketches(prompts: pd.DataFrame, effect: Effect) -> dict[str, Sketch]:
    found: dict[str, Sketch] = {}
    once = np.ones(len(prompts))
    if "prompt_tokens" in prompts.columns:
        found["prompt_tokens"] = _histogram(prompts["prompt_tokens"], TOKEN_EDGES, once, effect)
    if "reference" in prompts.columns:
        found["reference_characters"] = _histogram(prompts["reference"].map(len), TOKEN_EDGES, once, effect)
    if "messages" not in prompts.columns:
        return found
    messages: list[Messages] = prompts["messages"].tolist()
    texts = ["\n".join(turn["content"] for turn in turns if turn["role"] != "system") for turns in messages]
    found["turns"] = _categories([str(len(turns)) for turns in messages], once, effect)
    found["script"] = _categories([script_of(text[:MAX_CHARACTERS]) for text in texts], once, effect)
    found["word"] = _categories([word_of(text[:MAX_CHARACTERS]) for text in texts], once, effect)
    if "prompt_tokens" in prompts.columns:
        characters = pd.Series([sum(len(turn["content"]) for turn in turns) for turns in messages], dtype=float)
        ratios = characters / prompts["prompt_tokens"].clip(lower=1).reset_index(drop=True)
        found["characters_per_token"] = _histogram(ratios, RATIO_EDGES, once, effect)
    return found


def _pair_sketches(frame: pd.DataFrame, weights: Floats, effect: Effect) -> dict[str, Sketch]:
    if not {"chosen_tokens", "rejected_tokens"} <= set(frame.columns):
        return {}
    gap = (frame["chosen_tokens"] - frame["rejected_tokens"]).to_numpy()
    sides = np.select([gap > 0, gap < 0], ["longer", "shorter"], "as long").tolist()
    return {"chosen_is": _categories(sides, weights, effect)}


def _is_answer_length(name: str) -> bool:
    return name.endswith("_tokens") and name != "prompt_tokens"


def _histogram(values: pd.Series, edges: Sequence[float], weights: Floats, effect: Effect) -> Sketch:
    numbers = values.to_numpy(dtype=np.float64)
    places = np.searchsorted(edges, numbers, side="left")
    counts = _counts(places, weights, len(edges) + 1)
    summary = {"mean": 0.0, "max": 0.0, "design_effect": effect(places, weights, is_ordered=True)}
    if len(numbers):
        summary |= {"mean": float(np.average(numbers, weights=weights)), "max": float(numbers.max())}
    return {"kind": "histogram", "edges": list(edges), "counts": counts, **summary}


def _categories(values: Sequence[object], weights: Floats, effect: Effect) -> Sketch:
    names, places = np.unique([str(value) for value in values], return_inverse=True)
    counts = dict(zip(names.tolist(), _counts(places, weights, len(names)), strict=True))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    sketched = {"kind": "categories", "counts": dict(ranked[:MAX_CATEGORIES]), "others": 0}
    sketched["design_effect"] = effect(places, weights, is_ordered=False)
    if len(ranked) <= MAX_CATEGORIES:
        return sketched
    others = round(sum(count for _, count in ranked[MAX_CATEGORIES:]), _DECIMALS)
    buckets = np.array([bucket_of(name) for name in names.tolist()])[places]
    return {**sketched, "others": others, "buckets": _counts(buckets, weights, NUM_BUCKETS)}


def _counts(places: NDArray[np.int64], weights: Floats, size: int) -> list[float]:
    sums = np.bincount(places, weights=weights, minlength=size).astype(np.float64).round(_DECIMALS).tolist()
    return [int(count) if count.is_integer() else count for count in sums]


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "unnamed").split()[0].lower()


def _crc32(word: str) -> int:
    return zlib.crc32(word.encode())


def _smallest(chunk: str) -> tuple[int, str]:
    return min(((_crc32(word), word) for word in words_of(chunk)), default=_NONE)


_NONE = (2**32, _NO_WORDS)  # at the end of each word
_SMALLEST = BoundedMemo(_smallest, most=65_536)


Places = NDArray[np.int64]

_LENGTHS = (4, 16, 64, 256)  # rows per block; four times the largest effect at most
_MIN_PAIRS = 6  # smallest number of pairs of blocks of a length
_MIN_CHANGES = 16  # smallest number of changes of the value: fewer are not informative
_MAX_EFFECT = 64.0  # largest effect: drift must stay visible in a file whose order has another meaning
_BEYOND_AVERAGE = 1.6  # bins of few documents vary more than the average bin; measured in the tests
_DEVIATIONS = 4.0  # standard errors above 1 before an overdispersion counts
_MOST_BINS = 1_024  # names beyond them share bins
_BEYOND_MEAN = 1.3  # as above, for named groups


def group_effect(places: Places, weights: Floats, groups: Places, *, is_ordered: bool) -> float:
    """Return the number of values that are as informative as one independent one: bins [N], weights [N], groups [N].

    It is the variance of the fractions p of bins between groups, which need not be adjacent, over that of independent
    values: Σ a V / Σ a p (1 - p) / n, with a = 1 / p, the mean effect of Rao & Scott 1984. Of an ordered column, the
    fractions below each bin count too, with a = 1, and the larger effect. One group is as informative as one value.
    """
    bins, names = (np.unique(each, return_inverse=True)[1] for each in (places % _MOST_BINS, groups))
    num_groups, num_bins = int(names.max(initial=-1)) + 1, int(bins.max(initial=-1)) + 1
    total = float(weights.sum())
    if num_groups <= 1 or num_bins <= 1:
        return max(1.0, total) if num_groups == 1 else 1.0
    counts = np.bincount(names * num_bins + bins, weights, minlength=num_groups * num_bins).reshape(num_groups, -1)
    sizes = counts.sum(axis=1, keepdims=True)

    def effect(sums: NDArray[Any], by_size: float) -> float:
        p = sums.sum(axis=0) / total
        between = ((sums - p * sizes) ** 2).sum(axis=0) * num_groups / (num_groups - 1) / total
        weight = p**-by_size
        return float((weight * between).sum() / max(float((weight * p * (1.0 - p)).sum()), 1e-12))

    below = effect(np.cumsum(counts, axis=1)[:, :-1], 0.0) if is_ordered else 1.0
    each = 1.0 + _BEYOND_MEAN * (effect(counts, 1.0) - 1.0)
    return round(min(max(1.0, each, below), total), _DECIMALS)


def design_effect(places: Places, weights: Floats) -> float:
    """Return the number of values, 1 to 64, that are as informative as one independent one: bins [N], weights [N].

    Neighboring blocks of 4 to 256 rows are compared. For independent values, Pearson's statistic of blocks against bins
    is about its degrees of freedom; documents multiply it by their number of values (overdispersion: McCullagh & Nelder
    1989, section 5.5). The largest significant factor of all lengths counts, and its excess over 1 counts half as much
    again. Only neighbors are compared, so concatenated sources, or a file sorted by another column, hardly look like
    documents. A column that sorts the file, or changes fewer than 16 times, shows none; nor do scattered ones.
    """
    steps, longest = np.diff(places), len(places) // (2 * _MIN_PAIRS)
    if np.count_nonzero(steps) < _MIN_CHANGES or (steps >= 0).all() or (steps <= 0).all():
        return 1.0
    lengths = [length for length in {*_LENGTHS, longest} if _LENGTHS[0] <= length <= min(longest, _LENGTHS[-1])]
    largest = max((_overdispersion(length, places, weights) for length in lengths), default=1.0)
    return round(min(1.0 + _BEYOND_AVERAGE * (largest - 1.0), _MAX_EFFECT), _DECIMALS)


def _overdispersion(length: int, places: Places, weights: Floats) -> float:
    whole = len(places) // (2 * length) * 2 * length
    places, weights, blocks = places[:whole], weights[:whole], np.arange(whole) // length
    pairs = blocks // 2
    bins = np.unique(pairs * (int(places.max()) + 1) + places, return_inverse=True)[1]
    of_block, of_bin, of_pair = (np.bincount(each, weights) for each in (blocks, bins, pairs))
    _, first, inverse = np.unique(blocks * len(of_bin) + bins, return_index=True, return_inverse=True)
    expected = of_block[blocks[first]] * of_bin[bins[first]] / of_pair[pairs[first]]
    statistic = float((np.bincount(inverse, weights) ** 2 / expected).sum() - weights.sum())  # other cells are empty
    freedom = len(of_bin) - len(of_pair)
    found = statistic / max(1, freedom) * (1.0 - 0.5 / length)  # the fractions of bins are those of the pair itself
    return found if freedom > 0 and found > 1.0 + _DEVIATIONS * math.sqrt(2.0 / freedom) else 1.0
