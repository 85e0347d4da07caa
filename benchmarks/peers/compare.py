"""Comparison with TRL: a search for each side's best setting, then interleaved rounds, all on provably equal work."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.record import differences, require_same_work
from benchmarks.peers.work import Work
from benchmarks.report import describe, table, write

Timing = Mapping[str, Any]
SIDES = {"ours": "rlcore", "trl": "TRL"}
UNITS = {"ours": "tokens", "trl": "rows"}
_BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
_COMMON = {"torch.compile": {"torch_compile": True}, "liger": {"use_liger_kernel": True}}
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sft": _COMMON
    | {
        "packing": {"packing": True, "max_length": 1024},
        "padding-free": {"padding_free": True, "max_length": None},  # TRL refuses its default, which cuts no such row
        "grouped by length": _BY_LENGTH,
    },
    "rm": _COMMON | {"grouped by length": _BY_LENGTH, "padding-free": {"padding_free": True}},
    "dpo": _COMMON
    | {
        "precomputed reference": {"precompute_ref_log_probs": True},
        "grouped by length": _BY_LENGTH,
        "padding-free": {"padding_free": True},
    },
}
"""TRL's own ways to be faster than its tuned base, by task; the search states why one does not run."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison.

    Attributes:
        trial: Smaller work, on which settings are chosen.
        tokens: rlcore's candidates, per micro-batch.
        rows: TRL's candidates, in rows per micro-batch; pairs have two sequences a row.
    """

    title: str
    work: Work
    trial: Work
    rounds: int = 3
    tokens: tuple[int, ...] = (512, 1024, 2048)
    rows: tuple[int, ...] = (2, 4, 8, 16)


def _grpo(dtype: str) -> Comparison:
    work = Work(task="grpo", shape="smollm2", dtype=dtype, num_prompts=4)
    trial, title = replace(work, num_prompts=2), f"GRPO, smollm2, {dtype}"
    return Comparison(title=title, work=work, trial=trial, tokens=(512, 2048), rows=(4, 8, 16))


def _supervised(task: str, dtype: str) -> Comparison:
    work = Work(task=task, dtype=dtype, num_prompts=32, group_size=1 if task == "sft" else 2, steps=3)
    title = f"{ {'sft': 'SFT', 'rm': 'reward model', 'dpo': 'DPO'}[task] }, tiny, {dtype}"
    return Comparison(title=title, work=work, trial=replace(work, steps=1))


DTYPES = ("float32", "bfloat16")
PLANS: dict[str, list[Comparison]] = {
    "headline": [_grpo(dtype) for dtype in DTYPES],
    "supervised": [_supervised(task, dtype) for task in ("sft", "rm", "dpo") for dtype in DTYPES],
}


def run_plan(name: str, comparisons: Sequence[Comparison], *, out: Path) -> dict[str, Any]:
    """Run comparisons and write their results to ``out`` after the last one.

    Raises:
        UnequalWorkError: Two sides did different work. Nothing is written.
    """
    loads, measured = [os.getloadavg()[0]], []
    for comparison in comparisons:
        found, rounds = search(comparison), list[Timing]()
        best = {side: best_setting([each for each in found if each["side"] == side]) for side in SIDES}
        for number in range(comparison.rounds):
            pair = [measure(comparison.work, best[side]) for side in SIDES]
            require_same_work(pair[0]["work"], pair[1]["work"], names=("ours", "trl"))
            rounds += [_summary(each) | {"round": number} for each in pair]
            loads.append(os.getloadavg()[0])
        fields = {"title": comparison.title, "work": asdict(comparison.work)}
        measured.append(fields | {"search": [_summary(each) for each in found], "rounds": rounds})
    results = {"plan": name, "commit": _commit(), "machine": describe(loads), "trl": version("trl")}
    write(out, results | {"measured": measured})
    return results | {"measured": measured}


def search(comparison: Comparison) -> list[Timing]:
    """Run each candidate once on the trial work; one that fails or does other work has ``failed``.

    Raises:
        UnequalWorkError: Settings that must not change the work do.
    """
    trial = comparison.trial
    sizes = [*(("ours", size) for size in comparison.tokens), *(("trl", size) for size in comparison.rows)]
    found = [measure(trial, {"side": side, "microbatch": size, "option": ""}) for side, size in sizes]
    for each in found[1:]:
        require_same_work(found[0]["work"], each["work"], names=("ours", f"{each['side']} {each['microbatch']}"))
    theirs = [each for each in found if each["side"] == "trl"]
    limit = max(180.0, 5 * max(each["wall_seconds"] for each in theirs))
    for option in OPTIONS.get(trial.task, ()):
        timing = dict(run_side(trial, {**best_setting(theirs), "option": option}, timeout=limit))
        if "failed" not in timing and (unlike := differences(found[0]["work"], timing["work"])):
            timing["failed"] = f"other {unlike[0][0]}"
        found.append(timing)
    return found


def best_setting(timings: Sequence[Timing]) -> Timing:
    """Return the setting with the least memory among those that take at most 5 % more CPU seconds than the fastest."""
    ran = [each for each in timings if "failed" not in each]
    limit = 1.05 * min(each["cpu_seconds"] for each in ran)
    best = min((each for each in ran if each["cpu_seconds"] <= limit), key=lambda each: each["peak_mib"])
    return {name: best[name] for name in ("side", "microbatch", "option")}


def measure(work: Work, candidate: Timing) -> Timing:
    """Run one side once; a failure ends the program."""
    timing = run_side(work, candidate)
    if "failed" in timing:
        raise SystemExit(f"{candidate['side']} on {work.task}: {timing['failed']}")
    return timing


def run_side(work: Work, candidate: Timing, *, threads: int = 1, timeout: float | None = None) -> Timing:
    """Run a side with a setting in its own process; a failure gives ``failed``, its reason."""
    setting = {name: candidate[name] for name in ("microbatch", "option")}
    arguments = ("benchmarks.peers", "side", candidate["side"], json.dumps(asdict(work)), json.dumps(setting))
    timing = {"side": candidate["side"], **setting, **run_arm(arguments, threads=threads, timeout=timeout)}
    cost = timing.get("failed") or f"{timing['cpu_seconds']:.1f} CPU s, {timing['peak_mib']:.0f} MiB"
    label = f"{work.task} {work.shape} {work.dtype}: {candidate['side']} {setting['microbatch']} {setting['option']}"
    sys.stderr.write(f"{label}: {cost}\n")
    return timing


def run_arm(arguments: Sequence[str], *, threads: int = 1, timeout: float | None = None) -> Timing:
    """Run ``python -m`` with these arguments and return its last line.

    A failure or timeout (seconds) gives ``failed``, its reason.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it may have started
        process.communicate()
        return {"failed": f"no result in {timeout:.0f} s"}
    if process.returncode != 0:
        lines = [line for line in errors.splitlines() if line[:1].strip()]
        return {"failed": lines[-1][:300] if lines else f"it exits with {process.returncode}"}
    timing: Timing = json.loads(output.strip().splitlines()[-1])
    return timing


