"""False promotions among real models without a difference: one checkpoint, sampled twice, judged by the whole gate.

    python -m benchmarks.promotion --real

What makes this an A/A test. Both sides are the same weights on the same held-out problems, decoded at temperature 1
under different seeds, so the expected difference of every figure is exactly 0, and each pair of evaluations is an
independent draw. Policies trained from different seeds would not do: they are different models, some of them truly
better, and promoting a better one is no error. Greedy decoding would not do either: the same weights give the same
answers, and nothing could ever be promoted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pandas as pd

os.environ.setdefault("RLCORE_ENGINE", "inline")

from flows.presets import open_preset
from flows.run import run_targets
from rlcore.evaluation import accuracy
from rlcore.promotion import Rule, Verdict, judge
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.seeding import derive_seed
from rlcore.tokenization import ChatTokenizer
from tasks.home.settings import configure_environment, find_home
from tasks.preset.promotion import PromotionConfig
from tasks.preset.run import RunConfig
from tasks.steps.base import MODEL
from tasks.steps.evaluate import answers
from tasks.steps.promotion_figures import compared
from tasks.steps.rewards import verifier
from tasks.steps.rows import read_prompts
from tasks.steps.runtime import open_runtime
from tasks.steps.tokens import tokenize_prompts

NUM_PAIRS, NUM_PROBLEMS = 40, 200
OVERRIDES = ("promotion.min_gain=0.0",)


def measure() -> None:
    """Train the tiny preset's SFT checkpoint if it is not cached, sample it again and again, judge, print the table."""
    started, cpu = time.perf_counter(), time.process_time()
    home = find_home()
    configure_environment(home)
    config = open_preset("tiny", OVERRIDES)
    refs = run_targets("tiny", OVERRIDES, ["sft"])
    tables = list(_evaluations(config, home.root / refs["sft"].uri, home.root / refs["prepare_prompts"].uri))
    verdicts = [
        _judged(config, *pair, number) for number, pair in enumerate(zip(tables[::2], tables[1::2], strict=True))
    ]
    _print(verdicts, tables)
    spent = time.process_time() - cpu
    sys.stdout.write(f"\n{time.perf_counter() - started:.0f} s, {spent:.0f} s of processor time\n")


def _evaluations(config: RunConfig, checkpoint: Path, data: Path) -> Iterator[pd.DataFrame]:
    """The checkpoint's answers to the held-out problems under one seed after another, two for each pair."""
    tokenizer = ChatTokenizer.load(checkpoint / MODEL)
    prompts = tokenize_prompts(read_prompts(data / "eval.parquet")[:NUM_PROBLEMS], tokenizer)
    params = SamplingParams(temperature=1.0, max_new_tokens=config.evaluation.max_new_tokens, num_samples=1)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(config.hardware, seed=config.seed))
        grade = stack.enter_context(verifier(config.evaluation, prefill=tokenizer.prefill))
        sampler = NativeSampler(
            runtime.load_frozen(checkpoint / MODEL), tokenizer, max_concurrent=config.evaluation.max_concurrent
        )
        for number in range(2 * NUM_PAIRS):
            table = answers(sampler, prompts, params, grade, seed=derive_seed(config.seed, "a/a", number))
            yield table.sort_values("prompt_id").reset_index(drop=True)


def _judged(config: RunConfig, champion: pd.DataFrame, challenger: pd.DataFrame, seed: int) -> Verdict:
    settings = config.section("promotion", PromotionConfig)
    primary, guards = compared(champion, challenger, settings)
    rule = Rule(alpha=settings.alpha, min_gain=settings.min_gain)
    return judge(primary, guards, (), rule=rule, look=1, seed=seed)


def _print(verdicts: list[Verdict], tables: list[pd.DataFrame]) -> None:
    shares = [float(table["correct"].mean()) for table in tables]
    sys.stdout.write(
        f"{NUM_PROBLEMS} problems, {len(verdicts)} pairs; accuracy of one evaluation {min(shares):.3f} to "
        f"{max(shares):.3f}, mean {sum(shares) / len(shares):.3f}\n\n"
        "| decided by | comparisons | promoted | 95 % interval |\n|---|---|---|---|\n"
    )
    outcomes = {
        "gain alone": [verdict.checks[0].passed for verdict in verdicts],
        "all checks": [verdict.promote for verdict in verdicts],
    }
    for label, wins in outcomes.items():
        share = accuracy(wins)
        sys.stdout.write(f"| {label} | {share.n} | {sum(wins)} | [{share.low:.3f}, {share.high:.3f}] |\n")
    sys.stdout.write("\n| check | pairs that pass |\n|---|---|\n")
    for place, check in enumerate(verdicts[0].checks):
        passed = sum(verdict.checks[place].passed for verdict in verdicts)
        sys.stdout.write(f"| {check.name} | {passed} of {len(verdicts)} |\n")
