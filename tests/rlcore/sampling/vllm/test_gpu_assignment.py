from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import EngineConfig, GpuConfig
from rlcore.errors import ConfigError
from rlcore.sampling.vllm.gpu_assignment import (
    VisibleGpus,
    assign_gpus,
    memory_fractions,
    shares_trainer_gpu,
    visible_gpus,
)


def vllm(**settings: Any) -> EngineConfig:
    """Replicas and URLs are the engine's; all else is of its GPUs."""
    own = {name: settings.pop(name) for name in ("replicas", "urls") if name in settings}
    return EngineConfig(kind="vllm", gpus=GpuConfig(**settings), **own)


def cards(count: int, trainer: int | None = 0, **settings: Any) -> VisibleGpus:
    return VisibleGpus(count=count, trainer=trainer, **settings)


@pytest.mark.parametrize(
    ("settings", "seen", "expected"),
    [
        ({"replicas": 7}, cards(8), [(n,) for n in range(1, 8)]),
        ({"replicas": 2}, cards(4, trainer=1), [(0,), (2,)]),
        ({"replicas": 3, "tensor_parallel": 2}, cards(8), [(1, 2), (3, 4), (5, 6)]),
        ({"replicas": 2, "tensor_parallel": 2, "devices": (7, 6, 3, 1)}, cards(8), [(7, 6), (3, 1)]),
        ({"replicas": 2, "devices": (1, 1)}, cards(2), [(1,), (1,)]),
        ({}, cards(1), [(0,)]),  # the only one is shared with the trainer
        ({"replicas": 2}, cards(1), [(0,), (0,)]),
        ({"replicas": 2}, cards(2, trainer=None), [(0,), (1,)]),  # it trains on the processor
        ({"replicas": 2, "tensor_parallel": 2}, cards(0, trainer=None), [(), ()]),
    ],
)
def test_gpus_are_dealt_in_order_beside_the_trainers_or_as_named(
    settings: dict[str, Any], seen: VisibleGpus, expected: list[tuple[int, ...]]
) -> None:
    assert assign_gpus(vllm(**settings), seen) == expected


@pytest.mark.parametrize(
    ("settings", "seen", "message"),
    [
        ({"replicas": 8}, cards(8), "8 replicas of 1 GPUs need 8, 7 are visible besides the trainer's"),
        ({"tensor_parallel": 2}, cards(1), "1 replicas of 2 GPUs need 2, 0 are visible besides the trainer's"),
        ({"tensor_parallel": 2}, cards(1, trainer=None), r"need 2, 1 are visible\n"),
        ({"devices": (2,)}, cards(2), "devices names GPU 2, the visible ones are 0 to 1"),
        ({"devices": (0,)}, cards(0, trainer=None), "devices names GPUs, but none is visible"),
        ({"devices": (1, 1), "tensor_parallel": 2}, cards(2), "has GPU 1 twice"),
    ],
)
def test_gpus_that_are_not_there_are_refused_before_anything_starts(
    settings: dict[str, Any], seen: VisibleGpus, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_gpus(vllm(**settings), seen)


@given(replicas=st.integers(1, 9), width=st.integers(1, 4), count=st.integers(1, 16), trainer=st.integers(0, 15))
def test_no_gpu_is_dealt_twice_and_none_is_the_trainers_where_there_are_several(
    replicas: int, width: int, count: int, trainer: int
) -> None:
    seen = cards(count, trainer=trainer % count)
    try:
        dealt = assign_gpus(vllm(replicas=replicas, tensor_parallel=width), seen)
    except ConfigError:
        assert replicas * width > count - 1 and (count > 1 or width > 1)
        return
    if count > 1:
        flat = [index for each in dealt for index in each]
        assert len(set(flat)) == len(flat) == replicas * width
        assert seen.trainer not in flat
        assert memory_fractions(vllm(), dealt, seen) == [0.85] * replicas
    assert {len(each) for each in dealt} == {width}


@pytest.mark.parametrize(
    ("dealt", "seen", "expected"),
    [
        ([(1,), (2,)], cards(3), [0.85, 0.85]),
        ([(1,), (1,)], cards(2), [0.425, 0.425]),
        ([(0,)], cards(1, learns=True), [0.4]),
        ([(0,), (0,)], cards(1, learns=True), [0.2, 0.2]),
        ([(0,)], cards(1, learns=True, free=0.2), [0.17]),  # a large model is on it
        ([(0,)], cards(1, free=0.8), [0.68]),  # nothing learns: what is free
        ([(0, 1)], cards(2, learns=True), [0.4]),  # the smaller share of the two
        ([()], cards(0, trainer=None), [0.85]),
    ],
)
def test_memory_is_shared_by_who_is_on_a_gpu_and_beside_a_learner_it_is_less(
    dealt: list[tuple[int, ...]], seen: VisibleGpus, expected: list[float]
) -> None:
    assert memory_fractions(vllm(), dealt, seen) == pytest.approx(expected)


def test_fractions_that_add_up_to_more_than_there_is_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 replicas want 1\.20 of GPU 1, of which 1\.00 is free"):
        memory_fractions(vllm(gpu_memory_utilization=0.6), [(1,), (1,)], cards(2))
    with pytest.raises(ConfigError, match=r"1 replicas want 0\.90 of the trainer's GPU, of which 0\.70 is free"):
        memory_fractions(vllm(gpu_memory_utilization=0.9), [(0,)], cards(1, free=0.7))
    assert memory_fractions(vllm(gpu_memory_utilization=0.5), [(1,), (1,)], cards(2)) == [0.5, 0.5]


def test_who_shares_the_trainers_gpu_is_known() -> None:
    assert shares_trainer_gpu([(0, 1), (2, 3)], cards(4)) == [True, False]
    assert shares_trainer_gpu([()], cards(0, trainer=None)) == [False]


def test_a_trainer_on_the_processor_has_no_gpu() -> None:
    assert visible_gpus(torch.device("cpu"), learns=True).trainer is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": (0, 1)}, "devices has 2 GPUs, 1 replicas of 1 need 1"),
        ({"devices": (0,), "replicas": 2}, "devices has 1 GPUs, 2 replicas of 1 need 2"),
        ({"devices": (0,), "urls": ("http://a:1",)}, "set one or the other"),
        ({"tensor_parallel": 2, "urls": ("http://a:1",)}, "set one or the other"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm(**settings)
