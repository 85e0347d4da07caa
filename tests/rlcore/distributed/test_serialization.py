from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.distributed.serialization import decode, encode
from rlcore.hardware.memory import Footprint
from rlcore.training.scoring_models import ForwardScores
from rlcore.training.update_stats import UpdateStats
from rlcore.types import ToolCall
from tests import strategies

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    (found, other) = decode(encode([sent, torch.ones(2)]))
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert torch.equal(found, sent)
    assert torch.equal(other, torch.ones(2))


def test_what_is_not_a_number_arrives_too() -> None:
    found = decode(encode([math.inf, -math.inf, math.nan]))
    assert found[:2] == (math.inf, -math.inf)
    assert math.isnan(found[2])


def test_our_records_arrive_as_what_they_were() -> None:
    call = ToolCall(text="<t>", tool="calculator", output="7 \N{SNOWMAN}", is_error=False)
    rollout = dataclasses.replace(strategies.scored_rollout(1.0).rollout, tool_calls=(call,))
    stats = UpdateStats(policy_version=3, moved=True, metrics={"loss/policy": 0.1})
    held = Footprint(weights=1, gradients=2, optimizer=3, activations=4, kv_cache=5)
    episode = dataclasses.replace(rollout, branches=(dataclasses.replace(rollout, fork="another history"),))
    sent = (rollout, episode, stats, held, Path("/a/b"))
    assert decode(encode(sent)) == sent


def test_samples_and_passes_arrive_with_every_tensor() -> None:
    samples = strategies.random_samples(0)
    values = [sample.values for sample in samples]
    sent = ForwardScores(old=values, ref=values, values=values, next_values=torch.ones(len(samples)))
    found_samples, passes = decode(encode((samples, sent)))
    for ours, theirs in zip(samples, found_samples, strict=True):
        for field in dataclasses.fields(ours):
            one, other = getattr(ours, field.name), getattr(theirs, field.name)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert all(torch.equal(one, other) for one, other in zip(values, passes.old, strict=True))


def test_any_other_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be sent between processes"):
        encode({"a": [object()]})
