"""Generated parts of the site."""

from __future__ import annotations

import re

import pytest

from infra.site_pages import PARTS, ROOT, on_page_markdown
from rlcore.flows.presets import FOLDER
from rlcore.metrics import METRICS


@pytest.mark.parametrize("name", PARTS)
def test_each_part_has_a_page(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    assert sum(f"<!-- generated: {name} -->" in page for page in pages) == 1


def test_pages_hold_every_preset_metric_and_fault() -> None:
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(re.findall(r"^## `(\w+)`", PARTS["presets"](), re.M))
    assert all(f"| `{name}` |" in PARTS["metrics"]() for name in METRICS)
    assert "| `tokens_per_microbatch` |" in PARTS["settings"]()
    assert "| random rewards | stopped | 0 |" in PARTS["faults"]()


def test_a_page_keeps_its_own_heading() -> None:
    page = on_page_markdown("# Mine\n\n<!-- generated: settings -->\n")
    assert re.findall("^# .*", page, re.M) == ["# Mine"]
