r"""Answers and their scores, decided by hand before they were run by the policy of docs/rewards.md.

``rows/`` has a row a line: the kind of answer, the reference, the answer, 1 if it is right. Each kind has right answers
in other spellings beside wrong ones that look like them. ``by_value`` is for ``evaluated_only = false``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlcore.rewards.math_answer import MathOptions, MathReward
from rlcore.types import Message, Rollout
from tests.rlcore.rewards.conftest import make_rollout
from tests.rows import rows_of

Rows = list[Mapping[str, Any]]
MARKERS = (r"\boxed{{{}}}", r"So it is $\boxed{{{}}}$.", "\n#### {}")


@pytest.fixture(scope="module", params=[True, False], ids=["evaluated_only", "by_value"])
def graded(request: pytest.FixtureRequest) -> Iterator[tuple[MathReward, str]]:
    reward = MathReward(MathOptions(evaluated_only=request.param, timeout_seconds=10.0))
    yield reward, "" if request.param else "_by_value"
    reward.close()


def differing(reward: MathReward, rows: Rows, rollouts: list[Rollout]) -> list[Any]:
    scores = reward(rollouts)
    return [
        (row, score.value, score.error) for row, score in zip(rows, scores, strict=True) if score.value != row["score"]
    ]


@pytest.mark.parametrize("marker", [*MARKERS, "<answer>{}</answer>"])
def test_an_answer_after_any_marker_has_its_score(graded: tuple[MathReward, str], marker: str) -> None:
    reward, ending = graded
    rows = rows_of(__file__, f"answers{ending}")
    assert differing(reward, rows, [make_rollout(marker.format(row["answer"]), row["reference"]) for row in rows]) == []


def test_an_answer_in_running_text_has_its_score(graded: tuple[MathReward, str]) -> None:
    reward, ending = graded
    rows = rows_of(__file__, f"texts{ending}")
    assert differing(reward, rows, [make_rollout(row["answer"], row["reference"]) for row in rows]) == []


@pytest.mark.parametrize("graded", [True], indirect=True)
def test_an_answer_that_repeats_the_problem_or_leaves_the_work_is_wrong(
    graded: tuple[MathReward, str],
    record_property: Callable[[str, object], None],
) -> None:
    rows = rows_of(__file__, "problems")
    record_property("hostile", sum(not row["score"] for row in rows))
    record_property("sound", sum(row["score"] for row in rows))
    rollouts = [make_rollout(rf"It is \boxed{{{row['answer']}}}.", row["reference"]) for row in rows]
    asked = [
        replace(one, prompt=replace(one.prompt, messages=(Message(role="user", content=row["problem"]),)))
        for one, row in zip(rollouts, rows, strict=True)
    ]
    assert differing(graded[0], rows, asked) == []
