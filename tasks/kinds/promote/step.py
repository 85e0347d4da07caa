"""Champion from the registry, and the decision on a challenger."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from rlcore.checks.audit.integrity import write_model_digest
from rlcore.config import ModelConfig
from rlcore.errors import DataError
from rlcore.evaluation.promotion import PairedMetric, PromotionDecision, PromotionRule, decide
from rlcore.models.importing import import_model
from rlcore.tasks.kinds.promote.figures import (
    asked_both,
    compared,
    compared_by_wins,
    comparison_digest,
    greedy_rows,
    judge_check,
    limits_of,
    require_tasks,
    wins_of,
)
from rlcore.tasks.kinds.promote.kind import CHALLENGER_ASKED, CHAMPION_ASKED, WINS, model_name
from rlcore.tasks.presets.evaluation import NO_ACCURACY
from rlcore.tasks.presets.promotion import PromotionConfig
from rlcore.tasks.steps.base import MODEL, RECORDS, StageContext, StageResult, prepare_stage_name
from rlcore.tasks.steps.prompt_hashes import prompt_hashes
from rlcore.tasks.steps.rows import read_prompts
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.store.storage import read_json, read_table, write_json
from rlcore.tasks.tracking.registry import count_look, download_model
from rlcore.tasks.tracking.runs import open_tracker

_DIGITS = 16  # characters of digests that identify a look
_PRIMARY = ("accuracy", "win rate")


def run_champion(context: StageContext, *, uri: str, sha256: str) -> StageResult:
    """Import the champion's files from the registry, verified like every external checkpoint.

    ``sha256`` of the registered artifact is in the record, by which a lineage finds its origin.
    """
    folder = download_model(uri, context.work / "registry")
    card = import_model(ModelConfig(source="folder", path=str(folder)), context.folder / MODEL, seed=context.seed)
    write_model_digest(context.folder, stage=context.stage, model=context.folder / MODEL)
    return StageResult(metrics={"model/parameters": float(card.num_parameters)})


def run_promote(
    context: StageContext,
    *,
    challenger: str,
    champion: str,
    champion_sha256: str,
    data: tuple[str, ...],
    judged: tuple[str, ...],
) -> StageResult:
    """Decide on the checkpoint of the stage ``challenger``; ``champion`` is a version and its digest, or empty.

    ``data``: the datasets whose held-out prompts both were evaluated on; ``judged``: those of the win rate, if it
    decides. The registry counts the looks at the held-out prompts. Repeating a comparison keeps its number. Other
    metrics, fewer problems or another limit for the same pair count as one more look.
    """
    settings: PromotionConfig = context.config.promotion
    ref = context.input_refs[challenger]
    answers = {name: greedy_rows(folder) for name, folder in evaluations(context.inputs, challenger).items()}
    if not settings.win_rate and not answers["challenger"]["is_graded"].any():
        raise DataError(
            "no held-out prompt has the reference that its verifier needs, so there is no accuracy to decide by",
            where="promotion",
            fix=NO_ACCURACY,
        )
    require_tasks(answers["challenger"], settings)
    wins = read_json(context.inputs[WINS] / "win_rate.json") if WINS in context.inputs else None
    limits = limits_of(answers["challenger"], _history(context.inputs[challenger]), settings)
    rule = PromotionRule(alpha=settings.alpha, min_gain=settings.min_gain)
    if ref.sha256 == champion_sha256:
        decision = PromotionDecision(
            promote=False, look=0, alpha=0.0, checks=(), sentence="The challenger is the champion already."
        )
    elif champion:
        primary, guards = _figures(context, answers, settings)
        figures = comparison_digest(primary, guards, settings)
        pair = "-".join(digest[:_DIGITS] for digest in (ref.sha256, champion_sha256, figures))
        look = max(_look(context, names, pair=pair) for names in (data, judged) if names)
        more = [judge_check(wins["distrust"])] if wins else []
        decision = decide(primary, guards, [*more, *limits], rule=rule, look=look, seed=context.seed)
    else:
        decision = decide(None, (), limits, rule=rule, look=1, seed=context.seed)
    sides = {"model": model_name(context.config.name, settings), "challenger": challenger, "champion": champion}
    document = {**sides, "verdict": dataclasses.asdict(decision), "win_rate": wins}
    write_json(document, context.folder / "verdict.json")
    context.tracker.log_artifact(context.folder / "verdict.json", "promotion")
    return StageResult(metrics=_metrics(decision))


def _figures(
    context: StageContext, answers: Mapping[str, pd.DataFrame], settings: PromotionConfig
) -> tuple[PairedMetric, list[PairedMetric]]:
    """Return the primary metric and the guards: by the win rate if there is one, else by accuracy."""
    if WINS in context.inputs:
        wins = wins_of(read_table(context.inputs[WINS] / "verdicts.parquet"))
        primary, guards = compared_by_wins(wins, answers["champion"], answers["challenger"], settings)
    else:
        primary, guards = compared(answers["champion"], answers["challenger"], settings)
    for name, margin in settings.benchmarks.items():
        old, new = (
            read_table(context.inputs[f"{side}{name}"] / RECORDS) for side in (CHAMPION_ASKED, CHALLENGER_ASKED)
        )
        guards += asked_both(old, new, margin=margin)
    return primary, guards


def prompt_set(*paths: Path) -> str:
    """Return a digest of the prompts in files, independent of order and other columns. Looks are counted per digest.

    It covers all prompts of the files: evaluating on fewer of them does not make them new.
    """
    return hashlib.sha256(
        "\n".join(sorted(prompt_hashes(row for path in paths for row in read_prompts(path)))).encode()
    ).hexdigest()


def evaluations(inputs: Mapping[str, Path], challenger: str) -> dict[str, Path]:
    """Return the evaluations of both sides among the inputs; without a champion only the challenger's."""
    folders = {"champion": "evaluate_champion", "challenger": f"evaluate_{challenger}"}
    return {side: inputs[stage] for side, stage in folders.items() if stage in inputs}


def _look(context: StageContext, data: Iterable[str], *, pair: str) -> int:
    home, name = find_home(), model_name(context.config.name, context.config.promotion)
    asked = prompt_set(*(context.inputs[prepare_stage_name(each)] / "eval.parquet" for each in data))[:_DIGITS]
    return count_look(home, open_tracker(home), name, data=asked, pair=pair)


def _history(folder: Path) -> list[dict[str, float]]:
    path = folder / "history.json"
    history: list[dict[str, float]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return history


def _metrics(decision: PromotionDecision) -> dict[str, float]:
    metrics = {
        "promotion/promoted": float(decision.promote),
        "promotion/look": float(decision.look),
        "promotion/failed_checks": float(sum(not check.passed for check in decision.checks)),
    }
    gain = next((check.estimate for check in decision.checks if check.name in _PRIMARY), None)
    return metrics if gain is None else metrics | {"promotion/gain": gain}
