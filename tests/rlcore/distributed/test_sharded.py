"""Sharded models and ranks: gradients, steps and checkpoints of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from rlcore.errors import CheckpointError, ModelError, NonFiniteError
from rlcore.hardware.sharded import (
    ONE,
    Ranks,
    ShardConfig,
    _layers,
    _split,
    attach_ranks,
    full_state_dict,
    gather_full,
    ranks_of,
    run_forward,
    shard,
    shard_like,
)
from rlcore.models.heads import ScalarHeadModel
from tests import strategies
from tests.rank_learners import (
    CASES,
    Held,
    assert_equal_runs,
    assert_equal_states,
    loads,
    make_learner,
    samples_of,
    saves,
    two_updates,
)
from tests.ranks import on_ranks

SMALL = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_hidden_layers=3, num_key_value_heads=2),
        MixtralConfig(**SMALL, num_hidden_layers=3, num_key_value_heads=2, num_local_experts=8),  # more than layers
        GPT2Config(vocab_size=29, n_embd=16, n_layer=3, n_head=2),
    ],
)
def test_the_blocks_of_a_backbone_are_its_layers(config: PretrainedConfig) -> None:
    assert len(_layers(AutoModelForCausalLM.from_config(config))) == 3


def test_a_model_is_of_one_rank_until_it_joins_others_with_all_that_stands_on_it() -> None:
    model = strategies.tiny_llama()
    critic = ScalarHeadModel.on_backbone(model)
    assert ranks_of(model) is ranks_of(critic) is ONE
    attach_ranks(critic, Ranks(1, 2))
    assert ranks_of(model) == ranks_of(critic) == Ranks(1, 2)
    assert sum(1 for _ in model.parameters()) == sum(1 for _ in strategies.tiny_llama().parameters())


def test_a_model_that_is_whole_is_passed_and_kept_as_it_is() -> None:
    model, tensor = strategies.tiny_llama(), torch.ones(2)
    assert run_forward(model, lambda: 5) == 5
    assert full_state_dict(model) is None
    assert shard_like(model.lm_head.weight, tensor) is tensor


def gradients(config: PretrainedConfig, ranks: Ranks = ONE) -> dict[str, torch.Tensor]:
    """The gradients of all weights, which are drawn at random, for a sum over the logits of two sequences."""
    model = AutoModelForCausalLM.from_config(config).double()
    draws = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    tokens = torch.randint(29, (2, 5), generator=draws)
    marks = torch.randn(2, 5, 29, generator=draws, dtype=torch.float64)
    if ranks.width > 1:
        shard(model, ranks, ShardConfig(), device=torch.device("cpu"))
    loss = run_forward(model, lambda: (model(input_ids=tokens).logits.log_softmax(-1) * marks).sum())
    loss.backward()
    return {name: gather_full(each.grad) for name, each in model.named_parameters() if each.grad is not None}


PLANS = {
    "norms within heads": Qwen3Config(**SMALL, num_hidden_layers=2, num_key_value_heads=2, head_dim=8),
    "norms within heads, windows": Gemma3TextConfig(
        **SMALL, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention"] * 2
    ),
    "norms over heads": Olmo2Config(**SMALL, num_hidden_layers=2, num_key_value_heads=2),
    "matrices in one": Phi3Config(**SMALL, num_hidden_layers=2, num_key_value_heads=2, pad_token_id=0),
    "gates in one": GlmConfig(**SMALL, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, pad_token_id=0),
}


@pytest.fixture(scope="module")
def of_split_layers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """The gradients of every plan on two ranks that split its layers."""

    def work(ranks: Ranks) -> dict[str, dict[str, torch.Tensor]]:
        return {name: gradients(config, ranks) for name, config in PLANS.items()}

    return on_ranks(2, work, tmp_path_factory.mktemp("plans"), width=2)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_of_dense_layers_gives_the_gradients_of_the_whole_model(name: str, of_split_layers: Any) -> None:
    expected = gradients(PLANS[name])
    bound = 1e-5 if "windows" in name else 1e-9  # Gemma's norms compute in float32, whatever the weights are
    assert min(each.abs().max() for each in expected.values()) > 1e-3
    for found in (plans[name] for plans in of_split_layers):
        assert found.keys() == expected.keys()
        for key, each in expected.items():
            torch.testing.assert_close(found[key], each, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPT2Config(vocab_size=29, n_embd=16, n_layer=1, n_head=2), "transformers has no plan for it"),
        (MixtralConfig(**SMALL, num_hidden_layers=1, num_key_value_heads=2), "its plan has moe_tp_experts, packed_"),
        (LlamaConfig(**SMALL, num_hidden_layers=1, num_key_value_heads=1), "it has 2 heads and 1 KV heads"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_reason(
    config: PretrainedConfig, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMesh, "size", lambda self, mesh_dim=None: 2)
    with pytest.raises(ModelError, match=said) as refused:
        _split(AutoModelForCausalLM.from_config(config), object.__new__(DeviceMesh))
    assert "cannot be split among 2 ranks" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "held", "size"),
    [("ppo, head", "full", 2), ("grpo", "replicate", 2), ("ppo, clipped", "offload", 2)],
)
def test_ranks_take_the_steps_of_one_process(name: str, held: Held, size: int, tmp_path: Path) -> None:
    found = on_ranks(size, two_updates(CASES[name], held), tmp_path)
    assert_equal_runs(found, two_updates(CASES[name])(ONE))


def test_two_ranks_that_split_every_layer_take_the_steps_of_one_process(tmp_path: Path) -> None:
    found = on_ranks(2, two_updates(CASES["ppo"]), tmp_path, width=2)
    assert_equal_runs(found, two_updates(CASES["ppo"])(ONE))


def test_a_loss_that_is_not_finite_on_one_rank_stops_every_rank_before_the_step(tmp_path: Path) -> None:
    case = CASES["grpo"]

    def work(ranks: Ranks) -> str:
        learner = make_learner(case, ranks)
        samples = samples_of(case, 0)
        update = dataclasses.replace(learner.config.update, max_skipped_steps=0)
        learner.config = dataclasses.replace(learner.config, update=update)
        if not ranks.is_first:  # what the other rank is dealt stays sound
            learner.policy.lm_head.weight.data.to_local().fill_(float("inf"))
        try:
            learner.update(samples, seed=0)
        except NonFiniteError as error:
            return str(error)
        return "no error"

    for text in on_ranks(2, work, tmp_path):
        assert "no step was taken" in text


def test_what_the_first_rank_finds_is_found_by_all_and_its_error_is_theirs(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> list[str]:
        def refuse() -> str:
            raise CheckpointError("damaged", where="here", fix="mend it")

        try:
            ranks.broadcast_object(refuse)
        except CheckpointError as error:
            return [ranks.broadcast_object(lambda: f"rank {ranks.rank}"), *error.args]
        return []

    assert on_ranks(2, work, tmp_path) == [["rank 0", "damaged", "here", "mend it"]] * 2


def test_one_rank_alone_asks_nobody() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    ONE.sum_gradients([parameter])
    assert parameter.grad is None
    assert (ONE.any(True), ONE.max(3), ONE.gather("x"), ONE.broadcast_object(lambda: 5)) == (True, 3, ["x"], 5)
    assert ONE.collect([0, 1], ["a", "b"]) == ["a", "b"]


def test_gathering_in_half_precision_learns_what_autocast_learns(tmp_path: Path) -> None:
    """Shards stay float32, so that a small step is not rounded away; what is gathered and multiplied is bfloat16."""
    half = ShardConfig(dtype=torch.bfloat16)
    case = CASES["grpo"]

    def work(ranks: Ranks) -> tuple[list[str], float]:
        learner = make_learner(case, ranks, dtype=torch.float32, sharding=half)
        metrics = learner.update(samples_of(case, 0), seed=0).metrics
        return sorted({str(p.dtype) for p in learner.policy.parameters()}), metrics["loss/policy"]

    expected = make_learner(case, dtype=torch.float32).update(samples_of(case, 0), seed=0).metrics["loss/policy"]
    for kinds, loss in on_ranks(2, work, tmp_path):
        assert kinds == ["torch.float32"]
        assert loss == pytest.approx(expected, abs=0.05)
        assert loss != expected


def test_a_checkpoint_of_two_ranks_is_loaded_by_one_process(tmp_path: Path) -> None:
    case = CASES["grpo"]
    saved = on_ranks(2, saves(case, tmp_path / "two"), tmp_path)
    assert_equal_states([loads(case, tmp_path / "two")(ONE)], saved[0])


def test_a_checkpoint_of_one_process_is_loaded_by_two_ranks(tmp_path: Path) -> None:
    case = CASES["ppo, head"]
    expected = saves(case, tmp_path / "one")(ONE)
    assert_equal_states(on_ranks(2, loads(case, tmp_path / "one"), tmp_path), expected)
