"""The audit's budget: what an audited iteration costs is known before the next one."""

from __future__ import annotations

from rlcore.checks.audit.audit import TimeBudget


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def audited_iterations(cost: float, *, max_fraction: float, count: int = 200) -> tuple[list[int], float]:
    """Return the audited ones of ``count`` iterations of 10 s, and the fraction of audits of ``cost`` seconds."""
    clock = Clock()
    budget, audited = TimeBudget(max_fraction, clock), list[int]()
    for iteration in range(1, count + 1):
        clock.now += 10.0
        budget.begin()
        if not audited or budget.has_room():
            with budget.counted():
                clock.now += cost
            budget.end()
            audited.append(iteration)
    return audited, budget.fraction


def test_an_audit_waits_until_its_cost_fits() -> None:
    """2 s of 10 s: the second fits when 4 s are 2 % of the time, 200 s, of which 2 s are the second's own."""
    audited, fraction = audited_iterations(2.0, max_fraction=0.02)
    assert audited[:2] == [1, 20]
    assert 0.018 < fraction <= 0.02


def test_no_fraction_audits_only_the_first_iteration_and_all_of_the_time_audits_each() -> None:
    assert audited_iterations(2.0, max_fraction=0.0, count=20)[0] == [1]
    assert audited_iterations(50.0, max_fraction=1.0, count=20)[0] == list(range(1, 21))


def test_a_check_that_fails_is_counted() -> None:
    clock = Clock()
    budget = TimeBudget(0.02, clock)
    try:
        with budget.counted():
            clock.now += 3.0
            raise ValueError
    except ValueError:
        pass
    assert budget.seconds == 3.0
