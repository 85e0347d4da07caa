"""The challenger against the champion: the verdict as a stage, and what follows from it in the registry."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from rlcore.checks import Check, at_least, at_most
from rlcore.config import ModelConfig, PromotionConfig, RunConfig
from rlcore.errors import ConfigError, DataError, PromotionError
from rlcore.models.loading import import_model
from rlcore.promotion import Paired, Rule, Verdict, judge
from tasks.home.artifacts import ArtifactRef, ArtifactStore
from tasks.home.settings import Home, find_home
from tasks.home.storage import read_json, write_json
from tasks.pipeline.events import tell_of_refusal
from tasks.pipeline.stages import MODEL, StageContext, StageResult
from tasks.report.promotion_page import render
from tasks.steps.compare import greedy_answers
from tasks.steps.data import prompt_hashes, read_prompts
from tasks.tracking import registry
from tasks.tracking.registry import CHALLENGER, CHAMPION, ModelVersion, download_model
from tasks.tracking.runs import open_tracker

_DIGITS = 16  # of the digests that name a look


def registered_name(config: RunConfig) -> str:
    """The registered model that the challenger's stage adds versions to."""
    return f"{config.name}-{config.section('promotion', PromotionConfig).challenger}"


def current_champion(home: Home, config: RunConfig) -> ModelVersion | None:
    """The champion that the challenger is judged against, or None before the first promotion."""
    return registry.find_version(open_tracker(home), registered_name(config), CHAMPION)


def run_champion(context: StageContext, *, uri: str, model_id: str) -> StageResult:
    """The champion's files from the registry, verified like every checkpoint that comes from outside."""
    folder = download_model(uri, context.work / "registry")
    card = import_model(ModelConfig(source="folder", path=str(folder)), context.folder / MODEL, seed=context.seed)
    return StageResult(metrics={"model/parameters": float(card.num_parameters)}, model_id=model_id)


def run_promote(context: StageContext, *, challenger: str, champion: str, champion_sha256: str) -> StageResult:
    """Judge the checkpoint of the stage ``challenger``; ``champion`` is a version and its digest, empty without one.

    The registry counts the looks at the held-out prompts: a pair that was judged before keeps its number.
    """
    settings = context.config.section("promotion", PromotionConfig)
    ref = context.input_refs[challenger]
    answers = {name: greedy_answers(folder) for name, folder in _evaluations(context, challenger).items()}
    limits = limits_of(answers["challenger"], _history(context.inputs[challenger]), settings)
    rule = Rule(alpha=settings.alpha, min_gain=settings.min_gain)
    if ref.sha256 == champion_sha256:
        verdict = Verdict(
            promote=False, look=0, alpha=0.0, checks=(), sentence="The challenger is the champion already."
        )
    elif champion:
        look = _look(context, pair=f"{ref.sha256[:_DIGITS]}-{champion_sha256[:_DIGITS]}")
        primary, guards = compared(answers["champion"], answers["challenger"], settings)
        verdict = judge(primary, guards, limits, rule=rule, look=look, seed=context.seed)
    else:
        verdict = judge(None, (), limits, rule=rule, look=1, seed=context.seed)
    page = render(registered_name(context.config), verdict, answers, champion=champion)
    (context.folder / "verdict.md").write_text(page, encoding="utf-8")
    write_json(dataclasses.asdict(verdict), context.folder / "verdict.json")
    for file in ("verdict.md", "verdict.json"):
        context.tracker.log_artifact(context.folder / file, "promotion")
    context.progress(verdict.sentence)
    return StageResult(metrics=_metrics(verdict), summary=page)


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
    """What the challenger must meet by itself, whoever the champion is.

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


def prompt_set(path: Path) -> str:
    """Digest of a file's prompts, whatever their order and whatever else the file says: looks count per set of prompts.

    The whole file counts and not what an evaluation takes of it: fewer problems of one file are no fresh ones.
    """
    return hashlib.sha256("\n".join(sorted(prompt_hashes(read_prompts(path)))).encode()).hexdigest()


def settle(home: Home, config: RunConfig, refs: Mapping[str, ArtifactRef], *, over: ModelVersion | None) -> str:
    """Do in the registry what the verdict says, and tell in a sentence; a repeated call changes nothing.

    Raises:
        PromotionError: the champion is no longer the one that was judged against, or the version was rolled back.
    """
    name, challenger = registered_name(config), config.section("promotion", PromotionConfig).challenger
    tracker = open_tracker(home)
    version = registry.find_by_model_id(tracker, name, refs[challenger].model_id)
    if version is None:
        raise PromotionError("the challenger is no longer in the registry", where=f"registered model {name}")
    verdict = read_json(ArtifactStore(home.root).path(refs["promote"]) / "verdict.json")
    if verdict["look"] == 0:
        return f"{name}: {verdict['sentence']}"
    is_new = registry.read_tags(tracker, version).get("verdict_artifact") != refs["promote"].sha256
    registry.set_tags(
        tracker,
        version,
        {
            "verdict": verdict["sentence"][:5000],
            "verdict_artifact": refs["promote"].sha256,
            "judged_over": str(over.version) if over else "none",
        },
    )
    if verdict["promote"]:
        registry.promote(home, tracker, version, over=over)
    else:
        registry.set_alias(tracker, version, CHALLENGER)
        if is_new:
            tell_of_refusal(name, version.version, verdict["sentence"])
    return f"{name} version {version.version}: {verdict['sentence']}"


def _paired(name: str, champion: pd.Series, challenger: pd.Series, margin: float) -> Paired:
    sides = [side.to_numpy(dtype=np.float64) for side in (champion, challenger)]
    return Paired(name=name, champion=sides[0], challenger=sides[1], margin=margin)


def _evaluations(context: StageContext, challenger: str) -> dict[str, Path]:
    folders = {"champion": "evaluate_champion", "challenger": f"evaluate_{challenger}"}
    return {side: context.inputs[stage] for side, stage in folders.items() if stage in context.inputs}


def _look(context: StageContext, *, pair: str) -> int:
    home = find_home()
    data = prompt_set(context.inputs["prepare_prompts"] / "eval.parquet")[:_DIGITS]
    return registry.count_look(home, open_tracker(home), registered_name(context.config), data=data, pair=pair)


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
