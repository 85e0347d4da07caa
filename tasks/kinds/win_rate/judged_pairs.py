"""Pairs of a win rate: sampled answers and human pairs, and a judge's results on them, in chunks on disk."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from rlcore.checks.canaries.served_weights import verify_served_weights
from rlcore.checks.settings import check_context
from rlcore.config import WinRateConfig
from rlcore.errors import DataError, RewardError
from rlcore.models.architectures import positions_of
from rlcore.models.runtime import Runtime
from rlcore.rewards.pair_judge import BothOrders, Pair, PairJudge, judge_both_orders
from rlcore.sampling.base import SamplingParams
from rlcore.seeding import derive_seed, shuffled
from rlcore.strict_config import build
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.steps.base import MODEL, StageContext, prepare_stage_name
from rlcore.tasks.steps.pair_data import tokenize_pairs
from rlcore.tasks.steps.rollout_engine import longest, open_engine, open_player, sampling_engine
from rlcore.tasks.steps.rows import PairRow, read_pairs
from rlcore.tasks.steps.sampled_answers import refuse_changed_prompts
from rlcore.tasks.steps.workload import Workload
from rlcore.tasks.store.storage import matches_digest, note_digest, read_json, read_table, write_json, write_table
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Prompt, Rollout

if TYPE_CHECKING:
    from rlcore.tasks.kinds.win_rate.kind import WinRateStage

PAIRS_PER_CHUNK = 64
JudgedPairs = tuple[str, Pair | None, str]
"""The id of a prompt or of a pair, the pair, and why there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer as a judge reads it, with the chat template's prefill; ``error``: why the engine gave none."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    error: str = ""


def answer(
    context: StageContext,
    stage: str,
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    runtime: Runtime,
    *,
    side: str,
) -> list[Answer]:
    """Return an answer of the checkpoint of the stage ``stage`` to each prompt, reusing those on disk."""
    config: WinRateConfig = context.config.stage.settings
    path = context.work / "answers" / f"{side}.json"  # a digest is stored next to the folder
    if matches_digest(path):
        return [build(Answer, document) for document in read_json(path)]
    folder, sampling = context.inputs[stage] / MODEL, config.sampling
    check_context(
        positions_of(folder), prompts, sampling.max_new_tokens, key=f"stages.{context.stage}.sampling.max_new_tokens"
    )
    params = SamplingParams(
        temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens, num_samples=1, greedy=config.greedy
    )
    with ExitStack() as stack:
        engine = stack.enter_context(
            open_engine(
                folder,
                tokenizer,
                config=sampling_engine(sampling),
                work=Workload(
                    max_concurrent=sampling.max_concurrent, max_tokens=longest(prompts, sampling.max_new_tokens)
                ),
                runtime=runtime,
                progress=context.log,
            )
        )
        verify_served_weights(engine, folder, prompts, runtime, seed=derive_seed(context.seed, "served"))
        sampler = stack.enter_context(open_player(engine, tokenizer, sampling.episodes))
        refuse_changed_prompts(context, sampler, "a judge would compare answers to a prompt that it has not read")
        groups = sampler.sample(prompts, params, seed=derive_seed(context.seed, "win_rate", side))
    found = [
        Answer(text=tokenizer.prefill + one.transcript, token_ids=one.completion_ids)
        if isinstance(one, Rollout)
        else Answer(error=one.reason)
        for (one,) in groups
    ]
    write_json([asdict(each) for each in found], path)
    note_digest(path)
    return found


def human_pairs(context: StageContext, tokenizer: ChatTokenizer) -> list[JudgedPairs]:
    """Return the requested number of held-out human pairs, the better answer first; the seed chooses them.

    Empty without datasets of human pairs.
    Raises:
        DataError: the datasets hold out none.
    """
    stage: WinRateStage = context.config.stage
    data: Mapping[str, DatasetConfig] = context.config.data if stage.human_pairs else {}
    found: list[JudgedPairs] = []
    for name, config in data.items():
        rows = read_pairs(context.inputs[prepare_stage_name(name)] / "eval.parquet")
        tokens = tokenize_pairs(rows, tokenizer, max_tokens=config.max_tokens)
        for row, ids in zip(rows, tokens, strict=True):
            pair = Pair(
                messages=row.messages,
                first=row.chosen,
                second=row.rejected,
                prompt_ids=ids.prompt_ids,
                first_ids=ids.chosen_ids,
                second_ids=ids.rejected_ids,
            )
            found.append((_question(row), pair, ""))
    if data and not found:
        raise DataError(
            "there are no held-out human pairs to audit the judge on",
            where=f"stages.{context.stage}.human_pairs",
            fix="raise num_eval of the dataset",
        )
    return [
        found[place] for place in shuffled(len(found), context.seed, "human pairs")[: stage.settings.num_human_pairs]
    ]