def _summary(timing: Timing) -> dict[str, Any]:
    work = {name: value for name, value in timing.get("work", {}).items() if name not in ("advantages", "gradients")}
    return {**timing, "work": work}


def _commit() -> str:
    command = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def render(results: Mapping[str, Any]) -> str:
    """Render the tables of one plan: costs, then every candidate of the searches."""
    tried = "\n".join(f"- {each['title']}: {'; '.join(_tried(each['search']))}" for each in results["measured"])
    costs = table(_COSTS, [row for measured in results["measured"] for row in _cost_rows(measured)])
    start = "Settings tried, each once, on the trial: CPU s (peak MiB)."
    return f"Commit `{results['commit']}`; {results['machine']}\n\n{costs}\n\n{start}\n\n{tried}"


_COSTS = ("work", "side", "n", "wall s", "CPU s (range)", "of which", "TRL takes", "peak MiB")


def _cost_rows(measured: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    sides = {side: [each for each in measured["rounds"] if each["side"] == side] for side in SIDES}

    def median(side: str, name: str) -> float:
        return statistics.median(each[name] for each in sides[side])

    for side, timings in sides.items():
        first, values = timings[0], [each["cpu_seconds"] for each in timings]
        parts = [name for name in first if name.endswith("_cpu_seconds")]
        yield (
            measured["title"],
            ", ".join(filter(None, (SIDES[side], f"{first['microbatch']} {UNITS[side]}", first["option"]))),
            str(len(timings)),
            f"{median(side, 'wall_seconds'):.1f}",
            f"{median(side, 'cpu_seconds'):.1f} ({min(values):.1f} to {max(values):.1f})",
            ", ".join(f"{part.removesuffix('_cpu_seconds')} {median(side, part):.1f}" for part in parts) or "–",
            f"{median('trl', 'cpu_seconds') / median(side, 'cpu_seconds'):.2f}×",
            f"{median(side, 'peak_mib'):,.0f}",
        )


def _tried(found: Sequence[Timing]) -> Iterator[str]:
    """Yield a side's candidates with their costs or reasons."""
    for side, name in SIDES.items():
        sizes = [f"{each['microbatch']} {_once(each)}" for each in found if each["side"] == side and not each["option"]]
        yield f"{name}, {UNITS[side]}: {', '.join(sizes)}"
    yield from (f"{each['option']} {_once(each)}" for each in found if each["option"])


def _once(timing: Timing) -> str:
    if "failed" in timing:
        return f"without a figure ({timing['failed'].partition('. ')[0]})"
    return f"{timing['cpu_seconds']:.1f} ({timing['peak_mib']:,.0f})"
