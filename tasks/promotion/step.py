"""Champion from the registry, and the decision on a challenger."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlcore.errors import ConfigError, DataError
from rlcore.evaluation.promotion import (
    Check,
    PairedMetric,
    PromotionDecision,
    PromotionRule,
    check_max,
    check_min,
    decide,
)
from rlcore.strict_config import to_dict
from rlcore.tasks.kinds.base.step import import_registered
from rlcore.tasks.presets.settings import NO_ACCURACY, PromotionConfig
from rlcore.tasks.promotion.kind import CHALLENGER_ASKED, CHAMPION_ASKED, WINS, model_name
from rlcore.tasks.steps.base import RECORDS, StageContext, StageResult, prepare_stage_name
from rlcore.tasks.steps.prompt_hashes import prompt_hashes
from rlcore.tasks.steps.rows import read_prompts
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.store.storage import read_json, read_table, write_json
from rlcore.tasks.tracking.registry import count_look
from rlcore.tasks.tracking.runs import open_tracker

Values = NDArray[np.float64]
_DIGITS = 16  # characters of digests that identify a look
_PRIMARY = ("accuracy", "win rate")


def run_champion(context: StageContext, *, uri: str, sha256: str) -> StageResult:
    """Import the champion's files from the registry, verified like every external checkpoint.

    ``sha256``: in the record, by which a lineage finds its origin.
    """
    return import_registered(context, uri)


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
    path = context.inputs[challenger] / "history.json"
    limits = limits_of(answers["challenger"], read_json(path) if path.is_file() else [], settings)
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


def _metrics(decision: PromotionDecision) -> dict[str, float]:
    metrics = {
        "promotion/promoted": float(decision.promote),
        "promotion/look": float(decision.look),
        "promotion/failed_checks": float(sum(not check.passed for check in decision.checks)),
    }
    gain = next((check.estimate for check in decision.checks if check.name in _PRIMARY), None)
    return metrics if gain is None else metrics | {"promotion/gain": gain}


def greedy_rows(folder: Path) -> pd.DataFrame:
    """Return a checkpoint's greedy answers to all held-out problems, in the order of the problems.

    Raises:
        DataError: there are none.
    """
    table = read_table(folder / "answers.parquet")
    found = table[table["mode"] == "greedy"].sort_values("prompt_id").reset_index(drop=True)
    if found.empty:
        raise DataError(
            "the evaluation has no answers to compare",
            where=str(folder),
            fix="evaluate on data with held-out prompts (num_eval)",
        )
    return found


def in_favour(answers: pd.DataFrame) -> pd.DataFrame:
    """Return the champion's answers, with failed ones counted as right and finished.

    Failures of engine or grader count as wrong for the challenger. If they did so for the champion, a broken evaluation
    of the champion would promote any challenger.
    """
    is_lost = answers["is_graded"] & answers["value"].isna()
    return answers.assign(
        correct=answers["correct"] | is_lost, finish_reason=answers["finish_reason"].mask(is_lost, "stop")
    )


def require_tasks(answers: pd.DataFrame, settings: PromotionConfig) -> None:
    """Check that each safety task has held-out problems that are graded.

    Raises:
        DataError: a task has none, so that no guard covers it.
    """
    if missing := sorted(set(settings.safety_tasks) - set(_graded(answers)["task"])):
        raise DataError(f"no held-out problem is of the safety task {missing[0]!r}", where="promotion.safety_tasks")


def compared(
    champion: pd.DataFrame, challenger: pd.DataFrame, settings: PromotionConfig
) -> tuple[PairedMetric, list[PairedMetric]]:
    """Return accuracy and guards from both sides' greedy answers to the problems that are graded.

    Raises:
        DataError: they did not answer the same problems.
    """
    _same_problems(champion, challenger)
    old, new = _graded(in_favour(champion)), _graded(challenger)
    return _paired("accuracy", old["correct"], new["correct"], 0.0), [
        *_task_guards(old, new, settings),
        *_style_guards(old, new, settings),
    ]


def wins_of(table: pd.DataFrame) -> Values:
    """Return the challenger's preference by prompt [N] from a table of judged pairs: 1 won, 0 lost, ½ a tie.

    An unjudged pair counts as lost, so that answers on which the judge fails gain nothing.
    """
    both = (table["forward"] + table["backward"]).to_numpy(dtype=np.float64) / 2.0
    return np.where(np.isfinite(both), both, 0.0)


def compared_by_wins(
    wins: Values, champion: pd.DataFrame, challenger: pd.DataFrame, settings: PromotionConfig
) -> tuple[PairedMetric, list[PairedMetric]]:
    """Return the win rate by prompt against ½, with accuracy as a guard if enough are graded.

    Raises:
        DataError: as :func:`compared`.
    """
    _same_problems(champion, challenger)
    primary = PairedMetric(name="win rate", champion=np.full(len(wins), 0.5), challenger=wins)
    champion = in_favour(champion)
    old, new = _graded(champion), _graded(challenger)
    guards = _task_guards(old, new, settings)
    if len(new) >= settings.min_task_problems:
        guards.append(_paired("accuracy on all tasks", old["correct"], new["correct"], settings.task_margin))
    return primary, [*guards, *_style_guards(champion, challenger, settings)]


def asked_both(champion: pd.DataFrame, challenger: pd.DataFrame, *, margin: float) -> list[PairedMetric]:
    """Return a guard for each task and metric of a benchmark, from the records of both sides.

    Raises:
        DataError: they were not evaluated on the same documents, or on none.
    """
    if challenger.empty:
        raise DataError("a benchmark of the promotion has no records", where="promotion.benchmarks", fix="rerun it")
    keys = ["task", "metric", "doc_id"]
    old, new = (table.sort_values(keys).reset_index(drop=True) for table in (champion, challenger))
    if not old[[*keys, "doc_sha256"]].equals(new[[*keys, "doc_sha256"]]):
        raise DataError("champion and challenger have different documents of a benchmark", fix="rerun it for both")
    names = new["task"] + ", " + new["metric"]
    return [_paired(name, old["value"][names == name], new["value"][names == name], margin) for name in names.unique()]


def comparison_digest(primary: PairedMetric, guards: Sequence[PairedMetric], settings: PromotionConfig) -> str:
    """Return a digest of the metrics and limits of a decision."""
    figures = [
        [each.name, each.margin, each.champion.tolist(), each.challenger.tolist()] for each in (primary, *guards)
    ]
    return hashlib.sha256(json.dumps([figures, to_dict(settings)]).encode()).hexdigest()


def judge_check(distrust: Sequence[str]) -> Check:
    """Return the condition that a deciding judge has passed its audit. ``distrust``: the reason why not."""
    sentence = f"the judge is not trusted: {'; '.join(distrust)}" if distrust else "the judge has passed its audit"
    return dataclasses.replace(check_max("reasons to distrust the judge", float(len(distrust)), 0.0), sentence=sentence)


def limits_of(answers: pd.DataFrame, history: list[dict[str, float]], settings: PromotionConfig) -> list[Check]:
    """Return the challenger's own limits. Accuracy has one if problems are graded.

    Raises:
        ConfigError: there is a limit on a metric that was not measured: accuracy, or KL to the reference policy.
    """
    correct = _graded(answers)["correct"].astype(float).tolist()
    if settings.own.min_accuracy and not correct:
        raise ConfigError(
            "promotion.min_accuracy: no held-out prompt has the reference that its verifier needs",
            fix="leave min_accuracy out, evaluate on data with references, or name another verifier",
        )
    limits = [check_min("accuracy by itself", correct, settings.own.min_accuracy)] if correct else []
    cut = float((answers["finish_reason"] == "length").mean())
    limits.append(check_max("answers truncated", cut, settings.own.max_truncated))
    if settings.own.max_ref_kl is not None:
        # An update whose steps were all skipped has no KL, and did not change the policy.
        kl = next((row["kl/ref"] for row in reversed(history) if "kl/ref" in row), None)
        if kl is None:
            raise ConfigError(
                f"promotion.max_ref_kl: the run {settings.challenger} measured no KL to the reference",
                fix="give it a kl.coefficient above 0, or leave max_kl out",
            )
        limits.append(check_max("KL to the reference", kl, settings.own.max_ref_kl))
    return limits


def _same_problems(champion: pd.DataFrame, challenger: pd.DataFrame) -> None:
    if champion["prompt_id"].tolist() != challenger["prompt_id"].tolist():
        raise DataError("champion and challenger did not answer the same problems", fix="evaluate both again")


def _graded(answers: pd.DataFrame) -> pd.DataFrame:
    return answers[answers["is_graded"]].reset_index(drop=True)


def _task_guards(champion: pd.DataFrame, challenger: pd.DataFrame, settings: PromotionConfig) -> list[PairedMetric]:
    tasks = challenger["task"]
    large = [str(name) for name, count in tasks.value_counts(sort=False).items() if count >= settings.min_task_problems]
    slices = dict.fromkeys(large, settings.task_margin) if tasks.nunique() > 1 else {}
    slices |= dict.fromkeys(settings.safety_tasks, settings.safety_margin)
    return [
        _paired(f"accuracy on {name}", champion["correct"][tasks == name], challenger["correct"][tasks == name], margin)
        for name, margin in sorted(slices.items())
    ]


def _style_guards(champion: pd.DataFrame, challenger: pd.DataFrame, settings: PromotionConfig) -> list[PairedMetric]:
    old, new = (frame["finish_reason"] == "stop" for frame in (champion, challenger))
    ends = _paired("answers that end", old, new, settings.finished_margin)
    length = _paired("tokens per answer", champion["num_tokens"], challenger["num_tokens"], settings.length_margin)
    return [ends, dataclasses.replace(length, higher_is_better=False)]


def _paired(name: str, champion: pd.Series, challenger: pd.Series, margin: float) -> PairedMetric:
    sides = [side.to_numpy(dtype=np.float64) for side in (champion, challenger)]
    return PairedMetric(name=name, champion=sides[0], challenger=sides[1], margin=margin)
