"""The factor of a loss in float16: halved by an overflow, doubled after many steps without one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.hardware.precision import set_compute_dtype
from rlcore.training.loss_scale import GROWTH_INTERVAL, LARGEST, LossScale
from tests import strategies

CLEAN_RUN = [True] * GROWTH_INTERVAL


def after(scale: LossScale, *steps: bool) -> LossScale:
    """The scale after steps that were clean (True) or overflowed."""
    for is_clean in steps:
        scale = scale.after_step() if is_clean else scale.after_overflow()
    return scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_need_none(dtype: torch.dtype) -> None:
    scale = LossScale.of(set_compute_dtype(strategies.tiny_llama(), dtype))
    assert scale == LossScale(1.0, 0, adapts=False)
    assert after(scale, *CLEAN_RUN, *CLEAN_RUN) == scale
    assert not scale.can_shrink


def test_one_model_in_float16_is_enough() -> None:
    models = strategies.tiny_llama(), set_compute_dtype(strategies.tiny_llama(), torch.float16)
    assert LossScale.of(*models) == LossScale(2.0**15, 0, adapts=True)


def test_it_doubles_after_a_run_of_clean_steps_and_an_overflow_breaks_the_run() -> None:
    start = LossScale(8.0, 0, adapts=True)
    assert after(start, *CLEAN_RUN[1:]).value == 8.0
    assert after(start, *CLEAN_RUN) == LossScale(16.0, 0, adapts=True)
    assert after(start, *CLEAN_RUN[1:], False, *CLEAN_RUN[1:]) == LossScale(4.0, GROWTH_INTERVAL - 1, adapts=True)


def test_it_has_an_end_on_both_sides() -> None:
    assert after(LossScale(LARGEST, 0, adapts=True), *CLEAN_RUN).value == LARGEST
    assert LossScale(2.0, 0, adapts=True).can_shrink
    assert not LossScale(1.0, 0, adapts=True).can_shrink


@given(steps=st.lists(st.booleans(), max_size=30), exponent=st.integers(0, 24))
def test_it_is_always_a_power_of_two(steps: list[bool], exponent: int) -> None:
    scale = LossScale(2.0**exponent, GROWTH_INTERVAL - 3, adapts=True)
    for is_clean in steps:
        scale = scale.after_step() if is_clean or not scale.can_shrink else scale.after_overflow()
        assert scale.value.hex().startswith("0x1.0000000000000p")
        assert 1.0 <= scale.value <= LARGEST
