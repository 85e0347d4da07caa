"""PPO against GRPO at equal cost: hand-made histories with known answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlcore.tasks.drawing.head_to_head import at_equal_cost, eval_points, head_to_head_curves, head_to_head_table


def row(iteration: int, *, samples: int, seconds: float, accuracy: float | None = None) -> Mapping[str, float]:
    """An iteration that spent ``seconds`` in four equal parts, and 5 more on its evaluation, which is no cost of RL."""
    values = {"iteration": iteration, "rollouts/count": samples, "rollouts/tokens": 10 * samples, "reward/mean": 0.5}
    if iteration == 2:
        values["memory/total_bytes"] = 3 * 2**20
    values |= {f"seconds/{part}": seconds / 4 for part in ("rollout", "score", "update", "sync")}
    if accuracy is not None:
        values |= {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.1, "eval/accuracy_high": accuracy + 0.1}
        values["seconds/evaluate"] = 5.0
    return values


# slow: 4 iterations of 100 samples and 10 s, evaluated at 2 and 4; fast: 4 of 80 samples and 4 s, evaluated at each
SLOW = [row(i, samples=100, seconds=10.0, accuracy={2: 0.3, 4: 0.6}.get(i)) for i in range(1, 5)]
FAST = [row(i, samples=80, seconds=4.0, accuracy=0.1 * i) for i in range(1, 5)]


def test_costs_add_up_over_all_iterations_and_leave_evaluation_out() -> None:
    first, second = eval_points(SLOW)
    assert (first.iteration, first.samples, first.tokens, first.seconds, first.accuracy) == (2, 200, 2000, 20.0, 0.3)
    assert (second.iteration, second.samples, second.seconds) == (4, 400, 40.0)


def test_at_equal_samples_each_run_stands_where_the_smaller_budget_ends() -> None:
    # the smaller number of samples is FAST's 320: SLOW's last evaluation within it is at 200
    standing = at_equal_cost({"slow": eval_points(SLOW), "fast": eval_points(FAST)}, "samples")
    assert standing["slow"] is not None and standing["slow"].samples == 200
    assert standing["fast"] is not None and standing["fast"].samples == 320


def test_at_equal_seconds_a_run_that_was_not_evaluated_in_time_has_no_standing() -> None:
    # FAST ends after 16 s, SLOW's first evaluation comes after 20 s
    standing = at_equal_cost({"slow": eval_points(SLOW), "fast": eval_points(FAST)}, "seconds")
    assert standing["slow"] is None
    assert standing["fast"] is not None and standing["fast"].seconds == 16.0


def test_the_table_has_both_comparisons_and_a_run_alone_is_said() -> None:
    table = head_to_head_table({"GRPO": SLOW, "PPO": FAST}, confidence=0.9)
    assert "| samples | GRPO | 2 | 200 | 2000 | 20.0 | 0.500 | 0.300 | [0.200, 0.400] | 3.0 |" in table
    assert "| seconds | GRPO | – |" in table
    assert "| seconds | PPO | 4 | 320 | 3200 | 16.0 | 0.500 | 0.400 | [0.300, 0.500] | 3.0 |" in table
    assert "eval_every" in head_to_head_table({"GRPO": SLOW}, confidence=0.9)
    assert "eval_every" in head_to_head_table({"GRPO": SLOW, "PPO": []}, confidence=0.9)


def test_the_figure_is_written(tmp_path: Path) -> None:
    head_to_head_curves(
        {"GRPO": eval_points(SLOW), "PPO": eval_points(FAST)}, tmp_path / "h.png", title="t", confidence=0.9
    )
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
