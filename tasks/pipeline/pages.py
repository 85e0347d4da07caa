"""Pages and plots of stages: drawn from their artifacts by the page functions of their kinds, after the stage.

No key counts how a page is drawn. It lies beside the artifacts, in ``pages/<preset>/<stage>/<digest>/``, and is drawn
when it is not there yet, also for a stage that came from the cache under another preset's name; and drawn anew when
the code that draws or an artifact that the stage was made from has changed: a comparison tells of its inputs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rlcore.tasks.drawing.result import Draw, Result
from rlcore.tasks.pipeline.prefect_bridge import report_markdown
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.code_hash import closure_digest
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import write_bytes
from rlcore.tasks.tracking.runs import RunTracker

_DIGITS = 12  # of the artifact's digest, in the name of a page's folder


def page_folder(home: Home, preset: str, stage: str, ref: ArtifactRef) -> Path:
    """Return the folder of the pages of a stage's artifact."""
    return home.pages / preset / stage / ref.sha256[:_DIGITS]


def is_drawn(draw: Draw, result: Result, folder: Path) -> bool:
    """Return True if ``folder`` has the pages that the present code of ``draw`` makes of ``result``."""
    mark = _mark(folder)
    return folder.is_dir() and mark.is_file() and mark.read_text(encoding="utf-8") == _drawn_from(draw, result)


def _mark(folder: Path) -> Path:
    """The file that says what ``folder`` was drawn from."""
    return folder.with_suffix(".code")


def _drawn_from(draw: Draw, result: Result) -> str:
    """Digest of the code that draws, and the artifacts of the inputs: their folders are called by their digests."""
    return "\n".join([closure_digest(draw.__module__), *(path.name for _, path in sorted(result.inputs.items()))])


def show_pages(draw: Draw, result: Result, folder: Path, run: RunTracker) -> None:
    """Draw into ``folder``, log what is there to the pipeline's run, and show the page on the flow run's."""
    unfinished = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)
    page = draw(result, unfinished)
    shutil.rmtree(folder, ignore_errors=True)  # of code that drew otherwise
    unfinished.rename(folder)
    run.log_artifacts(folder, f"pages/{result.stage}")
    # The mark is the last, so that a call that was killed is done again.
    write_bytes(_drawn_from(draw, result).encode(), _mark(folder))
    if page:
        report_markdown(result.stage, page)


def show_refusal(draw: Draw, result: Result, folder: Path) -> None:
    """Draw the page of a gate that refused into ``folder``; no page if the stage failed before it wrote its report."""
    if (result.data / f"{result.stage}.json").is_file():
        report_markdown(result.stage, draw(result, folder))
