"""Sketches of columns, small enough to keep in every report, and how far two of them lie apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

# Upper edges of the bins of token counts: powers of two, and an open last bin.
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_CATEGORIES = 50
_CATEGORIES = ("split", "task", "source")
_EMPTY_SHARE = 1e-4  # an empty bin counts as this share: PSI has a logarithm
Sketch = Mapping[str, Any]


def sketch(frame: pd.DataFrame) -> dict[str, Sketch]:
    """Per column of token counts a histogram with mean and maximum, per column of names its counts."""
    numbers = {name: _histogram(frame[name]) for name in frame.columns if name.endswith("_tokens")}
    names = {name: _categories(frame[name]) for name in _CATEGORIES if name in frame.columns}
    return {**numbers, **names}


def compare(previous: Mapping[str, Sketch], current: Mapping[str, Sketch]) -> dict[str, dict[str, float]]:
    """Distance of the columns that both have: ``psi``, and for histograms ``ks``.

    PSI = Σ (p - q) ln(p / q) over bins (population stability index; below 0.1 is calm, above 0.25 a shift). KS is the
    largest difference of the cumulative shares, over the edges of the bins.
    """
    return {
        name: _distance(previous[name], current[name])
        for name in sorted(previous.keys() & current.keys())
        if previous[name]["kind"] == current[name]["kind"]
    }


def _histogram(values: pd.Series) -> Sketch:
    places = np.searchsorted(EDGES, values.to_numpy(dtype=np.int64), side="left")
    counts = np.bincount(places, minlength=len(EDGES) + 1)
    summary = {"mean": float(values.mean()), "max": int(values.max())} if len(values) else {"mean": 0.0, "max": 0}
    return {"kind": "histogram", "edges": list(EDGES), "counts": counts.tolist(), **summary}


def _categories(values: pd.Series) -> Sketch:
    counts = values.value_counts()
    named = {str(name): int(count) for name, count in counts.head(MAX_CATEGORIES).items()}
    return {"kind": "categories", "counts": named, "others": int(counts.iloc[MAX_CATEGORIES:].sum())}


def _distance(previous: Sketch, current: Sketch) -> dict[str, float]:
    if previous["kind"] == "histogram":
        before, after = _shares(previous["counts"]), _shares(current["counts"])
        largest = float(np.max(np.abs(np.cumsum(before) - np.cumsum(after))))
        return {"psi": _psi(before, after), "ks": largest}
    names = sorted({*previous["counts"], *current["counts"]})
    before = _shares([*(previous["counts"].get(name, 0) for name in names), previous["others"]])
    after = _shares([*(current["counts"].get(name, 0) for name in names), current["others"]])
    return {"psi": _psi(before, after)}


def _shares(counts: list[int]) -> np.ndarray:
    return np.asarray(counts, dtype=np.float64) / max(1, sum(counts))


def _psi(before: np.ndarray, after: np.ndarray) -> float:
    pairs = zip(np.maximum(before, _EMPTY_SHARE), np.maximum(after, _EMPTY_SHARE), strict=True)
    return float(sum((p - q) * math.log(p / q) for p, q in pairs))
