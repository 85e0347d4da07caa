"""Data preparation: read, gate, snapshot. Each dataset is a stage, so that changing one does not rerun the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rlcore.data_contracts.adapters.fields import Messages
from rlcore.data_contracts.gate.data_gate import GateReport
from rlcore.data_contracts.gate.eval_leakage import Overlap
from rlcore.data_contracts.gate.token_budget import TokenMeter
from rlcore.data_contracts.text import prompt_key
from rlcore.errors import DataError
from rlcore.tasks.presets.data import DatasetConfig, too_few_held_out
from rlcore.tasks.presets.graph import NO_GRADERS, Graders
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult
from rlcore.tasks.steps.data import is_exact, prepare_dataset
from rlcore.tasks.store.storage import read_column
from rlcore.text.tokenization import ChatTokenizer, encode_all, max_prompt_tokens, max_text_tokens, prompt_lengths
from rlcore.types import Message

LATER = "use other rows for one of the two, or name this dataset before the other"


def run_prepare(context: StageContext, *, name: str, held_out: tuple[str, ...], graders: Graders) -> StageResult:
    """Gate the dataset ``name``. It must not contain prompts that the stages ``held_out`` keep for evaluation.

    ``graders``: those of its answers, which try its reference answers first.
    Raises:
        DataError: the gate rejects it, or one of ``held_out`` has its evaluation prompts among the training rows.
    """
    folder = context.inputs["import_sft"] / MODEL
    config: DatasetConfig = context.config.data[name]
    done = prepare(context, config, tokenizer=folder, held_out=held_out, graders=graders)
    if config.has_prompts:
        _refuse_leaks(context, name, held_out)
    return done


def prepare(
    context: StageContext,
    config: DatasetConfig,
    *,
    tokenizer: Path,
    held_out: tuple[str, ...],
    graders: Graders = NO_GRADERS,
) -> StageResult:
    """Gate a dataset into a snapshot without the prompts that the stages ``held_out`` evaluate on."""
    meter = token_meter(ChatTokenizer.load(tokenizer))
    # The work folder comes first: if the gate rejects the data, the error names quarantine and report there.
    snapshot = context.work / "snapshot"
    snapshot.mkdir(exist_ok=True)
    evaluated = evaluated_prompts(context, held_out)
    report = prepare_dataset(
        config, seed=context.seed, tokens=meter, folder=snapshot, evaluated=evaluated, graders=graders
    )
    if error := too_few_held_out(config, report.num_eval):
        raise DataError(error, where=f"{context.stage}: num_eval")
    shutil.copytree(snapshot, context.folder, dirs_exist_ok=True)
    log_to_mlflow(context, report)
    return StageResult(
        metrics={
            "data/accepted": float(report.accepted),
            "data/quarantined": float(report.quarantined),
            "data/train": float(report.num_train),
            "data/held_out": float(report.num_eval),
            "data/unused": float(report.unused),
        },
        rows=report.num_train + report.num_eval,
        contract=report.contract,
    )


def _refuse_leaks(context: StageContext, name: str, stages: Sequence[str]) -> None:
    config: DatasetConfig = context.config.data[name]
    exactly = is_exact(config)
    kept = {prompt_key(messages, is_exact=exactly) for messages in _prompts(context.folder / "eval.parquet")}
    for stage in stages:
        train = _prompts(context.inputs[stage] / "train.parquet")
        if shared := kept & {prompt_key(messages, is_exact=exactly) for messages in train}:
            raise DataError(
                f"{len(shared)} evaluation prompts are training prompts of another dataset ({stage}); "
                f"the first is {min(shared)[:120]!r}",
                where=f"data.{name}",
                fix=LATER,
            )
    if config.comparison.ngram_overlap != "warn":
        _refuse_shared_words(context, config.comparison.ngram_size, name, stages)


def _refuse_shared_words(context: StageContext, size: int, name: str, stages: Sequence[str]) -> None:
    for stage in stages:
        overlap = Overlap(list(_prompts(context.folder / "eval.parquet")), size=size)
        for some in read_column(context.inputs[stage] / "train.parquet", "messages"):
            overlap.see([[turn["content"] for turn in messages if turn["role"] != "system"] for messages in some])
        if overlap.num_touched:
            raise DataError(
                f"{overlap.num_touched} evaluation prompts share {size} words in a row, or all if fewer, with "
                f"training prompts of another dataset ({stage})",
                where=f"data.{name}",
                fix=LATER,
            )


def evaluated_prompts(context: StageContext, stages: Sequence[str]) -> list[Messages]:
    """Return the prompts that these stages keep for evaluation."""
    return [messages for stage in stages for messages in _prompts(context.inputs[stage] / "eval.parquet")]


def _prompts(path: Path) -> Iterator[Messages]:
    for some in read_column(path, "messages"):
        yield from some


def log_to_mlflow(context: StageContext, report: GateReport) -> None:
    """Log the snapshot as an MLflow dataset under its digest, and the report and quarantine as artifacts."""
    for split in ("train", "eval"):
        context.tracker.log_dataset(context.folder / f"{split}.parquet", name=report.contract, context=split)
    for name in ("report.json", "quarantine.jsonl"):
        context.tracker.log_artifact(context.folder / name, "data")
    context.log(
        f"dataset train={report.num_train} eval={report.num_eval} unused={report.unused} "
        f"quarantined={report.quarantined} contract={report.contract}"
    )
    for warning in report.warnings:
        context.log(f"warning: {warning}")


def token_meter(tokenizer: ChatTokenizer) -> TokenMeter:
    """Return a tokenizer as the gate needs it, which knows no messages of rlcore."""

    def counts(count: Callable[..., Sequence[int]]) -> Callable[[Sequence[Messages]], Sequence[int]]:
        # A role that is none has been refused by the contract.
        return lambda found: count(tokenizer, [[Message(**turn) for turn in one] for one in found])  # type: ignore[arg-type]

    return TokenMeter(
        encode=partial(encode_all, tokenizer),
        prompt_lengths=counts(prompt_lengths),
        max_prompt_tokens=counts(max_prompt_tokens),
        max_text_tokens=max_text_tokens,
        special_tokens=tuple(tokenizer.special_tokens),
    )
