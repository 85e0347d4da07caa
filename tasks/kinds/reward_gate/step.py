"""Gate of a new reward model: accuracy on held-out pairs, and agreement with the champion's reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlcore.errors import DataError, NonFiniteError, TrainingError
from rlcore.evaluation.intervals import effective_sample_size
from rlcore.evaluation.paired_tests import min_sample_size, noninferiority_p, score_interval
from rlcore.evaluation.promotion import Check, PromotionDecision, check_min
from rlcore.models.reward_ensemble import load_reward_model
from rlcore.models.runtime import Runtime
from rlcore.tasks.presets.sections import Sections
from rlcore.tasks.presets.settings import RetrainConfig
from rlcore.tasks.steps.base import MODEL, StageContext, StageResult, prepare_stage_name
from rlcore.tasks.steps.pair_data import margins_of, numbered, tokenize_pairs
from rlcore.tasks.steps.prompt_hashes import prompt_hashes
from rlcore.tasks.steps.rows import PairRow, read_pairs
from rlcore.tasks.steps.runtime import open_runtime
from rlcore.tasks.store.artifacts import ArtifactRef, ArtifactStore
from rlcore.tasks.store.settings import find_home
from rlcore.tasks.store.storage import read_column, write_json, write_table
from rlcore.tasks.tracking.lineage import PROMPTS, SEEN_DIGITS
from rlcore.tasks.tracking.registry import download_model, find_by_sha256
from rlcore.tasks.tracking.runs import open_tracker
from rlcore.text.tokenization import ChatTokenizer
from rlcore.training.preferences import different_sequences

Margins = NDArray[np.float64]


def run_reward_gate(
    context: StageContext, *, model: str, registered: str, previous: str, seen: tuple[str, ...]
) -> StageResult:
    """Check the reward model of the stage ``model`` against the champion's, ``previous``, on pairs outside ``seen``.

    ``previous`` and ``seen`` (its preferences) are digests of artifacts; ``previous`` is empty if no reward model of
    that name trained the champion. ``registered``: its registered name. Pairs whose prompt trained the previous model
    are left out, so that both are measured on new prompts.
    Raises:
        DataError: no held-out pair is left, or the champion's reward model is not available.
        TrainingError: a check failed. The page stays in the work folder, which the error names.
    """
    settings: RetrainConfig = context.config.retrain
    past, new = find_home().past, context.input_refs[model].sha256
    files = [context.inputs[prepare_stage_name(name)] / "eval.parquet" for name in context.config.data]
    rows = _unseen([row for file in files for row in read_pairs(file)], [past / each / PROMPTS for each in seen])
    folders = [context.inputs[model] / MODEL]
    folders += [_champions_own(registered, previous, context.work)] if previous not in ("", new) else []
    with open_runtime(context.config.hardware, seed=context.seed) as runtime:
        margins = [stored_margins(folder, rows, context.config, runtime) for folder in folders]
    checks = compared(margins, numbered([row.messages for row in rows]).tolist(), settings)
    decision = _decision(checks, settings)
    write_table(margins_table(rows, margins), context.folder / "margins.parquet")
    write_json({"is_same": previous == new, "verdict": asdict(decision)}, context.folder / "reward_gate.json")
    context.log(decision.sentence)
    if not decision.promote:
        raise TrainingError(
            f"the new reward model failed: {'; '.join(check.sentence for check in checks if not check.passed)}",
            where=str(context.work / "reward_gate.md"),
            fix="look at the pairs on the page and at the preference snapshot, or lower the bounds in [retrain]",
        )
    return StageResult(metrics=_metrics(checks), rows=len(rows))


def compared(margins: Sequence[Margins], prompts: Sequence[int], settings: RetrainConfig) -> tuple[Check, ...]:
    """Return the checks from margins ``r_chosen - r_rejected`` [P] of the new reward model, then of the previous.

    ``prompts`` [P]: a number for the prompt of each pair. Pairs of one prompt are dependent.
    Raises:
        NonFiniteError: a margin is not finite.
    """
    if lost := sum(int((~np.isfinite(each)).sum()) for each in margins):
        raise NonFiniteError(f"{lost} margins of held-out pairs are no finite numbers", where="the reward models")
    new, confidence = margins[0], settings.confidence
    right = np.heaviside(new, 0.5)
    name = "held-out accuracy"
    accuracy = check_min(name, right.tolist(), settings.min_accuracy, clusters=prompts, confidence=confidence)
    if len(margins) == 1:
        return (accuracy,)
    old = margins[1]
    same, name = (np.sign(new) == np.sign(old)).astype(float), "agreement with the previous reward model"
    agreement = check_min(name, same.tolist(), settings.min_agreement, clusters=prompts, confidence=confidence)
    return accuracy, agreement, _no_loss(right - np.heaviside(old, 0.5), prompts, settings)


def _no_loss(changes: Margins, prompts: Sequence[int], settings: RetrainConfig) -> Check:
    """Test that the loss of accuracy stays below the margin: an exact test at the level of one end of the interval.

    ``changes`` [P] in -1..1. A tie that was right counts as lost, one that was wrong as unchanged: the conservative
    side.
    """
    alpha, margin = (1.0 - settings.confidence) / 2.0, settings.accuracy_margin
    signs = np.where(changes < 0.0, -1.0, np.floor(changes))
    n = math.floor(effective_sample_size(signs, prompts) + 1e-9)  # fractional pairs are rounded conservatively
    lost = math.ceil(float((signs < 0).mean()) * n - 1e-9)
    won = min(math.floor(float((signs > 0).mean()) * n + 1e-9), n - lost)
    p_value, least = noninferiority_p(won, lost, n, margin), min_sample_size(margin, alpha)
    low, high = score_interval(won, lost, n, confidence=settings.confidence)
    passed, estimate = p_value <= alpha, (won - lost) / n
    sentence = f"accuracy changes by {estimate:+.3f}; a loss of {margin:g} or more is " + (
        "ruled out" if passed else f"not ruled out (p = {p_value:.2g} at level {alpha:.2g}, {n} independent pairs)"
    )
    return Check(
        name="accuracy over the previous reward model",
        estimate=estimate,
        low=low,
        high=high,
        p_value=p_value,
        limit=-margin,
        passed=passed,
        sentence=sentence + (f"; not enough pairs: at least {least} are needed" if n < least else ""),
    )


def margins_table(rows: Sequence[PairRow], margins: Sequence[Margins]) -> pd.DataFrame:
    """Return a row per pair, with the margin of the new reward model and, if there is one, of the previous one."""
    texts = {name: [getattr(row, name) for row in rows] for name in ("pair_id", "chosen", "rejected")}
    return pd.DataFrame({**texts, **dict(zip(("new", "previous"), margins, strict=False))})


def stored_margins(folder: Path, rows: Sequence[PairRow], config: Sections, runtime: Runtime) -> Margins:
    """Return a stored reward model's preference for the chosen answers: float64 [P], the mean over its members."""
    budget = config.stage.settings.tokens_per_microbatch
    longest = max(data.max_tokens for data in config.data.values())
    pairs = tokenize_pairs(rows, ChatTokenizer.load(folder), max_tokens=longest)
    sequences = different_sequences(pairs)
    model = load_reward_model(runtime.load_frozen(folder), folder)
    scores = model.rewards(sequences, tokens_per_microbatch=budget).mean(dim=0).double().numpy()
    return margins_of(scores, pairs)


