"""Generated parts of the pages, which are committed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlcore
from infra.site_pages import PARTS, ROOT, generate
from rlcore.flows.presets import FOLDER
from rlcore.metrics import METRICS
from rlcore.tasks.presets.key_reference import describe

PAGES = {
    match: path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for match in re.findall(r"^<!-- generated: (\w+) -->$", path.read_text(encoding="utf-8"), re.MULTILINE)
}


def test_each_part_has_a_page() -> None:
    assert set(PAGES) == set(PARTS)


@pytest.mark.parametrize("path", sorted(set(PAGES.values())), ids=lambda path: path.stem)
def test_a_committed_page_is_what_the_code_says(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page == generate(page), "run: python -m infra.site_pages"


def test_pages_hold_every_preset_metric_command_and_public_name() -> None:
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(re.findall(r"^## `(\w+)`", PARTS["presets"](), re.M))
    assert all(f"| `{name}` |" in PARTS["metrics"]() for name in METRICS)
    assert re.findall(r"^### `(\w+)`", PARTS["library"](), re.M) == rlcore.__all__
    assert re.findall(r"^### `rlcore run`\n\n.+\n\n```\nrlcore run\n", PARTS["commands"](), re.M)


def test_every_key_has_its_meaning() -> None:
    assert [f"{section.path}.{key.name}" for section in describe() for key in section.keys if not key.note] == []


def test_a_page_keeps_its_own_text() -> None:
    page = "# Mine\n\n<!-- generated: settings -->\nold\n<!-- end -->\n\nEnd\n"
    assert generate(page).startswith("# Mine\n") and generate(page).endswith("\n\nEnd\n")
    assert "old\n" not in generate(page) and "| `tokens_per_microbatch` |" in generate(page)
