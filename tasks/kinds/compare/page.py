"""Comparison page: accuracies of the checkpoints, cost of the RL runs, and answers that changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from rlcore.evaluation.paired_tests import PairedDifference
from rlcore.strict_config import build
from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.levels import format_level, other_levels
from rlcore.tasks.drawing.plots import History, eval_points, head_to_head_curves, head_to_head_table
from rlcore.tasks.drawing.result import Result, of_kind
from rlcore.tasks.kinds.benchmark.kind import render as benchmark_text
from rlcore.tasks.kinds.compare.step import evaluations_in, greedy_answers
from rlcore.tasks.kinds.win_rate.kind import render as win_rate_text
from rlcore.tasks.store.markdown import excerpt, plain
from rlcore.tasks.store.storage import read_json

_AT_EQUAL_COST = (
    "Each run is shown at its last evaluation within the number of sampled completions (`samples`), or of seconds of "
    "rollouts, scoring, updates and syncs (`seconds`), that all of them reached."
)


def comparison_page(result: Result, folder: Path) -> str:
    """Write ``comparison.md`` and its figures."""
    inputs, compared, confidence = result.inputs, read_json(result.data / "comparison.json"), result.confidence
    level = {**dict.fromkeys(inputs, confidence), **result.levels}
    histories: dict[str, History] = {
        name: read_json(each / "history.json") for name, each in of_kind("rl", inputs).items()
    }
    answers = {name: greedy_answers(each) for name, each in evaluations_in(inputs).items()}
    page = render(result.preset, compared, histories, answers, confidence=confidence)
    page += f"\n{note}\n" if (note := other_levels(result.levels, confidence)) else ""
    for kind, (title, file, text_of) in _SECTIONS.items():
        for name, each in of_kind(kind, inputs).items():
            page += f"\n## {name}{title}\n\n" + text_of(read_json(each / file), confidence=level[name])
    (folder / "comparison.md").write_text(page, encoding="utf-8")
    _draw(result, folder, compared, histories)
    return page


def _draw(result: Result, folder: Path, compared: Mapping[str, Any], histories: Mapping[str, History]) -> None:
    name, confidence = result.preset, result.confidence
    bars = {
        label: (row["eval/accuracy"], row["eval/accuracy_low"], row["eval/accuracy_high"])
        for label, row in compared["summaries"].items()
        if "eval/accuracy" in row
    }
    if bars:
        title = f"{name}: held-out greedy accuracy, {format_level(confidence)} interval"
        plots.accuracy_bars(bars, folder / "accuracy.png", title=title)
    plots.comparison_curves(histories, folder / "curves.png", title=f"{name}: {' and '.join(histories)}")
    for number, names in enumerate(compared["opponents"] or ([list(histories)] if histories else [])):
        runs = {each: eval_points(histories[each]) for each in names}
        file = folder / f"head_to_head{number or ''}.png"
        head_to_head_curves(runs, file, title=f"{name}: held-out accuracy by cost", confidence=confidence)


def render(
    name: str,
    compared: Mapping[str, Any],
    histories: Mapping[str, History],
    answers: Mapping[str, pd.DataFrame],
    *,
    confidence: float,
) -> str:
    """Render the page as Markdown. ``compared`` is the content of ``comparison.json``."""
    differences = {each: build(PairedDifference, found) for each, found in compared["differences"].items()}
    parts = [
        f"# {plain(name)}: results by stage",
        accuracy_table(compared["summaries"], confidence=confidence),
        "## Differences on the same problems (paired score interval, exact McNemar test)",
        difference_table(differences, confidence=confidence),
        "## Cost of the RL runs",
        cost_table(histories),
        *(
            f"## {' against '.join(names)} at equal samples and at equal compute\n\n{_AT_EQUAL_COST}\n\n"
            + head_to_head_table({each: histories[each] for each in names}, confidence=confidence)
            for names in compared["opponents"]
        ),
        *(
            f"## Problems that {new} solves and {old} did not\n\n{changed_answers(answers[old], answers[new])}"
            for new, old in first_contrasts(differences)
            if new in histories
        ),
    ]
    return "\n\n".join(parts) + "\n"


def first_contrasts(differences: Iterable[str]) -> list[tuple[str, str]]:
    """Return the first contrast of each compared checkpoint: the one with its start."""
    pairs = [name.split(" - ") for name in differences]
    return list({new: (new, old) for new, old in reversed(pairs)}.values())[::-1]


def accuracy_table(summaries: Mapping[str, Mapping[str, float]], *, confidence: float) -> str:
    """Return rows of accuracy with interval, pass@k if sampled, length, and mean scores of verifiers that give some."""
    scores = sorted({key for row in summaries.values() for key in row if key.startswith("eval/score/")})
    titles = "".join(f" score on {plain(key.removeprefix('eval/score/'))} |" for key in scores)
    interval_title = f"{format_level(confidence)} interval"
    lines = [
        f"| checkpoint | greedy accuracy | {interval_title} | problems | pass@1 | pass@k | length |{titles}",
        "|---|---|---|---|---|---|---|" + "---|" * len(scores),
    ]
    for label, row in summaries.items():
        ks = sorted(int(key.removeprefix("eval/pass_at_")) for key in row if re.fullmatch(r"eval/pass_at_\d+", key))
        first = f"{row[f'eval/pass_at_{ks[0]}']:.3f}" if ks else "–"
        best = f"{row[f'eval/pass_at_{ks[-1]}']:.3f} (k={ks[-1]})" if ks else "–"
        is_measured = "eval/accuracy" in row
        interval = f"[{row['eval/accuracy_low']:.3f}, {row['eval/accuracy_high']:.3f}]" if is_measured else "–"
        mean = f"{row['eval/accuracy']:.3f}" if is_measured else "not measured: no references"
        lines.append(
            f"| {label} | {mean} | {interval} | {row['eval/problems']:.0f} "
            f"| {first} | {best} | {row['completion/length']:.1f} |"
            + "".join(f" {row[key]:.3f} |" if key in row else " – |" for key in scores)
        )
    return "\n".join(lines)


def difference_table(differences: Mapping[str, PairedDifference], *, confidence: float) -> str:
    """Return rows of the difference in points with its interval and p value."""
    lines = [f"| contrast | difference | {format_level(confidence)} interval | p |", "|---|---|---|---|"]
    for name, paired in differences.items():
        d = paired.difference
        lines.append(f"| {name} | {d.mean:+.3f} | [{d.low:+.3f}, {d.high:+.3f}] | {paired.p_value:.2g} |")
    return "\n".join(lines)


def cost_table(histories: Mapping[str, History]) -> str:
    """Return rows of seconds by part, summed over the iterations."""
    names = ("rollout", "score", "update", "sync", "evaluate")
    lines = [
        "| run | iterations | " + " | ".join(f"{name} s" for name in names) + " |",
        "|---" * (2 + len(names)) + "|",
    ]
    for label, history in histories.items():
        seconds = [sum(row.get(f"seconds/{name}", 0.0) for row in history) for name in names]
        lines.append(f"| {label} | {len(history)} | " + " | ".join(f"{value:.1f}" for value in seconds) + " |")
    return "\n".join(lines)


def changed_answers(before: pd.DataFrame, after: pd.DataFrame, *, count: int = 5) -> str:
    """List a few problems whose answers were wrong and are now right, with both answers."""
    both = before.merge(after, on="prompt_id", suffixes=("_before", "_after"))
    changed = both[~both["correct_before"] & both["correct_after"]].head(count)
    lines = ["| problem | before | after |", "|---|---|---|"]
    lines += [
        f"| {excerpt(row.prompt_id)} | {excerpt(row.completion_before)} | {excerpt(row.completion_after)} |"
        for row in changed.itertuples()
    ]
    return "\n".join(lines) if len(changed) else "None."


def reward_model_section(metrics: Mapping[str, float], *, confidence: float) -> str:
    """Render the held-out metrics of a reward model."""
    return (
        f"Accuracy {metrics['rm/eval_accuracy']:.3f} "
        f"[{metrics['rm/eval_accuracy_low']:.3f}, {metrics['rm/eval_accuracy_high']:.3f}] ({format_level(confidence)}) "
        f"on {metrics['rm/eval_pairs']:.0f} pairs; the longer answer {metrics['rm/length_accuracy']:.3f}; "
        f"calibration error {metrics['rm/ece']:.3f}.\n"
    )


def rejection_section(summary: Mapping[str, Any], *, confidence: float) -> str:
    """Describe how many answers of the policy became demonstrations, and its accuracy."""
    total, rate = summary["all"], summary["all"]["pass_rate"]
    went = ", ".join(f"{count} {reason}" for reason, count in summary["dropped"].items() if count)
    return (
        f"{total['sampled']} answers to {total['num_prompts']} prompts, {total['verified']} verified, "
        f"{total['kept']} kept ({summary['train']} to train on, {summary['eval']} held out); "
        f"pass rate {rate['mean']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}] ({format_level(confidence)}). "
        f"Not kept: {went or 'none'}.\n"
    )


_SECTIONS: Mapping[str, tuple[str, str, Callable[..., str]]] = {  # by kind: title, file, and text of its content
    "reward_model": (" on held-out pairs", "metrics.json", reward_model_section),
    "rejection": (": rejection sampling", "rejection.json", rejection_section),
    "win_rate": (": win rate", "win_rate.json", win_rate_text),
    "benchmark": (": benchmark", "benchmark.json", benchmark_text),
}
