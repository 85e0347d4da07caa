"""Pages of stages: drawn after the stage, also of a cached one, and of a gate that refuses."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlcore.errors import DataError
from rlcore.tasks.drawing.result import Result
from rlcore.tasks.kinds.kind import Stage
from rlcore.tasks.run.pages import page_folder
from rlcore.tasks.run.pipeline import run_pipeline
from rlcore.tasks.steps.base import StageContext, StageResult
from rlcore.tasks.store.code_hash import closure
from rlcore.tasks.store.settings import Home
from tests.toys import ToyConfig, no_sections

ran: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    ran.clear()


def measure(context: StageContext) -> StageResult:
    ran.append("measure")
    (context.folder / "gate.json").write_text("7")
    return StageResult(metrics={})


def refuse(context: StageContext) -> StageResult:
    measure(context)
    raise DataError("too much", where=str(context.work / "page.md"))


def fail(context: StageContext) -> StageResult:
    raise DataError("no data")


def draw(result: Result, folder: Path) -> str:
    ran.append("draw")
    text = f"{result.preset}: {(result.data / 'gate.json').read_text()}"
    (folder / "page.md").write_text(text)
    return text


GATE = Stage(name="gate", version=1, kind="report", run=measure, sections=no_sections, render_page=draw)


def run(home: Home, stage: Stage, name: str = "toy") -> str:
    config = ToyConfig.run(name=name)
    ref = run_pipeline([stage], config, ["gate"], home=home, experiment=name)["gate"]
    return (page_folder(home, name, "gate", ref) / "page.md").read_text()


def test_a_page_is_drawn_once_for_each_name_and_the_stage_runs_once(tracked_home: Home) -> None:
    assert [run(tracked_home, GATE), run(tracked_home, GATE), run(tracked_home, GATE, "mine")] == [
        "toy: 7", "toy: 7", "mine: 7",
    ]  # fmt: skip
    assert ran == ["measure", "draw", "draw"]


def source(context: StageContext, *, words: str) -> StageResult:
    (context.folder / "words.txt").write_text(words)
    return StageResult(metrics={})


def tell(result: Result, folder: Path) -> str:
    (folder / "page.md").write_text((result.inputs["source"] / "words.txt").read_text())
    return ""


def test_a_page_that_tells_of_its_inputs_is_drawn_anew_when_they_change_and_the_result_does_not(
    tracked_home: Home,
) -> None:
    teller = replace(GATE, inputs=("source",), render_page=tell)
    for words in ("one", "other", "one"):
        stages = [replace(GATE, name="source", run=partial(source, words=words), render_page=None), teller]
        ref = run_pipeline(stages, ToyConfig.run(name="toy"), ["gate"], home=tracked_home, experiment="toy")["gate"]
        assert (page_folder(tracked_home, "toy", "gate", ref) / "page.md").read_text() == words


def test_a_gate_that_refuses_has_its_page_where_the_error_says(tracked_home: Home) -> None:
    with pytest.raises(DataError, match="too much") as caught:
        run(tracked_home, replace(GATE, run=refuse))
    assert Path(caught.value.where).read_text() == "toy: 7"


def test_a_stage_that_fails_without_an_account_has_no_page(tracked_home: Home) -> None:
    with pytest.raises(DataError, match="no data"):
        run(tracked_home, replace(GATE, run=fail))
    assert ran == []


def test_a_plot_that_is_drawn_otherwise_is_drawn_anew_and_no_stage_runs_again(
    tracked_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "rlcore_drawing_of_a_test.py"
    monkeypatch.syspath_prepend(tmp_path)

    def drawing(words: str) -> Stage:
        """The stage, with the drawing that a version of the code has."""
        source.write_text(f"def draw(result, folder):\n    (folder / 'page.md').write_text({words!r})\n    return ''\n")
        monkeypatch.delitem(sys.modules, source.stem, raising=False)
        importlib.invalidate_caches()
        return replace(GATE, render_page=importlib.import_module(source.stem).draw)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within a second would share it
    first, second, again = (run(tracked_home, drawing(words)) for words in ("old", "newer", "newer"))
    assert (first, second, again) == ("old", "newer", "newer")
    assert ran == ["measure"]


def test_the_room_of_drawings_counts_in_the_digest_of_a_drawing_and_in_no_key() -> None:
    assert {"rlcore.tasks.kinds.compare.page", "rlcore.tasks.drawing.plots"} <= closure(
        "rlcore.tasks.kinds.compare.page"
    )
    assert not any(name.startswith("rlcore.tasks.report") for name in closure("rlcore.tasks.kinds.compare.step"))
