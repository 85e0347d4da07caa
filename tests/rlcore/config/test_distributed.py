from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlcore.config import (
    BackboneConfig,
    DistributedConfig,
    EngineConfig,
    LoraConfig,
    OptimConfig,
    RayConfig,
    RewardModelConfig,
    UpdateConfig,
)
from rlcore.config.distributed import Learning, distributed_errors
from rlcore.errors import ConfigError
from tests import strategies


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "processes", "ray": RayConfig(num_rollout_workers=2)}, "needs backend = 'ray'"),
        ({"ray": RayConfig(address="a:1")}, "needs backend = 'ray'"),
        ({"backend": "ray", "devices": (0,)}, "Ray chooses the GPUs"),
        ({"learner_ranks": 2}, "need backend = 'processes'"),
        ({"gather_in_compute_dtype": True}, "need backend = 'processes'"),
        ({"backend": "processes", "shard": "replicate", "gather_in_compute_dtype": True}, "needs shards"),
        ({"cpu_offload": True}, "need backend = 'processes'"),
        ({"tensor_parallel": 2}, "no multiple of tensor_parallel = 2"),
        ({"backend": "processes", "learner_ranks": 3, "tensor_parallel": 2}, "no multiple of tensor_parallel = 2"),
        ({"backend": "processes", "learner_ranks": 2, "tensor_parallel": 2, "shard": "replicate"}, "needs shards"),
        ({"backend": "processes", "shard": "replicate", "cpu_offload": True}, "needs shards"),
        ({"backend": "processes", "learner_ranks": 2, "devices": (0,)}, "names 1 GPUs, 2 ranks need 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DistributedConfig(**settings)


ADAPTED, EIGHT_BIT = (
    strategies.rl_config(update=update)
    for update in (UpdateConfig(lora=LoraConfig(rank=4)), UpdateConfig(optim=OptimConfig(kind="adamw_8bit")))
)
ADAPTER = BackboneConfig(lora=LoraConfig(rank=4))
REWARD_MODEL = RewardModelConfig(
    num_epochs=1, batch_size=2, learning_rate=1.0, head_learning_rate=1.0, optim=OptimConfig(kind="adamw_8bit")
)


@pytest.mark.parametrize(
    ("placement", "own", "said"),
    [
        ({"shard": "full"}, ADAPTED, "stages.grpo.update.lora.rank > 0"),
        ({"gather_in_compute_dtype": True}, ADAPTED, "stages.grpo.update.lora.rank > 0"),
        ({"cpu_offload": True, "learner_ranks": 1}, ADAPTED, "stages.grpo.update.lora.rank > 0"),
        ({"tensor_parallel": 2}, ADAPTED, "stages.grpo.update.lora.rank > 0"),
        ({}, ADAPTED, ""),
        ({}, EIGHT_BIT, "stages.grpo.update.optim.kind = 'adamw_8bit'"),
        ({"shard": "replicate"}, EIGHT_BIT, ""),
        ({"learner_ranks": 1}, EIGHT_BIT, ""),
        ({}, REWARD_MODEL, "stages.grpo.optim.kind = 'adamw_8bit'"),
        ({"shard": "full"}, dataclasses.replace(REWARD_MODEL, backbone=ADAPTER), "stages.grpo.backbone.lora.rank > 0"),
    ],
)
def test_what_cannot_be_cut_into_shards_is_named_with_its_key(
    placement: dict[str, Any], own: Learning, said: str
) -> None:
    config = DistributedConfig(**({"backend": "processes", "learner_ranks": 2} | placement))
    faults = distributed_errors(config, {"grpo": own}, EngineConfig())
    assert [said in fault for fault in faults] == [True] * bool(said)


def test_samplers_of_a_cluster_are_the_built_in_engine() -> None:
    config, own = (
        DistributedConfig(backend="ray", ray=RayConfig(num_rollout_workers=2)),
        {"grpo": strategies.rl_config()},
    )
    assert distributed_errors(config, own, EngineConfig()) == []
    (fault,) = distributed_errors(config, own, EngineConfig(kind="vllm"))
    assert "distributed.ray.num_rollout_workers = 2" in fault and "engine.kind = 'vllm'" in fault
    assert distributed_errors(DistributedConfig(backend="ray"), own, EngineConfig(kind="vllm")) == []


def test_only_several_ranks_and_another_device_for_the_step_change_numbers() -> None:
    """A sum over ranks is rounded in another order; where one rank computes, and how long it may take, changes none."""
    alone = DistributedConfig(backend="processes", timeout_minutes=1.0, max_restarts=0)
    assert DistributedConfig().numbers == alone.numbers == {}
    two = DistributedConfig(backend="processes", learner_ranks=2)
    assert (
        two.numbers
        == DistributedConfig(
            backend="ray", learner_ranks=2, ray=RayConfig(num_rollout_workers=3, num_reward_workers=1)
        ).numbers
    )
    assert two.numbers == {"learner_ranks": 2, "shard": "auto", "gather_in_compute_dtype": False}
    split = DistributedConfig(backend="processes", learner_ranks=2, tensor_parallel=2)
    assert split.numbers == {**two.numbers, "tensor_parallel": 2}
    offloaded = DistributedConfig(backend="processes", cpu_offload=True)
    assert offloaded.numbers == {
        "learner_ranks": 1,
        "shard": "auto",
        "gather_in_compute_dtype": False,
        "cpu_offload": True,
    }
    assert offloaded.is_sharded(adapted=False) and not offloaded.is_sharded(adapted=True)
