"""A run that measures its KL and is evaluated on its way has the page of over-optimisation."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_a_run_with_a_kl_term_has_the_page_and_its_plot(stage: str, micro_home: Path) -> None:
    (page,) = micro_home.glob(f"pages/tiny/{stage}/*/over_optimisation.md")
    assert "Held out: 0." in page.read_text(encoding="utf-8")
    assert page.with_suffix(".png").is_file()
