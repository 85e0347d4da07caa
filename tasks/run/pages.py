"""Pages and plots of stages, rendered from their artifacts after the stage.

Rendering is not in the cache key. A page is in ``pages/<preset>/<stage>/<digest>/``, and is rendered again if the
rendering code or an artifact among the stage's inputs has changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rlcore.tasks.drawing.result import Draw, Result
from rlcore.tasks.keys.cache_keys import function_of
from rlcore.tasks.run.prefect_bridge import report_markdown
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.code_hash import closure_digest
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import sync, write_bytes
from rlcore.tasks.tracking.runs import RunTracker

_DIGITS = 12  # characters of the artifact's digest in the name of a page's folder


def page_folder(home: Home, preset: str, stage: str, ref: ArtifactRef) -> Path:
    """Return the folder of the pages of a stage's artifact."""
    return home.pages / preset / stage / ref.sha256[:_DIGITS]


def is_drawn(draw: Draw, result: Result, folder: Path) -> bool:
    """Return True if ``folder`` has the pages that the present code of ``draw`` makes of ``result``."""
    mark = _mark(folder)
    return folder.is_dir() and mark.is_file() and mark.read_text(encoding="utf-8") == _drawn_from(draw, result)


def _mark(folder: Path) -> Path:
    return folder.with_suffix(".code")


def _drawn_from(draw: Draw, result: Result) -> str:
    module, bound = function_of(draw)
    inputs = (path.name for _, path in sorted(result.inputs.items()))
    return "\n".join([closure_digest(module), *map(str, bound.values()), *inputs])


def show_pages(draw: Draw, result: Result, folder: Path, run: RunTracker) -> None:
    """Render into ``folder``, log the files to the pipeline's run, and show the page on the flow run's."""
    unfinished = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir(parents=True)
    page = draw(result, unfinished)
    shutil.rmtree(folder, ignore_errors=True)  # rendered by other code
    for path in (*unfinished.rglob("*"), unfinished):
        sync(path)
    unfinished.rename(folder)
    run.log_artifact(folder, f"pages/{result.stage}")
    # The mark is last, so that a killed call is repeated.
    write_bytes(_drawn_from(draw, result).encode(), _mark(folder))
    if page:
        report_markdown(result.stage, page)


def show_refusal(draw: Draw, result: Result, folder: Path) -> None:
    """Render the page of a failed gate into ``folder``; no page if the stage failed before it wrote its report."""
    if (result.data / f"{result.stage}.json").is_file():
        report_markdown(result.stage, draw(result, folder))
