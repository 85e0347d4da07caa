"""The picture of a lineage: every result once, an arrow from each input, and words that stay words."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from rlcore.tasks.report.lineage_picture import draw
from rlcore.tasks.tracking.lineage import Ancestor

ROWS = Ancestor(stage="rows", sha256="d" * 64, facts=("12 rows", "$x$ from a & b", "2026-01-01T00:00"), parents=())
SFT = Ancestor(stage="sft", sha256="5" * 64, facts=("seed 0", "2026-01-01T00:01"), parents=(ROWS,))
GRPO = Ancestor(stage="grpo", sha256="6" * 64, facts=("seed 0", "2026-01-01T00:02"), parents=(SFT, ROWS))


def ids(picture: ElementTree.Element) -> list[str]:
    return [element.get("id", "") for element in picture.iter()]


def test_the_picture_has_every_result_once_and_an_arrow_from_each_input(tmp_path: Path) -> None:
    draw(GRPO, tmp_path / "lineage.svg")
    picture = ElementTree.parse(tmp_path / "lineage.svg").getroot()
    assert sorted(each for each in ids(picture) if each.startswith("box ")) == sorted(
        f"box {node.sha256}" for node in (ROWS, SFT, GRPO)
    )
    assert ids(picture).count("arrow") == 3
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rows dddddddddddd", "$x$ from a & b", "grpo 666666666666"} <= set(texts)


def test_the_same_lineage_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "other"):
        draw(GRPO, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
