"""Reward of procedural tasks by the scorer of the reasoning-gym generator that made the problem."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rlcore.config import Duration, PositiveInt
from rlcore.errors import ConfigError
from rlcore.extras import install_command
from rlcore.rewards.answers import clean, find_answer
from rlcore.rewards.base import failed_score, score_all, scored
from rlcore.rewards.grader_pool import GraderPool
from rlcore.types import CORRECT_FROM, Rollout, Score

MAX_ANSWER_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True)
class ProceduralOptions:
    """Options of the reward ``procedural``. ``last_number``: accept the last number of a finished completion."""

    last_number: bool = True
    timeout_seconds: Duration = 5.0  # the first answer of a task also creates its scorer, up to 0.5 s
    num_workers: PositiveInt = 2


class ProceduralReward:
    """1.0 for an answer with a score of at least 0.99, else 0.0, because scorers give partial credit for form.

    ``rollout.prompt.reference`` is JSON, ``{"dataset": "chain_sum", "entry": {"question": …, "answer": …, "metadata":
    {…}}}``. Some scorers need more than JSON can represent (``arc_agi``, ``rearc``); the reward canary detects them
    before the first rollout.
    """

    name = "procedural"

    def __init__(self, options: ProceduralOptions | None = None, *, prefill: str = "") -> None:
        if find_spec("reasoning_gym") is None:
            raise ConfigError(
                "the reward procedural needs reasoning-gym, which is not installed", fix=install_command("pipeline")
            )
        self._options, self._prefill = options or ProceduralOptions(), prefill
        self._pool = GraderPool(
            "procedural", timeout_seconds=self._options.timeout_seconds, num_workers=self._options.num_workers
        )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return score_all([self._prepare(rollout) for rollout in rollouts], self._pool, self._score)

    def close(self) -> None:
        self._pool.close()

    def _prepare(self, rollout: Rollout) -> Score | dict[str, Any]:
        try:
            problem = json.loads(rollout.prompt.reference)
            request = {"dataset": problem["dataset"], "entry": problem["entry"]}
        except (ValueError, KeyError, TypeError) as error:
            return failed_score(f"the reference is not a procedural problem: {type(error).__name__}: {error}")
        answer = find_answer(rollout, last_number_counts=self._options.last_number, prefill=self._prefill)
        if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
            return scored(self.name, 0.0)
        # As written and without delimiters: a final full stop is noise after a number and text in a sentence.
        return request | {"answers": list(dict.fromkeys((answer, clean(answer))))}

    def _score(self, value: Any) -> Score:
        return scored(self.name, float(value >= CORRECT_FROM))