def judge_pairs(context: StageContext, judge: PairJudge, asked: Sequence[JudgedPairs], *, name: str) -> pd.DataFrame:
    """Judge pairs in both orders, a row each, reusing chunks on disk.

    Raises:
        RewardError: more than ``max_unjudged`` of the pairs are certainly unjudged, with the most frequent reason.
    """
    limit, errors = context.config.stage.settings.max_unjudged * len(asked), Counter[str]()
    tables: list[pd.DataFrame] = []
    total = math.ceil(len(asked) / PAIRS_PER_CHUNK)
    for number in range(total):
        path = context.work / name / f"chunk-{number:05d}.parquet"
        is_there = matches_digest(path)
        chunk = asked[number * PAIRS_PER_CHUNK : (number + 1) * PAIRS_PER_CHUNK]
        table = read_table(path) if is_there else _judged(judge, chunk)
        errors.update(reasons_of(table))
        _refuse(errors, limit, len(asked), where=f"stages.{context.stage}.judge")
        if not is_there:  # a chunk that made the stage fail is judged again
            path.parent.mkdir(exist_ok=True)
            write_table(table, path)
            note_digest(path)
        tables.append(table)
        context.report_progress(f"{context.stage} {name}", number + 1, total)
    return pd.concat(tables, ignore_index=True) if tables else _judged(judge, ())


def _judged(judge: PairJudge, asked: Sequence[JudgedPairs]) -> pd.DataFrame:
    results = iter(judge_both_orders(judge, [pair for _, pair, _ in asked if pair is not None]))
    rows = [_row(prompt, pair, None if pair is None else next(results), why) for prompt, pair, why in asked]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


def _row(prompt: str, pair: Pair | None, both: BothOrders | None, why: str) -> dict[str, Any]:
    if pair is None or both is None:
        return {"prompt": prompt, "error": why, "asked": False} | dict.fromkeys(_COUNTS, 0) | _NOT_JUDGED
    orders = both.forward, both.backward
    nan = float("nan")
    return {
        "prompt": prompt,
        "forward": nan if orders[0].value is None else orders[0].value,
        "backward": nan if orders[1].value is None else orders[1].value,
        "length": len(pair.first),
        "other_length": len(pair.second),
        "first": pair.first,
        "second": pair.second,
        "error": next((order.error for order in orders if order.value is None), ""),
        "asked": both.was_judged,
        "calls": 2 * both.was_judged,
        "failed_calls": sum(order.value is None for order in orders),
        "tokens": sum(order.prompt_tokens + order.completion_tokens for order in orders),
        "cost": sum(order.cost for order in orders),
    }


_COUNTS = ("length", "other_length", "calls", "failed_calls", "tokens", "cost")
_NOT_JUDGED = {"forward": float("nan"), "backward": float("nan"), "first": "", "second": ""}
_COLUMNS = {
    "prompt": "str",
    "forward": "float64",
    "backward": "float64",
    "length": "int64",
    "other_length": "int64",
    "first": "str",
    "second": "str",
    "error": "str",
    "asked": "bool",
    "calls": "int64",
    "failed_calls": "int64",
    "tokens": "int64",
    "cost": "float64",
}


def reasons_of(table: pd.DataFrame) -> Counter[str]:
    """Count the reasons of unjudged pairs, without the text that they quote from a judge."""
    return Counter(re.sub(r": ['\"].*", "", error, flags=re.DOTALL) for error in table["error"] if error)


def _refuse(errors: Counter[str], limit: float, count: int, *, where: str) -> None:
    unjudged = errors.total()
    if unjudged > limit:
        most, times = errors.most_common(1)[0]
        raise RewardError(
            f"judge failed on {unjudged} of {count} pairs (limit {limit:g}), {times} times with: {most}",
            where=where,
            fix="check that the judge answers in the required form, or raise max_unjudged",
        )


def _question(row: PairRow) -> str:
    """Return the key of a pair's question: pairs of one are dependent in the audit's intervals."""
    return json.dumps([[message.role, message.content] for message in row.messages])
