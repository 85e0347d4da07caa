"""What is RL worth? Ways to learn from one start, at equal completions, tokens and seconds, over several seeds.

    python -m benchmarks.baselines [--preset baselines] [--seeds 0 1 2]

The stages run inline and are cached in the home, so an interrupted measurement goes on where it was. Prints Markdown:
a table for each seed, the mean over the seeds, and where the arms that sample stood at equal cost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RLCORE_ENGINE", "inline")

from flows.run import every_target, run_targets
from tasks.home.artifacts import ArtifactRef
from tasks.home.settings import Home, configure_environment, find_home
from tasks.home.storage import read_table
from tasks.report.head_to_head import Budget, Standing, at_equal, standings


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to learn. ``stages``: those that it needs beside the start, its checkpoint last."""

    label: str
    stages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an arm cost and where it ended: held-out greedy accuracy with its interval, and its gain over SFT."""

    completions: float
    tokens: float
    seconds: float
    accuracy: float
    low: float
    high: float
    gain: str


ARMS = (
    Arm(label="SFT", stages=("sft",)),
    Arm(label="rejection sampling, SFT on what was kept", stages=("rejection", "kept")),
    Arm(label="DPO", stages=("dpo",)),
    Arm(label="reward model + PPO", stages=("reward_model", "rm_ppo")),
    Arm(label="reward model + GRPO", stages=("reward_model", "rm_grpo")),
    Arm(label="verifier + GRPO", stages=("grpo",)),
    Arm(label="distillation from verifier + GRPO", stages=("distil",)),
)
BUDGETS: tuple[Budget, ...] = ("samples", "tokens", "seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="baselines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    home = find_home()
    configure_environment(home)
    rows: dict[int, dict[str, Row]] = {}
    runs: dict[int, dict[str, list[Standing]]] = {}
    for seed in options.seeds:
        overrides = (f"seed={seed}",)
        refs = run_targets(options.preset, overrides, every_target(options.preset, overrides))
        folders = {name: home.root / ref.uri for name, ref in refs.items()}
        seconds = {name: _seconds(home, name, ref) for name, ref in refs.items()}
        rows[seed] = {arm.label: row_of(arm, folders, seconds) for arm in ARMS}
        rows[seed]["best of n by the verifier, SFT"] = best_of_n(folders)
        runs[seed] = {arm.label: _standings(folders[arm.stages[-1]]) for arm in ARMS}
        sys.stdout.write(f"Seed {seed}\n\n{table(rows[seed])}\n\n")
    sys.stdout.write(
        f"{summary(rows)}\n\n{equal_cost(runs)}\n\nMachine: {platform.machine()}, {os.cpu_count()} cores.\n"
    )
    return 0


def row_of(arm: Arm, folders: Mapping[str, Path], seconds: Mapping[str, float]) -> Row:
    """An arm of a finished run, from the artifacts of its stages and the wall seconds that each took."""
    drawn = [_drawn(folders[name]) for name in arm.stages]
    name = arm.stages[-1]
    figures = _read(folders[f"evaluate_{name}"] / "summary.json")
    found = _read(folders["compare"] / "comparison.json")["differences"].get(f"{name} - sft")
    gain = "–"
    if found:
        gain = "{mean:+.3f} [{low:+.3f}, {high:+.3f}]".format(**found["difference"])
    return Row(
        completions=sum(count for count, _ in drawn),
        tokens=sum(tokens for _, tokens in drawn),
        seconds=sum(seconds[each] for each in arm.stages),
        accuracy=figures["eval/accuracy"],
        low=figures["eval/accuracy_low"],
        high=figures["eval/accuracy_high"],
        gain=gain,
    )


def best_of_n(folders: Mapping[str, Path]) -> Row:
    """SFT where the verifier chooses the best of n samples, which is pass@n: nothing learns, each question costs n."""
    figures = _read(folders["evaluate_sft"] / "summary.json")
    most = max(int(name.removeprefix("eval/pass_")) for name in figures if name.removeprefix("eval/pass_").isdigit())
    mean, low, high = (figures[f"eval/pass_{most}{end}"] for end in ("", "_low", "_high"))
    return Row(completions=0.0, tokens=0.0, seconds=0.0, accuracy=mean, low=low, high=high, gain=f"n = {most}")


def table(rows: Mapping[str, Row]) -> str:
    """The arms of one seed, as Markdown."""
    names = ("recipe", "completions", "tokens", "seconds", "held-out accuracy", "gain over SFT")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for label, row in rows.items():
        interval = f"{row.accuracy:.3f} [{row.low:.3f}, {row.high:.3f}]"
        cost = f"{row.completions:.0f} | {row.tokens:.0f} | {row.seconds:.0f}"
        lines.append(f"| {label} | {cost} | {interval} | {row.gain} |")
    return "\n".join(lines)


def summary(rows: Mapping[int, Mapping[str, Row]]) -> str:
    """Mean accuracy of each arm over the seeds, with its range."""
    lines = ["| recipe | mean held-out accuracy | range over seeds | seeds |", "|---|---|---|---|"]
    for label in next(iter(rows.values())):
        found = [each[label].accuracy for each in rows.values()]
        lines.append(
            f"| {label} | {statistics.fmean(found):.3f} | {min(found):.3f} to {max(found):.3f} | {len(found)} |"
        )
    return "\n".join(lines)


def equal_cost(runs: Mapping[int, Mapping[str, Sequence[Standing]]]) -> str:
    """The arms that sample and learn in turn, at the largest cost that each of them reached: mean over the seeds."""
    lines = ["| at equal | recipe | mean held-out accuracy | range over seeds |", "|---|---|---|---|"]
    for budget in BUDGETS:
        reached: dict[str, list[float]] = {}
        for every in runs.values():
            online = {label: run for label, run in every.items() if run}
            for label, one in at_equal(online, budget).items():
                reached.setdefault(label, []).extend([one.accuracy] if one else [])
        for label, found in reached.items():
            cells = f"{statistics.fmean(found):.3f} | {min(found):.3f} to {max(found):.3f}" if found else "– | –"
            lines.append(f"| {budget} | {label} | {cells} |")
    return "\n".join(lines)


def _drawn(folder: Path) -> tuple[float, float]:
    """The completions that a stage has drawn, and their tokens; of stages that draw none, nothing."""
    tables = sorted((folder / "rollouts").glob("*.parquet"))
    lengths = [len(ids) for path in tables for ids in read_table(path)["completion_ids"]]
    return float(len(lengths)), float(sum(lengths))


def _standings(folder: Path) -> list[Standing]:
    """The periodic evaluations of an RL stage; none of another stage."""
    return standings(_read(folder / "history.json")) if (folder / "health.json").is_file() else []


def _seconds(home: Home, stage: str, ref: ArtifactRef) -> float:
    """The wall seconds in which the stage made this artifact, however long ago."""
    records = [_read(path) for path in (home.root / "cache" / stage).glob("*.json")]
    return next((float(each["seconds"]) for each in records if each["ref"]["sha256"] == ref.sha256), 0.0)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
