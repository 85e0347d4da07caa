"""Results of a run, a preset or a model on the terminal: seconds per stage, comparison, rewards, locations of files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from rlcore.models.files import is_unchanged
from rlcore.tasks.keys.earlier_work import own_work
from rlcore.tasks.keys.plan import PlanRow
from rlcore.tasks.run.pages import page_folder
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.store.artifacts import CLEANED, ArtifactRef, ArtifactStore
from rlcore.tasks.store.cache import Record, StageCache, describe_machine
from rlcore.tasks.store.markdown import on_terminal
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.database import database_of, stored_versions
from rlcore.tasks.tracking.lineage import read_records, record_of
from rlcore.tasks.tracking.registry import CANDIDATE, read_version

_TITLE_WITHIN = 2000  # characters of a report's page
_OF_VERSIONS = ("preset", "promoted_over", "verdict", "awaits", "rolled_back", "parents", "sha256")  # shown tags


def summarise(home: Home, preset: str, refs: Mapping[str, ArtifactRef], *, seconds: float) -> str:
    """Format a table of the stages with their original seconds, followed by the comparison's page."""
    from rlcore.tasks.report.run_page import last_report  # what a run has imported, and show would for nothing

    lines = ["", *_stage_lines(home, refs), f"{'total':<24}{seconds:9.1f}", *_comparison(home, preset, refs)]
    lines += [*_rl_lines(home, refs), "", *_place_lines(home, preset, refs, report=last_report(home))]
    lines.append(f"{'open the UIs':<24}rlcore ui")
    if "compare" in refs:
        lines += ["", *_conclusion_lines(home.root / refs["compare"].uri)]
    return "\n".join(lines) + "\n"


def show_preset(
    home: Home, preset: str, refs: Mapping[str, ArtifactRef], rows: Sequence[PlanRow], models: Collection[str]
) -> str:
    """Format the existing results of a preset without running anything.

    ``rows``: the plan, with the reason of each. ``models``: names of its registered models.
    """
    lines = [*_stage_lines(home, refs), *_comparison(home, preset, refs), *_reports(home, preset)]
    lines += _versions(home, models, {ref.sha256 for ref in refs.values()})
    missing = [row for row in rows if row.stage not in refs]
    others = [row for row in missing if row.state == "run" and _has_results(row.stage, preset, home)]
    if not refs:
        elsewhere = "those of another folder: set RLCORE_HOME to its .rlcore"
        lines.append(f"no results in {home.root}" + (" fit the preset" if others else f"; {elsewhere}"))
    running = [row for row in missing if row.state == "running"]
    lines += [f"{'running now':<24}{row.stage}{row.reason and f': {row.reason}'}" for row in running]
    if new := [row.stage for row in missing if row not in (*running, *others)]:
        lines.append(f"not run yet, or after a changed stage: {', '.join(new)}")
    cleaned = [row for row in others if CLEANED in row.reason]
    lines += [f"{'cleaned':<24}{row.stage}: {row.reason.removeprefix('restarts: ')}" for row in cleaned]
    others = [row for row in others if row not in cleaned]
    lines += ["results of other settings, data or code:"] if others else []
    lines += [f"  {row.stage}: {row.reason.removeprefix('restarts: ')}" for row in others]
    return "\n".join(lines) + "\n"


def _versions(home: Home, models: Collection[str], shown: Collection[str]) -> Iterator[str]:
    """Yield a line per registered version that is shown or has an alias. Those on a server are on its pages."""
    path = database_of(home)
    for each in stored_versions(path, models) if path else []:
        if each.aliases or each.sha256 in shown:
            other = "" if each.sha256 in shown else "of other settings, data or code"
            awaits = f"awaits rlcore approve {each.name}/{each.version}" if CANDIDATE in each.aliases else ""
            facts = ", ".join(filter(None, (each.aliases, awaits, other)))
            yield f"{'registered':<24}{each.name}/{each.version}{facts and f' ({facts})'}"


def _has_results(stage: str, preset: str, home: Home) -> bool:
    cache = StageCache(home.cache)
    return bool(own_work(cache.records(stage), stage, preset, cache))


def show_model(home: Home, model: str) -> str:
    """Format a registered version: its origin, decision, metrics, and files.

    Raises:
        ModelError: no such version.
    """
    tags = read_version(home, model)
    record = record_of(tags, read_records(home))
    lines = [f"{tags['name']} version {tags['version']}"]
    lines += [f"  {name + ':':<15}{tags[name]}" for name in _OF_VERSIONS if tags.get(name)]
    return "\n".join([*lines, *(_record_lines(home, record) if record else ["  made elsewhere"])]) + "\n"


def _record_lines(home: Home, record: Record) -> Iterator[str]:
    machine = describe_machine(record.ingredients.get("machine", {}))
    facts = {
        "made": f"{record.created[:16]} by the stage {record.ingredients['stage']['name']} in {record.seconds:.1f} s",
        "machine": machine,
        "files": ArtifactStore(home.root).absence(record.ref) or str(home.root / record.ref.uri / "model"),
    }
    yield from (f"  {name + ':':<15}{text}" for name, text in facts.items() if text)
    width = max(map(len, record.metrics), default=0)
    yield from (f"  {name:<{width}}  {value:12.5g}" for name, value in sorted(record.metrics.items()))


def _stage_lines(home: Home, refs: Mapping[str, ArtifactRef]) -> Iterator[str]:
    cache = StageCache(home.cache)
    yield f"{'stage':<24}{'seconds':>9}  artifact"
    for name, ref in refs.items():
        record = cache.find(name, ref.stage_key)
        took = f"{record.seconds:9.1f}" if record else f"{'?':>9}"
        same = "  unchanged: the weights are those of its start" * is_unchanged(home.root / ref.uri)
        yield f"{name:<24}{took}  {ref.kind}/{ref.sha256[:12]}{same}"


def _comparison(home: Home, preset: str, refs: Mapping[str, ArtifactRef]) -> list[str]:
    if "compare" not in refs:
        return []
    page = page_folder(home, preset, "compare", refs["compare"]) / "comparison.md"
    return (
        ["", on_terminal(page.read_text(encoding="utf-8")).rstrip(), "", f"{'plots':<24}{page.parent}"]
        if page.is_file()
        else []
    )


def _reports(home: Home, preset: str) -> list[str]:
    title = f"<title>{escape(preset)}: run report</title>"
    found = sorted((home.root / "reports").glob("*/*.html"), key=lambda path: path.stat().st_mtime, reverse=True)
    own = next((path for path in found if title in _head(path)), None)
    return [f"{'report':<24}{own}"] if own else []


def _head(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(_TITLE_WITHIN)


def _rl_lines(home: Home, refs: Mapping[str, ArtifactRef]) -> Iterator[str]:
    from rlcore.tasks.report.run_data import rollout_shapes

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


def _place_lines(home: Home, preset: str, refs: Mapping[str, ArtifactRef], *, report: Path | None) -> Iterator[str]:
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


def _conclusion_lines(folder: Path) -> Iterator[str]:
    from rlcore.tasks.kinds.compare.page import first_contrasts

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
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
