"""What a run leaves on the terminal: seconds per stage, the comparison, where to look."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.home.artifacts import ArtifactRef
from tasks.home.cache import StageCache
from tasks.home.settings import Home
from tasks.pipeline.pages import page_folder


def summarise(home: Home, preset: str, refs: Mapping[str, ArtifactRef], *, seconds: float) -> str:
    """A table of the stages with the seconds that each took when it ran, then the comparison's page."""
    cache = StageCache(home.cache)
    lines = ["", f"{'stage':<24}{'seconds':>9}  artifact"]
    for name, ref in refs.items():
        record = cache.find(name, ref.stage_key)
        took = f"{record.seconds:9.1f}" if record else f"{'?':>9}"
        lines.append(f"{name:<24}{took}  {ref.kind}/{ref.sha256[:12]}")
    lines.append(f"{'this run, in all':<24}{seconds:9.1f}")
    if "compare" in refs:
        page = page_folder(home, preset, "compare", refs["compare"]) / "comparison.md"
        lines += ["", page.read_text(encoding="utf-8"), f"plots: {page.parent}"]
    lines.append("look at it: make ui")
    return "\n".join(lines) + "\n"