def _champions_own(registered: str, sha256: str, work: Path) -> Path:
    store = ArtifactStore(find_home().root)
    ref = ArtifactRef(kind="reward_model", uri=f"artifacts/reward_model/{sha256}", sha256=sha256, bytes=0)
    if not store.errors(ref):
        return store.path(ref) / MODEL
    version = find_by_sha256(open_tracker(find_home()), registered, sha256)
    if version is None:
        raise DataError(
            "the champion's reward model, which the new one is compared with, is neither in this state directory nor a "
            f"version of {registered}",
            where=str(store.root / ref.uri),
            fix="restore that folder from a backup, or from the state directory that trained it",
        )
    return download_model(f"models:/{version.name}/{version.version}", work / "registry")


def _unseen(rows: Sequence[PairRow], seen: Sequence[Path]) -> list[PairRow]:
    known = {prompt for path in seen for some in read_column(path, "prompt") for prompt in some}
    left = [row for row in rows if not {each[:SEEN_DIGITS] for each in prompt_hashes([row])} & known]
    if not left:
        raise DataError(
            "every held-out pair has a prompt that the champion's reward model was trained on",
            fix="add preferences with other prompts, or a split column that keeps some prompts out of training",
        )
    return left


def _decision(checks: tuple[Check, ...], settings: RetrainConfig) -> PromotionDecision:
    failed = [check.sentence for check in checks if not check.passed]
    sentence = f"Refused: {'; '.join(failed)}." if failed else "Accepted: " + "; ".join(c.sentence for c in checks)
    return PromotionDecision(
        promote=not failed, look=0, alpha=(1.0 - settings.confidence) / 2.0, checks=checks, sentence=sentence
    )


def _metrics(checks: Sequence[Check]) -> dict[str, float]:
    names = ("retrain/rm_accuracy", "retrain/rm_agreement", "retrain/rm_gain")
    return {name: check.estimate for name, check in zip(names, checks, strict=False)}
