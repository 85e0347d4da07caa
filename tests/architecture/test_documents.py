"""Links between documents: every page is in the navigation, every link and anchor resolves.

``make docs`` builds the site; these tests find without it what would stop the build.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.source_files import ROOT

DOCS = ROOT / "docs"
FOLDERS = ("rlcore", "tasks", "flows", "data_contracts", "infra", "tests", "benchmarks", "docs")
PAGES = sorted(path for path in DOCS.rglob("*.md") if path != DOCS / "README.md")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(ROOT / folder / "README.md" for folder in FOLDERS), *PAGES]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


@cache
def prose(path: Path) -> tuple[str, ...]:
    """Lines of a document outside code blocks."""
    found, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            found.append(line)
    return tuple(found)


def by_hand(path: Path) -> str:
    """Return the text of a document without its generated parts."""
    return re.sub(r"<!-- generated.*?<!-- end -->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", "\n".join(prose(path)))
    yield from (each for each in LINK.findall(text) if not each.startswith(("http://", "https://", "mailto:")))


@cache
def anchors(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the anchors of a document's headings: as a repository viewer makes them, and as the site does."""
    titles = [line.lstrip("#").strip() for line in prose(path) if re.match(r"#{1,6} ", line)]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles]
    viewer = frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain)
    ascii_only = [unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode() for title in plain]
    site = frozenset(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in ascii_only)
    return viewer, site


def pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(pages_of(settings["nav"])) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_every_toml_block_can_be_read() -> None:
    for path in DOCUMENTS:
        for block in re.findall(r"^```toml\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            assert tomllib.loads(block), path


def test_every_commit_that_a_figure_names_is_in_the_history() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*DOCUMENTS, *(ROOT / "benchmarks/results").glob("*.json"))]
    named = {name for text in texts for name in re.findall(r'[Cc]ommit["`: ]+([0-9a-f]{7,40})\b', text)}
    done = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or (ROOT / ".git/shallow").exists():
        pytest.skip("no history of git here")
    assert [name for name in named if f"\n{name}" not in f"\n{done.stdout}"] == []


def test_the_site_fetches_nothing_from_the_internet() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert settings["theme"]["font"] is False
    assert settings["plugins"] == ["search"]  # Material's "offline" would load a script from a CDN
    assert not {"extra_css", "extra_javascript"} & set(settings)


def resolves(path: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    other = (path.parent / file).resolve() if file else path
    return other.exists() and (not anchor or all(anchor in known for known in anchors(other)))


def test_every_link_resolves_with_its_anchor() -> None:
    assert [(path.name, target) for path in DOCUMENTS for target in links(path) if not resolves(path, target)] == []


def test_a_page_of_the_site_links_to_nothing_outside_of_it() -> None:
    targets = [(path, target.partition("#")[0]) for path in PAGES for target in links(path)]
    outside = [each for path, each in targets if not (path.parent / each).resolve().is_relative_to(DOCS)]
    assert outside == [], "name the file as code, without a link"


def test_the_newest_release_of_the_changelog_is_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    released = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert [project["version"]] == released[:1] == cited


def test_a_page_is_short_enough_to_be_read() -> None:
    long = [path.name for path in PAGES if len(by_hand(path).split()) > 2_000]
    assert long == [], "split it, or move facts to the pages that own them"
