"""Tables of the comparison in README and docs, written from ``benchmarks/results``; nothing is typed by hand."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.arena import Timing, table
from benchmarks.peers.work import Work
from rlcore.config.health import AuditConfig

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE, METHODS, PPO = (
    f"docs/benchmarks/{name}.md" for name in ("speed-against-trl", "speed-by-method", "ppo-against-trl")
)
INDEX, README = "docs/benchmarks.md", "README.md"
_PAGES = {"headline": PAGE, "ppo": PPO}
Results = Mapping[str, Any]
_SIDES = {"ours": "rlcore", "trl": "TRL"}
_UNITS = {"ours": "tokens", "trl": "rows"}


def results_of(plan: str) -> Path:
    """Return the file of a plan's results."""
    return RESULTS / f"peers-{plan}.json"


def published() -> list[Results]:
    """Return the results of every plan that was run."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("peers-*.json"))]


def pages(results: Sequence[Results], root: Path = ROOT) -> dict[str, str]:
    """Return the text of each page with the tables and rows of all results.

    Raises:
        ValueError: A page has no place for one of them.
    """
    texts = {name: (root / name).read_text(encoding="utf-8") for name in (PAGE, METHODS, PPO, INDEX, README)}
    for each in results:
        page = _PAGES.get(each["plan"], METHODS)
        texts[page] = _between(page, texts[page], each["plan"], block(each))
        for measured in each["measured"]:
            work = measured["work"]
            is_headline = each["plan"] == "headline"
            if work["dtype"] == "float32" and (is_headline or work["task"] != "grpo"):
                texts[INDEX] = _replace_row(
                    texts[INDEX], _INDEX_ROWS[work["task"]], _index_row(measured, each["trl"], page)
                )
        if each["plan"] == "headline":
            texts[README] = _replace_row(texts[README], "CPU speed", _readme_row(each))
    return texts


def write(results: Sequence[Results], root: Path = ROOT) -> None:
    """Write the pages."""
    for name, text in pages(results, root).items():
        (root / name).write_text(text, encoding="utf-8")


def block(results: Results) -> str:
    """Render the tables of one plan: costs, then every candidate of the searches."""
    versions = f"Commit `{results['commit']}`; {results['machine']}"
    costs = table(_COSTS, [row for measured in results["measured"] for row in _cost_rows(measured)])
    phases = [row for measured in results["measured"] for row in _phase_rows(measured)]
    tried = "\n".join(f"- {each['title']}: {'; '.join(_tried(each['search']))}" for each in results["measured"])
    parts = [f"**{_claim(results)}**", versions, costs]
    if phases:
        parts += ["rlcore's phases beside their floor, the exact FLOP at the best product:", table(_PHASES, phases)]
    parts += ["Settings tried, each once, on the trial: CPU s (peak MiB).", tried]
    if failed := _failed(results["measured"]):
        parts.append(f"TRL's options without a figure: {'; '.join(failed)}.")
    return "\n\n".join(parts)


_COSTS = (
    "work",
    "threads",
    "side",
    "n",
    "wall s, as run",
    "CPU s (range)",
    "without checks",
    "checks of iteration 1",
    "generation",
    "TRL takes",
    "peak MiB",
)


def seconds(timing: Timing, *, checked: bool = True) -> float:
    """Return the CPU seconds of a run without checks, or with canaries and audit as they are in a long run.

    Each run begins with a first iteration, which has probes and is always audited. Later ones compare weights, and keep
    the audit below its fraction of time. A reward model's labels are audited once, whatever its number of steps.
    """
    if "sync_cpu_seconds" not in timing:
        return timing["cpu_seconds"] - (0.0 if checked else _CHECKS["audit"](timing))
    without = timing["cpu_seconds"] - sum(part(timing) for part in _CHECKS.values())
    return (without + _part(timing, "later_canaries")) / (1.0 - AuditConfig().max_time_fraction) if checked else without


def ratio(measured: Mapping[str, Any], value: Callable[[Timing], float] = seconds) -> float:
    """Return TRL's median over rlcore's, by default of CPU seconds with checks, at one thread."""
    ours, theirs = (_rounds(measured, side, 1) for side in _SIDES)
    return _median(theirs, value) / _median(ours, value)


def _wall(timing: Timing) -> float:
    """Return the seconds of a run, with the probes and the full audit of its first iteration."""
    return float(timing["wall_seconds"])


def _part(timing: Timing, name: str) -> float:
    return timing.get(f"{name}_cpu_seconds", 0.0)


_CHECKS: Mapping[str, Callable[[Timing], float]] = {
    "canaries": lambda timing: _part(timing, "sync") - _part(timing, "load"),
    "audit": lambda timing: _part(timing, "audit"),
}


def _rounds(measured: Mapping[str, Any], side: str, threads: int) -> list[Timing]:
    return [each for each in measured["rounds"] if (each["side"], each["threads"]) == (side, threads)]


def _median(timings: Sequence[Timing], value: Callable[[Timing], float]) -> float:
    return statistics.median(map(value, timings))


def _spread(timings: Sequence[Timing], value: Callable[[Timing], float]) -> str:
    values = sorted(map(value, timings))
    return f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"


def _claim(results: Results) -> str:
    parts = [f"{each['title']}: {ratio(each):.1f}×" for each in results["measured"]]
    start = "CPU seconds of TRL over those of rlcore, one thread, canaries and audit of a long run included"
    return f"{start}: {'; '.join(parts)}."


def _cost_rows(measured: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for threads in dict.fromkeys(each["threads"] for each in measured["rounds"]):
        ours, theirs = (_rounds(measured, side, threads) for side in _SIDES)
        least = _median(theirs, seconds)
        for timings in (ours, theirs):
            yield (measured["title"], str(threads), _side(timings), *_cost(timings, least))


_PHASES = ("work", "GFLOP per CPU s", "phase", "CPU s", "floor s", "multiple")


def _phase_rows(measured: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield generation and update of rlcore at one thread; of four passes over the tokens, sampling is one.

    The best product of a comparison that also ran on two threads is none of one CPU second.
    """
    work, ours = Work(**measured["work"]), _rounds(measured, "ours", 1)
    if work.task != "grpo" or {each["threads"] for each in measured["rounds"]} != {1}:
        return
    generation = _median(ours, lambda each: _part(each, "generation"))
    whole = _median(ours, partial(seconds, checked=False))
    passes = work.floor_flops / (measured["gflops"] * 1e9) / 4
    for name, spent, floor in (
        ("generation", generation, passes),
        ("update", whole - generation, 3 * passes),
        ("whole step, without checks", whole, 4 * passes),
    ):
        cells = (name, f"{spent:.1f}", f"{floor:.1f}", f"{spent / floor:.2f}×")
        yield (measured["title"], f"{measured['gflops']:.0f}", *cells)


