"""Datasets: read, gate, snapshot. One stage per dataset, so that a change of one does not redo the others."""

from __future__ import annotations

import shutil
from pathlib import Path

from data_contracts.gate import GateReport
from rlcore.config import DatasetConfig
from rlcore.tokenization import ChatTokenizer
from tasks.preset.sections import Sections
from tasks.steps.base import MODEL, StageContext, StageResult
from tasks.steps.data import DatasetKind, TokenView, prepare_dataset, source_digest
from tasks.steps.prompt_hashes import prompt_hashes
from tasks.steps.rows import read_prompts


def run_prepare_prompts(context: StageContext) -> StageResult:
    """Prompts with ground truth, split into training and evaluation."""
    return prepare(context, "prompts", context.config.prompts, tokenizer=context.inputs["import_sft"] / MODEL)


def run_prepare_demonstrations(context: StageContext) -> StageResult:
    """Demonstrations for SFT; none of their prompts may be an evaluation prompt."""
    folder = context.inputs["import_sft"] / MODEL
    return prepare(context, "demonstrations", context.config.demonstrations, tokenizer=folder)


def prepare(context: StageContext, kind: DatasetKind, config: DatasetConfig, *, tokenizer: Path) -> StageResult:
    """Gate one dataset into a snapshot; of all but the prompts, none may be an evaluation prompt."""
    forbidden = frozenset[str]()
    if kind != "prompts":
        forbidden = prompt_hashes(read_prompts(context.inputs["prepare_prompts"] / "eval.parquet"))
    view = token_view(ChatTokenizer.load(tokenizer))
    # In the work folder first: when the gate refuses, quarantine and report stay where the error says.
    snapshot = context.work / "snapshot"
    snapshot.mkdir(exist_ok=True)
    report = prepare_dataset(kind, config, seed=context.seed, tokens=view, folder=snapshot, forbidden_prompts=forbidden)
    shutil.copytree(snapshot, context.folder, dirs_exist_ok=True)
    record(context, report)
    return StageResult(
        metrics={
            "data/accepted": float(report.accepted),
            "data/quarantined": float(report.quarantined),
        },
        rows=report.accepted,
        contract=report.contract,
    )


def record(context: StageContext, report: GateReport) -> None:
    """The snapshot as an MLflow dataset under our digest, the report and the quarantine as artifacts."""
    for split in ("train", "eval"):
        context.tracker.log_dataset(context.folder / f"{split}.parquet", name=report.contract, context=split)
    for name in ("report.json", "quarantine.jsonl"):
        context.tracker.log_artifact(context.folder / name, "data")
    context.progress(f"{report.accepted} rows accepted, {report.quarantined} quarantined ({report.contract})")


def token_view(tokenizer: ChatTokenizer) -> TokenView:
    """What the gate needs to know of a tokenizer."""
    return TokenView(
        encode=tokenizer.encode,
        special_tokens=tuple(tokenizer.special_tokens),
        prompt_length=lambda messages: len(tokenizer.render_prompt(messages)),
    )


def prompts_source(config: Sections) -> str:
    """Digest of what the prompts are read from."""
    return source_digest(config.prompts)


def demonstrations_source(config: Sections) -> str:
    """Digest of what the demonstrations are read from."""
    return source_digest(config.demonstrations)
