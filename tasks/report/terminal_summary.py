"""Results of a run in a few terminal lines: reward, rollouts, and locations of the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlcore.tasks.report.run_info import rollout_shapes
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import ArtifactRef
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json


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


def place_lines(home: Home, refs: Mapping[str, ArtifactRef], *, report: Path | None) -> Iterator[str]:
    """Return the paths of the models, and of the run's report if it has one."""
    for name, ref in refs.items():
        folder = home.root / ref.uri / MODEL
        if ref.kind != "dataset" and folder.is_dir():
            yield f"{'model ' + name:<24}{folder}"
    if report:
        yield f"{'report':<24}{report}"
