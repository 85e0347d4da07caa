"""Figures: written as PNG, also where a run has no critic or no reference."""

from __future__ import annotations

from pathlib import Path

from rlcore.tasks.drawing import plots
from rlcore.tasks.drawing.over_optimisation import points

PNG = b"\x89PNG\r\n\x1a\n"
ROW = {
    "iteration": 1,
    "reward/mean": 0.5,
    "reward/std": 0.2,
    "eval/accuracy": 0.4,
    "eval/accuracy_low": 0.3,
    "eval/accuracy_high": 0.5,
    "completion/length": 9.0,
    "clip/fraction": 0.1,
    "entropy": 0.7,
    "gradient_norm": 1.0,
}


def test_curves_of_a_run_without_critic_and_reference_are_drawn_and_say_what_is_missing(tmp_path: Path) -> None:
    with_all = tmp_path / "all.png"
    without = tmp_path / "without.png"
    plots.training_curves(
        [ROW | {"kl/ref": 0.1, "value/explained_variance": 0.3}], with_all, title="ppo", confidence=0.95
    )
    plots.training_curves([ROW], without, title="grpo", confidence=0.95)
    assert with_all.read_bytes().startswith(PNG)
    assert without.read_bytes().startswith(PNG)
    assert with_all.read_bytes() != without.read_bytes()


def test_the_same_history_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        plots.loss_curve([ROW], "reward/mean", tmp_path / name, title="same")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_paid_reward_and_held_out_figure_are_drawn_against_the_distance(tmp_path: Path) -> None:
    found = points([ROW | {"iteration": step, "kl/ref": 0.1 * step} for step in (1, 2)])
    plots.paid_and_held_out(found, tmp_path / "paid.png", title="grpo")
    assert (tmp_path / "paid.png").read_bytes().startswith(PNG)


def test_bars_and_comparison_are_drawn(tmp_path: Path) -> None:
    plots.accuracy_bars({"SFT": (0.3, 0.2, 0.4), "GRPO": (1.0, 0.9, 1.0)}, tmp_path / "bars.png", title="t")
    plots.comparison_curves({"GRPO": [ROW], "PPO": [ROW]}, tmp_path / "curves.png", title="t")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("bars.png", "curves.png"))
