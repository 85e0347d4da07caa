from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest

from rlcore.data_contracts.drift.comparison import ColumnDrift, Move
from rlcore.data_contracts.gate.report import GateReport, RuleResult
from rlcore.evaluation.conditions import Check
from rlcore.evaluation.intervals import Interval
from rlcore.evaluation.promotion import PromotionDecision
from rlcore.sampling.rejection import RejectionStats
from rlcore.tasks.kinds.compare import page as comparison
from rlcore.tasks.kinds.data import kind as data_page
from rlcore.tasks.kinds.drift import page as drift_page
from rlcore.tasks.kinds.drift.step import DatasetDrift
from rlcore.tasks.kinds.promote import page as promotion_page
from rlcore.tasks.kinds.rejection import page as rejection_page
from rlcore.tasks.kinds.reward_gate import page as reward_gate_page
from tests.markup import ATTACK, assert_is_text

CHECK = Check(name=ATTACK, estimate=0.1, low=0.0, high=0.2, p_value=0.1, limit=0.0, passed=True, sentence="")
VERDICT = PromotionDecision(promote=False, look=1, alpha=0.025, checks=(CHECK,), sentence=ATTACK)


def answers(*, correct: bool) -> pd.DataFrame:
    return pd.DataFrame([{"prompt_id": ATTACK, "correct": correct, "completion": ATTACK}])


def verdict() -> str:
    sides = {"champion": answers(correct=False), "challenger": answers(correct=True)}
    return promotion_page.render(ATTACK, VERDICT, sides, champion=ATTACK)


def compared() -> str:
    rows = comparison.changed_answers(answers(correct=False), answers(correct=True))
    empty = comparison.render(ATTACK, {"summaries": {}, "differences": {}, "opponents": []}, {}, {}, confidence=0.95)
    return f"{empty}\n\n{rows}"


def reward_gate() -> str:
    row = {"pair_id": ATTACK, "chosen": ATTACK, "rejected": ATTACK, "new": 1.0, "previous": -1.0}
    return reward_gate_page.render(VERDICT, pd.DataFrame([row]), is_same=False)


def data() -> str:
    rule = RuleResult(name="rows_differ", severity="warning", value=0.5, ok=False, detail=ATTACK)
    counts = {"lines_read": 1, "merged": 0, "rows_read": 1, "accepted": 0, "quarantined": 1, "num_train": 0}
    report = GateReport(
        contract="prompts/v1",
        source=ATTACK,
        **counts,
        num_eval=0,
        digest="",
        train_digest="",
        reasons={ATTACK: 1},
        rules=(rule,),
        sketches={},
        errors=(),
    )
    return data_page.render(report)


def rejection() -> str:
    half = Interval(mean=0.5, low=0.4, high=0.6, n=10)
    one = RejectionStats(num_prompts=10, sampled=80, verified=40, kept=20, pass_rate=half, solved=half)
    return rejection_page.render({ATTACK: one}, {}, confidence=0.95)


def drift() -> str:
    column = ColumnDrift(
        column="source", level="refuse", psi=1.0, psi_by_chance=0.1, ks=0.0, ks_by_chance=0.0, before=9, after=9,
        means=None, moves=(Move(name="<b>|_x_", before=0.0, after=1.0),),
    )  # fmt: skip
    found = DatasetDrift(name="rows", new="a", accepted="b", columns=(column,), left_out=(), lost=(), is_excused=False)
    page = drift_page.render([found])
    assert page.count(r"&lt;b&gt;\|\_x\_ 0.0% → 100.0%") == 2
    return page


@pytest.mark.parametrize(
    ("page", "count"),
    [
        (verdict, 7),  # title, version, sentence, check; of the problem its name and two answers
        (compared, 4),
        (reward_gate, 5),
        (data, 3),
        (rejection, 1),
        (drift, 0),
    ],
)
def test_what_users_and_models_wrote_is_text(page: Callable[[], str], count: int) -> None:
    assert_is_text(page(), count=count)
