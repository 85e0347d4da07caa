"""Datasets: read, gate, snapshot. One stage per dataset, so that a change of one does not redo the others."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pandas as pd

from data_contracts.gate import GateReport
from rlcore.config import DatasetConfig, RewardTerm, RunConfig
from rlcore.rewards.table import RewardResources, build_rewards
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.seeding import derive_seed
from rlcore.tokenization import ChatTokenizer
from rlcore.types import Rollout
from tasks.data import (
    POLICY,
    DatasetKind,
    TokenView,
    prepare_dataset,
    prompt_hashes,
    read_prompts,
    resolve_adapter,
    source_digest,
)
from tasks.rl_run import MODEL
from tasks.runtime import open_runtime
from tasks.stages import StageContext, StageResult
from tasks.storage import write_table
from tasks.tokens import tokenize_prompts


def run_prepare_prompts(context: StageContext) -> StageResult:
    """Prompts with ground truth, split into training and evaluation."""
    return _prepare(context, "prompts", context.config.prompts, tokenizer=context.inputs["import_sft"] / MODEL)


def run_prepare_demonstrations(context: StageContext) -> StageResult:
    """Demonstrations for SFT; none of their prompts may be an evaluation prompt."""
    folder = context.inputs["import_sft"] / MODEL
    return _prepare(context, "demonstrations", context.config.demonstrations, tokenizer=folder)


def run_prepare_preferences(context: StageContext) -> StageResult:
    """Preference pairs; none of their prompts may be an evaluation prompt."""
    folder, config = context.inputs["sft"] / MODEL, context.config.preferences
    if resolve_adapter(config) == POLICY:
        path = context.work / "pairs.parquet"
        sample_pairs(context, config, path)
        config = dataclasses.replace(config, adapter="preferences", path=str(path), fallback="", options={})
    return _prepare(context, "preferences", config, tokenizer=folder)


def _prepare(context: StageContext, kind: DatasetKind, config: DatasetConfig, *, tokenizer: Path) -> StageResult:
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


def sample_pairs(context: StageContext, config: DatasetConfig, path: Path) -> None:
    """Pairs that the SFT policy itself produced: for each training prompt a right and a wrong answer of a group.

    Prompts whose completions are all right or all wrong give no pair. Written as contract rows for the gate.
    """
    tokenizer = ChatTokenizer.load(context.inputs["sft"] / MODEL)
    rows = read_prompts(context.inputs["prepare_prompts"] / "train.parquet")
    wanted = config.num_train + config.num_eval
    prompts = tokenize_prompts(rows, tokenizer)
    limit = max(map(len, (prompt.token_ids for prompt in prompts)))
    params = SamplingParams(
        temperature=1.0, max_new_tokens=max(1, config.max_tokens - limit), num_samples=int(config.options["group_size"])
    )
    terms = (RewardTerm(kind=context.config.evaluation.verifier),)
    pairs: list[dict[str, object]] = []
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        sampler = NativeSampler(runtime.load_frozen(context.inputs["sft"] / MODEL), tokenizer)
        with build_rewards(terms, resources=RewardResources()) as grade:
            for start in range(0, len(prompts), 64):
                seed = derive_seed(context.seed, "pairs", start)
                for group in sampler.sample(prompts[start : start + 64], params, seed=seed):
                    rollouts = [rollout for rollout in group if isinstance(rollout, Rollout)]
                    verdicts = [score.value for score in grade(rollouts)]
                    right = [r for r, value in zip(rollouts, verdicts, strict=True) if value == 1.0]
                    wrong = [r for r, value in zip(rollouts, verdicts, strict=True) if value == 0.0]
                    if right and wrong and len(pairs) < wanted:
                        pairs.append(_pair_row(right[0], wrong[0]))
                if len(pairs) >= wanted:
                    break
    write_table(pd.DataFrame(pairs), path)


def _pair_row(chosen: Rollout, rejected: Rollout) -> dict[str, object]:
    return {
        "pair_id": chosen.prompt.prompt_id,
        "weight": 1.0,
        "messages": [{"role": message.role, "content": message.content} for message in chosen.prompt.messages],
        "chosen": chosen.text,
        "rejected": rejected.text,
        "margin": 0.0,
        "source": POLICY,
    }


def prompts_source(config: RunConfig) -> str:
    """Digest of what the prompts are read from."""
    return source_digest(config.prompts)


def demonstrations_source(config: RunConfig) -> str:
    """Digest of what the demonstrations are read from."""
    return source_digest(config.demonstrations)


def preferences_source(config: RunConfig) -> str:
    """Digest of what the preferences are read from."""
    return source_digest(config.preferences)
