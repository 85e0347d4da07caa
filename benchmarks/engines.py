"""Learning through vLLM beside learning through the native sampler: GRPO and PPO, same seeds, one table.

    python -m benchmarks.engines --python .venv-engine/bin/python [--preset ppo_vs_grpo] [--seeds 0 1 2]

Both engines start from the same SFT checkpoint and see the same prompts; their random number generators differ, so the
curves agree as two seeds agree. The stages run inline and are cached in the home: an interrupted measurement goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

os.environ.setdefault("RLCORE_ENGINE", "inline")

from flows.run import run_targets
from tasks.home.settings import configure_environment, find_home

RUNS = ("grpo", "ppo")
ENGINES = ("native", "vllm")
BLOCK = 4  # iterations in a row of the table
History = Sequence[Mapping[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter of the engine's environment")
    parser.add_argument("--preset", default="ppo_vs_grpo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    home = find_home()
    configure_environment(home)
    found: dict[tuple[str, str], list[History]] = {(run, engine): [] for run in RUNS for engine in ENGINES}
    for seed in options.seeds:
        for engine in ENGINES:
            overrides = [*options.set, f"seed={seed}", *_engine_settings(engine, options.python)]
            refs = run_targets(options.preset, overrides, RUNS)
            for run in RUNS:
                found[run, engine].append(json.loads((home.root / refs[run].uri / "history.json").read_text()))
    sys.stdout.write("\n".join(_lines(found, options.seeds)) + "\n")
    return 0


def _engine_settings(engine: str, python: str) -> Iterator[str]:
    if engine == "native":
        return
    for run in RUNS:
        yield f"{run}.sampling.engine.kind=vllm"
        yield f"{run}.sampling.engine.python={python}"
        yield f"{run}.sampling.engine.kv_cache_gib=0.25"


def _lines(found: Mapping[tuple[str, str], Sequence[History]], seeds: Sequence[int]) -> Iterator[str]:
    """Mean reward of each block of iterations, over the seeds, with their range; then what is measured once."""
    columns = [(run, engine) for run in RUNS for engine in ENGINES]
    yield "| iterations | " + " | ".join(f"{run}, {engine}" for run, engine in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    length = min(len(history) for histories in found.values() for history in histories)
    for start in range(0, length, BLOCK):
        cells = [_spread([_mean(h[start : start + BLOCK], "reward/mean") for h in found[key]]) for key in columns]
        yield f"| {start + 1} to {min(start + BLOCK, length)} | " + " | ".join(cells) + " |"
    for label, name in (
        ("held-out accuracy at the end", "eval/accuracy"),
        ("seconds of rollouts", "seconds/rollout"),
        ("seconds of a sync with its canary", "seconds/sync"),
    ):
        last = slice(-1, None) if name.startswith("eval/") else slice(None)
        cells = [_spread([_mean(h[last], name) for h in found[key]]) for key in columns]
        yield f"| {label} | " + " | ".join(cells) + " |"
    for label, name in (("largest sync/max_abs", "sync/max_abs"), ("largest mismatch/max_abs", "mismatch/max_abs")):
        cells = [f"{max(row[name] for h in found[key] for row in h):.1e}" for key in columns]
        yield f"| {label} | " + " | ".join(cells) + " |"
    yield f"\nMean over the seeds {', '.join(map(str, seeds))}, in brackets their range."


def _mean(rows: History, name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


if __name__ == "__main__":
    sys.exit(main())
