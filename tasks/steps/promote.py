"""The champion from the registry, and the verdict over a challenger."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from rlcore.audit.seals import write_seal
from rlcore.checks import Check, at_least, at_most
from rlcore.config import ModelConfig
from rlcore.errors import ConfigError, DataError
from rlcore.models.importing import import_model
from rlcore.promotion import Paired, Rule, Verdict, judge
from tasks.home.settings import find_home
from tasks.home.storage import write_json
from tasks.preset.promotion import PromotionConfig
from tasks.steps.base import MODEL, StageContext, StageResult, prepared
from tasks.steps.compare import greedy_answers
from tasks.steps.prompt_hashes import prompt_hashes
from tasks.steps.rows import read_prompts
from tasks.tracking.registry import count_look, download_model
from tasks.tracking.runs import open_tracker

_DIGITS = 16  # of the digests that name a look


def run_champion(context: StageContext, *, uri: str, sha256: str) -> StageResult:
    """The champion's files from the registry, verified like every checkpoint that comes from outside.

    ``sha256``: of the artifact that was registered. It stands in the record, where a lineage finds what made it.
    """
    folder = download_model(uri, context.work / "registry")
    card = import_model(ModelConfig(source="folder", path=str(folder)), context.folder / MODEL, seed=context.seed)
    write_seal(context.folder, stage=context.stage, model=context.folder / MODEL)
    return StageResult(metrics={"model/parameters": float(card.num_parameters)})


def run_promote(
    context: StageContext, *, challenger: str, champion: str, champion_sha256: str, data: tuple[str, ...]
) -> StageResult:
    """Judge the checkpoint of the stage ``challenger``; ``champion`` is a version and its digest, empty without one.

    ``data``: the data sets on whose held-out prompts both were evaluated.

    The registry counts the looks at the held-out prompts: a pair that was judged before keeps its number.
    """
    settings: PromotionConfig = context.config.promotion
    ref = context.input_refs[challenger]
    answers = {name: greedy_answers(folder) for name, folder in evaluations(context.inputs, challenger).items()}
    if answers["challenger"].empty:
        raise DataError(
            "no held-out prompt has a reference, so there is no accuracy to decide by",
            where="promotion",
            fix="evaluate on data with references (evaluation.data)",
        )
    limits = limits_of(answers["challenger"], _history(context.inputs[challenger]), settings)
    rule = Rule(alpha=settings.alpha, min_gain=settings.min_gain)
    if ref.sha256 == champion_sha256:
        verdict = Verdict(
            promote=False, look=0, alpha=0.0, checks=(), sentence="The challenger is the champion already."
        )
    elif champion:
        look = _look(context, data, pair=f"{ref.sha256[:_DIGITS]}-{champion_sha256[:_DIGITS]}")
        primary, guards = compared(answers["champion"], answers["challenger"], settings)
        verdict = judge(primary, guards, limits, rule=rule, look=look, seed=context.seed)
    else:
        verdict = judge(None, (), limits, rule=rule, look=1, seed=context.seed)
    sides = {"model": model_name(context.config.name, settings), "challenger": challenger, "champion": champion}
    write_json({**sides, "verdict": dataclasses.asdict(verdict)}, context.folder / "verdict.json")
    context.tracker.log_artifact(context.folder / "verdict.json", "promotion")
    context.progress(verdict.sentence)
    return StageResult(metrics=_metrics(verdict))


def model_name(preset: str, settings: PromotionConfig) -> str:
    """The registered model that the challenger is a version of."""
    return f"{preset}-{settings.challenger}"


def compared(
    champion: pd.DataFrame, challenger: pd.DataFrame, settings: PromotionConfig
) -> tuple[Paired, list[Paired]]:
    """The primary figure and the guards, from the greedy answers of both to the same problems.

    Raises:
        DataError: they did not answer the same problems, or a safety task has none.
    """
    if champion["prompt_id"].tolist() != challenger["prompt_id"].tolist():
        raise DataError("champion and challenger did not answer the same problems", fix="evaluate both anew")
    tasks = challenger["task"]
    missing = sorted(set(settings.safety_tasks) - set(tasks))
    if missing:
        raise DataError(f"no held-out problem is of the safety task {missing[0]!r}", where="promotion.safety_tasks")
    large = [str(name) for name, count in tasks.value_counts(sort=False).items() if count >= settings.min_task_problems]
    slices = dict.fromkeys(large, settings.task_margin) if tasks.nunique() > 1 else {}
    slices |= dict.fromkeys(settings.safety_tasks, settings.safety_margin)
    guards = [
        _paired(f"accuracy on {name}", champion["correct"][tasks == name], challenger["correct"][tasks == name], margin)
        for name, margin in sorted(slices.items())
    ]
    old, new = (frame["finish_reason"] == "stop" for frame in (champion, challenger))
    guards.append(_paired("answers that end", old, new, settings.finished_margin))
    length = _paired("tokens per answer", champion["num_tokens"], challenger["num_tokens"], settings.length_margin)
    guards.append(dataclasses.replace(length, higher_is_better=False))
    return _paired("accuracy", champion["correct"], challenger["correct"], 0.0), guards


def limits_of(answers: pd.DataFrame, history: list[dict[str, float]], settings: PromotionConfig) -> list[Check]:
    """The challenger's own limits, independent of the champion.

    Raises:
        ConfigError: there is a limit for the KL to the reference, which the run did not measure.
    """
    limits = [
        at_least("accuracy by itself", answers["correct"].astype(float).tolist(), settings.min_accuracy),
        at_most("share of answers cut", float((answers["finish_reason"] == "length").mean()), settings.max_truncated),
    ]
    if settings.max_kl is not None:
        if not history or "kl/ref" not in history[-1]:
            raise ConfigError(
                f"promotion.max_kl: the run {settings.challenger} measured no KL to the reference",
                fix="give it a kl.coefficient above 0, or leave max_kl out",
            )
        limits.append(at_most("KL to the reference", history[-1]["kl/ref"], settings.max_kl))
    return limits


def prompt_set(*paths: Path) -> str:
    """Digest of the prompts in files, independent of their order and of other columns. Looks are counted per digest.

    All prompts of the files count, not only those that an evaluation takes: fewer problems of a file are not new ones.
    """
    return hashlib.sha256(
        "\n".join(sorted(prompt_hashes(row for path in paths for row in read_prompts(path)))).encode()
    ).hexdigest()


def _paired(name: str, champion: pd.Series, challenger: pd.Series, margin: float) -> Paired:
    sides = [side.to_numpy(dtype=np.float64) for side in (champion, challenger)]
    return Paired(name=name, champion=sides[0], challenger=sides[1], margin=margin)


def evaluations(inputs: Mapping[str, Path], challenger: str) -> dict[str, Path]:
    """The evaluations of both sides, among the inputs of the verdict; without a champion that of the challenger."""
    folders = {"champion": "evaluate_champion", "challenger": f"evaluate_{challenger}"}
    return {side: inputs[stage] for side, stage in folders.items() if stage in inputs}


def _look(context: StageContext, data: tuple[str, ...], *, pair: str) -> int:
    home, name = find_home(), model_name(context.config.name, context.config.promotion)
    asked = prompt_set(*(context.inputs[prepared(each)] / "eval.parquet" for each in data))[:_DIGITS]
    return count_look(home, open_tracker(home), name, data=asked, pair=pair)


def _history(folder: Path) -> list[dict[str, float]]:
    path = folder / "history.json"
    history: list[dict[str, float]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return history


def _metrics(verdict: Verdict) -> dict[str, float]:
    metrics = {
        "promotion/promoted": float(verdict.promote),
        "promotion/look": float(verdict.look),
        "promotion/failed_checks": float(sum(not check.passed for check in verdict.checks)),
    }
    gain = next((check.estimate for check in verdict.checks if check.name == "accuracy"), None)
    return metrics if gain is None else metrics | {"promotion/gain": gain}
