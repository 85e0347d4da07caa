"""One, two and four ranks take the same steps, in every case there is: `make test-services`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.hardware.sharded import ONE
from tests.rank_learners import (
    ADAPTERS,
    CASES,
    Held,
    assert_equal_runs,
    assert_equal_states,
    experience_of,
    gradient,
    loads,
    saves,
    two_updates,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.scale


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("held", ["full", "replicate"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_ranks_take_the_steps_of_one_process(name: str, held: Held, size: int, tmp_path: Path) -> None:
    found = on_ranks(size, two_updates(CASES[name], held), tmp_path)
    assert_equal_runs(found, two_updates(CASES[name])(ONE))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "ppo, head"])
def test_in_float32_the_gradient_is_that_of_one_process_but_for_its_rounding(
    name: str, size: int, tmp_path: Path
) -> None:
    expected = gradient(CASES[name])(ONE)
    for found in on_ranks(size, gradient(CASES[name]), tmp_path):
        assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_adapters_on_a_base_that_every_rank_has_take_the_steps_of_one_process(
    name: str, size: int, tmp_path: Path
) -> None:
    found = on_ranks(size, two_updates(ADAPTERS[name], "replicate"), tmp_path)
    assert_equal_runs(found, two_updates(ADAPTERS[name])(ONE))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("in_reward", [True, False])
@pytest.mark.parametrize("name", ["grpo", "ppo", "ppo, head"])
def test_passes_that_ranks_share_give_the_samples_of_one_process(
    name: str, in_reward: bool, size: int, tmp_path: Path
) -> None:
    expected = experience_of(CASES[name], in_reward=in_reward)(ONE)
    for found in on_ranks(size, experience_of(CASES[name], in_reward=in_reward), tmp_path):
        for ours, theirs in zip(expected, found, strict=True):
            for field in ("old_logprobs", "ref_logprobs", "values", "returns", "advantages"):
                # Passes come back in float32.
                torch.testing.assert_close(getattr(theirs, field), getattr(ours, field), rtol=1e-6, atol=1e-6)


def test_the_early_stop_is_met_and_the_case_of_few_prompts_leaves_ranks_without_work() -> None:
    """Otherwise the laws above would hold of runs that never came there."""
    metrics, _ = two_updates(CASES["grpo, stopped early"])(ONE)
    assert metrics[0]["update/epochs"] < 3.0
    assert CASES["grpo, more ranks than prompts"].shape["group_size"] < 4


@pytest.mark.parametrize(("writes", "reads"), [(2, 1), (2, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("name", ["grpo", "ppo", "ppo, head", "grpo, untied head"])
def test_a_checkpoint_is_loaded_by_any_number_of_ranks(name: str, writes: int, reads: int, tmp_path: Path) -> None:
    expected = on_ranks(writes, saves(CASES[name], tmp_path / "c"), tmp_path)[0]
    work = loads(CASES[name], tmp_path / "c")
    found = on_ranks(reads, work, tmp_path) if reads > 1 else [work(ONE)]
    assert_equal_states(found, expected)


@pytest.mark.parametrize("name", ["grpo", "ppo, head"])
def test_as_many_ranks_as_wrote_a_checkpoint_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    expected = on_ranks(2, saves(CASES[name], tmp_path / "c"), tmp_path)
    for ours, theirs in zip(expected, on_ranks(2, loads(CASES[name], tmp_path / "c"), tmp_path), strict=True):
        assert torch.equal(ours[2], theirs[2])


SPLIT = ("grpo", "grpo, clipped", "grpo, layers computed again", "grpo, stopped early", "ppo", "ppo, head")


@pytest.mark.parametrize("name", SPLIT)
def test_two_pairs_of_ranks_that_split_every_layer_take_the_steps_of_one_process(name: str, tmp_path: Path) -> None:
    found = on_ranks(4, two_updates(CASES[name]), tmp_path, width=2)
    assert_equal_runs(found, two_updates(CASES[name])(ONE))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_gradient_of_split_layers_in_float32_and_their_checkpoints_are_those_of_one_process(
    name: str, tmp_path: Path
) -> None:
    expected = gradient(CASES[name])(ONE)
    for found in on_ranks(2, gradient(CASES[name]), tmp_path, width=2):
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    state = on_ranks(4, saves(CASES[name], tmp_path / "four"), tmp_path, width=2)[0]
    assert_equal_states([loads(CASES[name], tmp_path / "four")(ONE)], state)
    state = saves(CASES[name], tmp_path / "one")(ONE)
    assert_equal_states(on_ranks(4, loads(CASES[name], tmp_path / "one"), tmp_path, width=2), state)