def _cost(timings: Sequence[Timing], least: float) -> tuple[str, ...]:
    generation = _median(timings, lambda each: _part(each, "generation"))
    checks = [f"{name} {_median(timings, part):.1f}" for name, part in _CHECKS.items() if any(map(part, timings))]
    return (
        str(len(timings)),
        f"{_median(timings, _wall):.1f}",
        _spread(timings, seconds),
        f"{_median(timings, partial(seconds, checked=False)):.1f}" if checks else "–",
        ", ".join(checks) or "–",
        f"{generation:.1f}" if generation else "–",
        f"{least / _median(timings, seconds):.2f}×",
        f"{_median(timings, lambda each: each['peak_mib']):,.0f}",
    )


def _side(timings: Sequence[Timing]) -> str:
    """Return a side with its chosen setting."""
    first = timings[0]
    option = f", {first['option']}" if first["option"] else ""
    return f"{_SIDES[first['side']]}, {first['microbatch']} {_UNITS[first['side']]}{option}"


def _tried(search: Sequence[Timing]) -> Iterator[str]:
    """Yield the candidates of a side with their costs: its micro-batches, then TRL's options."""
    ran = [each for each in search if "failed" not in each]
    for side, name in _SIDES.items():
        sizes = [f"{each['microbatch']} {_once(each)}" for each in ran if each["side"] == side and not each["option"]]
        yield f"{name}, {_UNITS[side]}: {', '.join(sizes)}"
    yield from (f"{each['option']} {_once(each)}" for each in ran if each["option"])


def _once(timing: Timing) -> str:
    return f"{timing['cpu_seconds']:.1f} ({timing['peak_mib']:,.0f})"


def _failed(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return options that did not run or did other work, each with its reason and its comparisons."""
    where: dict[tuple[str, str], list[str]] = {}
    for each in measured:
        for timing in each["search"]:
            if "failed" in timing:
                where.setdefault((timing["option"], timing["failed"]), []).append(each["title"])
    every = len(measured)
    return [
        f"{option} ({reason.partition('. ')[0].rstrip('.')}{'' if len(titles) == every else ': ' + ', '.join(titles)})"
        for (option, reason), titles in where.items()
    ]


_INDEX_ROWS = {
    "grpo": "GRPO step, SmolLM2's shape, one thread: CPU seconds",
    "sft": "SFT, three steps: CPU seconds",
    "rm": "Reward model, three steps: CPU seconds",
    "dpo": "DPO, three steps: CPU seconds",
    "ppo": "PPO iteration, own critic: CPU seconds",
    "ppo_shared": "PPO iteration, critic on the policy's trunk: CPU seconds",
}


def _index_row(measured: Mapping[str, Any], version: str, page: str) -> str:
    ours, theirs = (_rounds(measured, side, 1) for side in _SIDES)
    start, speed = _INDEX_ROWS[measured["work"]["task"]], ratio(measured)
    cells = [_spread(each, seconds) for each in (ours, theirs)]
    link = f"[Against TRL](benchmarks/{Path(page).name})"
    return f"| {start} (n = {len(ours)}) | {cells[0]} | TRL {version}: {cells[1]}, {speed:.2f}× | {link} |"


def _readme_row(results: Results) -> str:
    full, half = (f"{ratio(each, _wall):.1f}×" for each in results["measured"])
    link = f"[as run, {full} faster than tuned TRL, bfloat16 {half}; about half where MKL is as fast]({PAGE})"
    work = "GRPO step on SmolLM2's shape, 4 prompts × 8 short completions, one AMD thread"
    return f"| CPU speed | {work} | {link} |"


def _replace_row(text: str, start: str, row: str) -> str:
    """Replace the one table row that begins with ``start``."""
    found, count = re.subn(rf"^\| {re.escape(start)}.*$", lambda _: row, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{count} rows begin with {start!r}; a table must have exactly one")
    return found


def _between(page: str, text: str, name: str, inner: str) -> str:
    """Replace what is between the markers of a plan."""
    begin, end = f"<!-- peers: {name} -->", f"<!-- end of peers: {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} needs the lines {begin} and {end} once each")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{inner}\n{end}{rest.partition(end)[2]}"
