"""The ledger of evidence: each row has a source and a figure with its command, or says why there is none."""

from __future__ import annotations

import re

import pytest

from tests.architecture.source_files import ROOT

PAGE = ROOT / "docs/evidence.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| claim")
]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_has_a_source_and_a_figure_with_its_command_or_the_reason_why_not(row: list[str]) -> None:
    *published, here, command = row[1:]
    assert all(re.search(r"20\d\d", each) for each in published), "a source names its year"
    if here.startswith("not run"):
        assert re.fullmatch(r"not run: .{10,}", here)
        assert command == "–"
        return
    made = re.findall(r"`make ([a-z-]+)", command)
    assert made
    assert set(made) <= targets()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_figures_that_come_from_another_page_stand_there(row: list[str]) -> None:
    here = row[-2]
    if here.startswith("not run"):
        return
    pages = [PAGE.parent / link for link in re.findall(r"\]\(([^)#]+)", here)]
    assert pages, "a figure has a page"
    told = " ".join(word for page in pages for word in page.read_text(encoding="utf-8").split())
    words = re.sub(r"\[[^]]*\]\([^)]*\)", "", here)  # without the links
    figures = re.findall(r"\d[\d,.]*\d(?: \[\d\.\d+, \d\.\d+\])?", words)
    assert [each for each in figures if each not in told] == []
