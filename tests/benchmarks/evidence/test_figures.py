"""Figures: every kind is drawn at the width of a page, small, and only from runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from PIL import Image

from benchmarks.evidence.figures import draw
from benchmarks.evidence.plan import Claim
from tests.benchmarks.evidence.sample import arms, plan


@pytest.mark.parametrize("kind", get_args(get_type_hints(Claim)["figure"]))
def test_a_figure_is_as_wide_as_a_page_and_small(kind: str, tmp_path: Path) -> None:
    claim = replace(plan(tmp_path).claim[0], figure=kind, arms=("start", "fast", "not_run", "slow"))
    heights = []
    for tasks in (("a",), ("a", "b")):
        path = draw(claim, dict.fromkeys(tasks, arms()), tmp_path)
        assert path == tmp_path / "evidence_fast.png"
        with Image.open(path) as image:
            assert image.width == 800
            heights.append(image.height)
        assert path.stat().st_size < 60_000
    assert heights[1] > heights[0] + 200  # a row per task


def test_a_claim_without_runs_has_no_figure(tmp_path: Path) -> None:
    assert draw(plan(tmp_path).claim[0], {"sums": {"start": arms()["start"]}}, tmp_path) is None
    assert not list(tmp_path.glob("*.png"))


def test_bars_are_as_high_as_the_figures_of_their_arms(tmp_path: Path) -> None:
    claim = replace(plan(tmp_path).claim[0], figure="preferences", arms=("start", "slow"))
    coloured = []
    for value in (0.2, 0.8):
        rated = {seed: replace(arm, figures={"win_rate/rate": value}) for seed, arm in arms()["slow"].items()}
        path = draw(claim, {"a": arms() | {"slow": rated}}, tmp_path)
        assert path
        with Image.open(path) as image:
            pixels = image.convert("RGB").crop((400, 0, 800, image.height - 50)).getcolors(image.width * image.height)
        assert pixels
        coloured.append(sum(count for count, (red, _, blue) in pixels if abs(red - blue) > 60))
    assert 3.0 < coloured[1] / coloured[0] < 5.0
