"""Comparison with TRL: a search for each side's best setting, then interleaved rounds, all on provably equal work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import arena
from benchmarks.peers.arena import Timing
from benchmarks.peers.options import OPTIONS
from benchmarks.peers.same import UnequalWorkError, require_same_work
from benchmarks.peers.work import Work

SIDES = ("ours", "trl")
LAST_WITH_PPO = Path(".venv-peers/trl-1.12").absolute()  # TRL's last release with a PPO trainer, for the Python path


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison.

    Attributes:
        trial: Smaller work of the same rows, on which settings are chosen.
        tokens: rlcore's candidates, in tokens per micro-batch.
        rows: TRL's candidates, in rows per micro-batch; pairs have two sequences a row.
        options: Whether TRL's options are tried too.
    """

    title: str
    work: Work
    trial: Work
    threads: tuple[int, ...] = (1,)
    rounds: int = 3
    tokens: tuple[int, ...] = (512, 1024, 2048)
    rows: tuple[int, ...] = (2, 4, 8, 16)
    options: bool = True


def _grpo(shape: str, dtype: str, *, longest: int = 96, **settings: Any) -> Comparison:
    steps = 3 if shape == "tiny" else 1
    work = Work(task="grpo", shape=shape, dtype=dtype, steps=steps, completion_tokens=(8, longest))
    trial = replace(work, num_prompts=2, steps=1)
    name = shape if longest == 96 else f"{shape}, up to {longest} tokens"
    return Comparison(title=f"GRPO, {name}, {dtype}", work=work, trial=trial, **settings)


def _supervised(task: str, dtype: str) -> Comparison:
    work = Work(task=task, dtype=dtype, num_prompts=32, group_size=1 if task == "sft" else 2, steps=3)
    title = f"{ {'sft': 'SFT', 'rm': 'reward model', 'dpo': 'DPO'}[task] }, tiny, {dtype}"
    return Comparison(title=title, work=work, trial=replace(work, steps=1))


def _ppo(task: str, dtype: str) -> Comparison:
    work = Work(task=task, dtype=dtype)
    title = f"PPO, { {'ppo': 'own critic', 'ppo_shared': 'shared trunk'}[task] }, tiny, {dtype}"
    return Comparison(title=title, work=work, trial=replace(work, num_prompts=2), rows=(2, 4, 8))


DTYPES = ("float32", "bfloat16")


def _smollm2(dtype: str, *, prompts: int) -> Comparison:
    whole = _grpo("smollm2", dtype, tokens=(512, 2048), rows=(4, 8, 16), options=False)
    return replace(whole, work=replace(whole.work, num_prompts=prompts))


PLANS: dict[str, list[Comparison]] = {
    "headline": [_smollm2(dtype, prompts=4) for dtype in DTYPES],
    "supervised": [_supervised(task, dtype) for task in ("sft", "rm", "dpo") for dtype in DTYPES],
    "grpo": [
        *(_grpo("tiny", dtype, threads=(1, 2)) for dtype in DTYPES),
        _grpo("tiny", "float32", longest=384, options=False),
        *(_smollm2(dtype, prompts=8) for dtype in DTYPES),
    ],
    "ppo": [_ppo(task, dtype) for task in ("ppo", "ppo_shared") for dtype in DTYPES],
}


def run_plan(name: str, comparisons: Sequence[Comparison], *, out: Path) -> dict[str, Any]:
    """Run comparisons and write their results to ``out`` after the last one.

    Raises:
        UnequalWorkError: Two sides did different work. Nothing is written.
    """
    loads, measured = [os.getloadavg()[0]], []
    for comparison in comparisons:
        found = search(comparison)
        best = {side: best_setting([each for each in found if each["side"] == side]) for side in SIDES}
        rounds, peaks = list[Timing](), list[float]()
        for number in range(comparison.rounds):
            for threads in comparison.threads:
                peaks.append(arena.run_arm("floor", ("benchmarks.floor", comparison.work.dtype), threads)["gflops"])
                pair = [measure(comparison.work, best[side], threads) for side in SIDES]
                require_same_work(pair[0]["work"], pair[1]["work"], names=SIDES)
                rounds += [_summary(each) | {"threads": threads, "round": number} for each in pair]
                loads.append(os.getloadavg()[0])
        fields = {"title": comparison.title, "work": comparison.work.as_dict(), "gflops": max(peaks)}
        measured.append(fields | {"search": [_summary(each) for each in found], "rounds": rounds})
    threads = max(max(each.threads) for each in comparisons)
    machine = arena.describe(threads, loads)
    results = {"plan": name, "commit": _commit(), "machine": machine, "trl": version("trl"), "measured": measured}
    arena.write(out, results)
    return results


