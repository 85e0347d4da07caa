"""Results of a run in a few terminal lines: reward, rollouts, and locations of the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlcore.tasks.kinds.compare.page import first_contrasts
from rlcore.tasks.report.run_info import rollout_shapes
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.database import database_of, stored_versions


def rl_lines(home: Home, refs: Mapping[str, ArtifactRef]) -> Iterator[str]:
    """Return a line per RL run: mean reward, and fractions of truncated and formatted rollouts, first and last."""
    folders = {name: home.root / ref.uri for name, ref in refs.items()}
    shapes = rollout_shapes(folders)
    if shapes:
        yield ""
        yield f"{'first -> last iteration':<24}{'reward':>18}{'truncated':>18}{'formatted':>18}"
    for name, (first, last) in shapes.items():
        history = read_json(folders[name] / "history.json")
        reward = f"{history[0]['reward/mean']:.3f} -> {history[-1]['reward/mean']:.3f}"
        cut, marked = (
            f"{a:.1%} -> {b:.1%}" for a, b in ((first.truncated, last.truncated), (first.marked, last.marked))
        )
        yield f"{name:<24}{reward:>18}{cut:>18}{marked:>18}"


def place_lines(home: Home, preset: str, refs: Mapping[str, ArtifactRef], *, report: Path | None) -> Iterator[str]:
    """Return names and paths of the models, and the path of the run's report if it has one."""
    path = database_of(home)
    versions = stored_versions(path, {f"{preset}-{name}" for name in ("base", *refs)}) if path else []
    names = {each.sha256: f"{each.name}/{each.version}" for each in versions}
    newest = ""
    for stage, ref in refs.items():
        folder = home.root / ref.uri / MODEL
        if ref.kind != "dataset" and folder.is_dir():
            newest = names.get(ref.sha256, newest) if ref.kind != "reward_model" else newest
            yield f"{'model ' + stage:<24}{names.get(ref.sha256, ''):<20}  {_short(folder)}"
    if report:
        yield f"{'report':<24}{_short(report)}"
    if newest:
        yield f"{'use a model':<24}rlcore serve {newest}; rlcore export {newest} FOLDER"


def conclusion_lines(folder: Path) -> Iterator[str]:
    """Return a sentence per checkpoint on how it compares with its start; ``folder``: artifact of the comparison."""
    differences = read_json(folder / "comparison.json")["differences"]
    for new, old in first_contrasts(differences):
        found = differences[f"{new} - {old}"]["difference"]
        mean, low, high = (100.0 * found[name] for name in ("mean", "low", "high"))
        if low > 0.0:
            yield f"{new} solves {mean:.0f} points more than {old} [{low:.0f}, {high:.0f}]"
        elif high < 0.0:
            yield f"{new} solves {-mean:.0f} points fewer than {old} [{-high:.0f}, {-low:.0f}]"
        else:
            yield f"{new} is not told apart from {old}: {mean:+.0f} points [{low:+.0f}, {high:+.0f}]"


def _short(path: Path) -> Path:
    """Return a path from the working folder if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