def search(comparison: Comparison) -> list[Timing]:
    """Run each candidate once on the trial work; an option that fails or does other work has ``failed``.

    Raises:
        UnequalWorkError: Settings that must not change the work do.
    """
    trial, threads = comparison.trial, min(comparison.threads)
    candidates = [{"side": "ours", "microbatch": size, "option": ""} for size in comparison.tokens]
    candidates += [{"side": "trl", "microbatch": size, "option": ""} for size in comparison.rows]
    found = [measure(trial, candidate, threads) for candidate in candidates]
    for each in found[1:]:
        require_same_work(found[0]["work"], each["work"], names=("ours", f"{each['side']} {each['microbatch']}"))
    theirs = [each for each in found if each["side"] == "trl"]
    limit = max(180.0, 5 * max(each["wall_seconds"] for each in theirs))
    for option in OPTIONS[trial.task] if comparison.options else ():
        found.append(_try(trial, {**best_setting(theirs), "option": option}, threads, reference=found[0], limit=limit))
    return found


def _try(work: Work, candidate: Timing, threads: int, *, reference: Timing, limit: float) -> Timing:
    timing = _run(work, candidate, threads, timeout=limit)
    try:
        if "failed" not in timing:
            require_same_work(reference["work"], timing["work"], names=SIDES)
    except UnequalWorkError as error:
        return timing | {"failed": " ".join(str(error).split()[10:])}
    return timing


def best_setting(timings: Sequence[Timing]) -> Timing:
    """Return the setting with the least memory among those that take at most 5 % more CPU seconds than the fastest."""
    ran = [each for each in timings if "failed" not in each]
    limit = 1.05 * min(each["cpu_seconds"] for each in ran)
    best = min((each for each in ran if each["cpu_seconds"] <= limit), key=lambda each: each["peak_mib"])
    return {name: best[name] for name in ("side", "microbatch", "option")}


def measure(work: Work, candidate: Timing, threads: int) -> Timing:
    """Run one side once.

    Raises:
        SystemExit: It failed.
    """
    timing = _run(work, candidate, threads)
    if "failed" in timing:
        raise SystemExit(f"{candidate['side']} on {work.task}: {timing['failed']}")
    return timing


def _run(work: Work, candidate: Timing, threads: int, *, timeout: float | None = None) -> Timing:
    setting = {name: candidate[name] for name in ("microbatch", "option")}
    arguments = ("benchmarks.peers.arm", candidate["side"], json.dumps(work.as_dict()), json.dumps(setting))
    timing = {
        "side": candidate["side"],
        **setting,
        **arena.run_arm(candidate["side"], arguments, threads, timeout=timeout),
    }
    cost = timing.get("failed") or f"{timing['cpu_seconds']:.1f} CPU s, {timing['peak_mib']:.0f} MiB"
    label = f"{work.task} {work.shape} {work.dtype}, {threads} thread(s)"
    sys.stderr.write(f"{label}: {candidate['side']} {setting['microbatch']} {setting['option']}: {cost}\n")
    return timing


def _summary(timing: Timing) -> Timing:
    """Return a timing with the counts of its work, without the long lists that were compared."""
    work = {name: value for name, value in timing.get("work", {}).items() if name not in ("advantages", "gradients")}
    return {**timing, "work": work}


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=7", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
