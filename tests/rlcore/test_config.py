"""Configurations, seeds and types: what is refused, and what is derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from rlcore.seeding import derive_seed, generator, shuffled
from rlcore.strict_config import INLINE, OneOf, above, at_least, below, between, build, build_partly, to_dict
from rlcore.types import Score, is_correct, turn_spans
from tests import strategies


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section with a rule over two of its fields."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError("low must not be above high")


@dataclass(frozen=True, kw_only=True)
class Item:
    """An entry of a list."""

    kind: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A field of every sort."""

    name: str
    count: Annotated[int, at_least(1)]
    rate: Annotated[float, above(0.0), below(1.0)] = 0.5
    alpha: Annotated[float, above(0.0), below(0.5)] = 0.05  # no number that is tried stands in for it
    share: Annotated[float, between(0.0, 1.0)] = 0.5
    mode: Literal["fast", "slow"] = "fast"
    limit: Annotated[float, above(0.0)] | None = None
    style: Literal["a", "b"] | None = None
    on: bool = False
    items: tuple[Item, ...] = ()
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """Settings that stand beside those of what has them."""

    spokes: Annotated[int, at_least(3)] = 8


@dataclass(frozen=True, kw_only=True)
class Bike:
    """One of two kinds of things."""

    kind: str
    wheel: Wheel = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class Boat:
    """The other kind."""

    kind: str
    sails: int


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Things by their names."""

    things: Mapping[str, Annotated[Any, OneOf("kind", {"bike": Bike, "boat": Boat})]]


REQUIRED = {"name": "x", "count": 1}


def faults(**document: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(Fleet if "things" in document else Outer, document if "things" in document else REQUIRED | document)
    first, *lines = caught.value.what.splitlines()
    assert first.startswith(f"the configuration has {len(lines)} error")
    return [line.strip() for line in lines]


def test_a_good_document_is_built_with_its_defaults() -> None:
    built = build(Outer, {"name": "x", "count": 2, "items": [{"kind": "a"}], "inner": {"high": 3}})
    assert built == Outer(name="x", count=2, items=(Item(kind="a"),), inner=Inner(high=3.0))
    assert type(built.inner.high) is float  # an integer stands for a number


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"cuont": 1}, "cuont: unknown key; did you mean count?"),
        ({"inner": {"hihg": 1}}, "inner.hihg: unknown key; did you mean inner.high?"),
        ({"inner": {"zzz": 1}}, "inner.zzz: unknown key; known: low, high"),
        ({"count": 0}, "count = 0: must be at least 1"),
        ({"count": 10**20}, f"count = {10**20}: must be at most {2**53}"),
        ({"count": "3"}, "count = '3': must be an integer, not a string"),
        ({"count": 3.0}, "count = 3.0: must be an integer, not a float"),
        ({"count": True}, "count = True: must be an integer, not a boolean"),
        ({"rate": 0.0}, "rate = 0.0: must be greater than 0.0"),
        ({"rate": 1}, "rate = 1: must be less than 1.0"),
        ({"share": 1.5}, "share = 1.5: must be between 0.0 and 1.0"),
        ({"rate": "fast"}, "rate = 'fast': must be a float, not a string"),
        ({"share": True}, "share = True: must be a float, not a boolean"),
        ({"share": float("nan")}, "share = nan: must be a finite number"),
        ({"share": float("inf")}, "share = inf: must be a finite number"),
        ({"mode": "quick"}, "mode = 'quick': must be one of 'fast', 'slow'"),
        ({"mode": "fsat"}, "mode = 'fsat': must be one of 'fast', 'slow'; did you mean 'fast'?"),
        ({"mode": "fast_alone"}, "mode = 'fast_alone': must be one of 'fast', 'slow'; did you mean 'fast'?"),
        ({"inner": {"count": {}}}, "inner.count: unknown key; did you mean count, at the top of the preset?"),
        (
            {"inner": {"inner": {"low": 1}}},
            "inner.inner: unknown key; did you mean inner.low, at the top of the preset?",
        ),
        ({"on": "yes"}, "on = 'yes': must be a boolean, not a string"),
        ({"on": 1}, "on = 1: must be a boolean, not an integer"),
        ({"name": 5}, "name = 5: must be a string, not an integer"),
        ({"items": {"kind": "a"}}, "items = {'kind': 'a'}: must be a list"),
        ({"items": [{"kind": "a"}, {}]}, "items.1.kind: required, but missing"),
        ({"items": ["a"]}, "items.0 = 'a': must be a table"),
        ({"options": [1]}, "options = [1]: must be a table"),
        (
            {"options": {"a": [1]}},
            "options.a = [1]: must be a string, an integer, a float or a boolean, not a list",
        ),
        ({"options": {"a": float("nan")}}, "options.a = nan: must be a finite number"),
        ({"inner": 3}, "inner = 3: must be a table"),
        ({"inner": {"low": 2.0}}, "inner: low must not be above high"),
        (
            {"things": {"x": {"kind": "bkie"}}},
            "things.x.kind = 'bkie': must be one of 'bike', 'boat'; did you mean 'bike'?",
        ),
        ({"things": {"x": {"spokes": 4}}}, "things.x.kind: required, one of 'bike', 'boat'"),
        ({"things": {"x": {"kind": "bike", "spokes": 2}}}, "things.x.spokes = 2: must be at least 3"),
        ({"things": {"x": {"kind": "bike", "spoke": 4}}}, "things.x.spoke: unknown key; did you mean things.x.spokes?"),
        ({"things": {"x": {"kind": "boat"}}}, "things.x.sails: required, but missing"),
        ({"things": {"x": 3}}, "things.x = 3: must be a table"),
        ({"limit": -1.0}, "limit = -1.0: must be greater than 0.0"),
        ({"limit": "much"}, "limit = 'much': must be a float, not a string"),
        ({"style": "c"}, "style = 'c': must be one of 'a', 'b'"),
    ],
    ids=str,
)
def test_each_error_has_its_path_and_its_value(document: dict[str, Any], fault: str) -> None:
    assert faults(**document) == [fault]


def test_all_errors_are_listed_at_once() -> None:
    found = faults(cuont=1, count=0, mode="quick", items=[{"weight": "heavy"}], inner={"low": float("nan")})
    assert found == [
        "cuont: unknown key; did you mean count?",
        "count = 0: must be at least 1",
        "mode = 'quick': must be one of 'fast', 'slow'",
        "items.0.kind: required, but missing",
        "items.0.weight = 'heavy': must be a float, not a string",
        "inner.low = nan: must be a finite number",
    ]


def test_missing_fields_and_a_document_that_is_no_table_are_named_with_the_source() -> None:
    with pytest.raises(ConfigError, match=r"name: required, but missing\n *count: required, but missing") as caught:
        build(Outer, {}, source="my.toml")
    assert caught.value.where == "my.toml"
    with pytest.raises(ConfigError, match="must be a table"):
        build(Outer, [1])  # type: ignore[arg-type]


texts = st.text(max_size=5)

exact_integers = st.integers(-(2**53), 2**53)  # larger ones are refused, for a float does not hold them

built_outers = st.builds(
    Outer,
    name=texts,
    count=st.integers(1, 10**9),
    rate=st.floats(0.01, 0.99),
    mode=st.sampled_from(["fast", "slow"]),
    on=st.booleans(),
    items=st.lists(st.builds(Item, kind=texts, weight=st.floats(-9, 9)), max_size=3).map(tuple),
    options=st.dictionaries(texts, texts | exact_integers | st.floats(-9, 9) | st.booleans(), max_size=3),
)


@given(value=built_outers)
def test_plain_values_build_the_same_configuration_again(value: Outer) -> None:
    assert build(Outer, to_dict(value)) == value


def test_plain_values_keep_the_order_of_the_fields_and_sort_the_names_of_tables() -> None:
    plain = to_dict(Outer(name="x", count=1, options={"b": 1, "a": 2}))
    assert list(plain) == [
        *("name", "count", "rate", "alpha", "share", "mode", "limit", "style", "on", "items", "options", "inner"),
    ]
    assert list(plain["options"]) == ["a", "b"]


def test_an_optional_value_may_be_left_out_and_keeps_its_bounds_and_choices() -> None:
    assert build(Outer, {"name": "x", "count": 1}).limit is None
    assert build(Outer, {"name": "x", "count": 1, "limit": 2, "style": "b"}).limit == 2.0
    assert build(Outer, {"name": "x", "count": 1, "limit": None}).limit is None


def test_a_table_is_built_as_the_kind_that_it_names_with_inlined_keys_beside_its_own() -> None:
    document = {"things": {"mine": {"kind": "bike", "spokes": 4}, "yours": {"kind": "boat", "sails": 2}}}
    fleet = build(Fleet, document)
    assert fleet.things == {"mine": Bike(kind="bike", wheel=Wheel(spokes=4)), "yours": Boat(kind="boat", sails=2)}
    assert to_dict(fleet) == document
    assert build(Fleet, to_dict(fleet)) == fleet


def test_a_wrong_value_is_replaced_by_a_legal_one_and_listed() -> None:
    wrong = {"count": 0, "rate": 2.0, "mode": "fsat", "on": "yes", "itmes": [], "alpha": [1]}
    value, faults = build_partly(Outer, wrong)
    assert sorted(fault.split(" ")[0].rstrip(":") for fault in faults) == sorted(["name", *wrong])
    assert value is not None
    assert build(Outer, to_dict(value)) == value
    assert (value.name, value.count, value.mode) == ("", 1, "fast")


def test_a_table_that_cannot_be_built_is_left_out_of_its_names() -> None:
    value, faults = build_partly(Fleet, {"things": {"x": {"kind": "car"}, "y": {"kind": "boat", "sails": "two"}}})
    assert len(faults) == 2
    assert value == Fleet(things={"y": Boat(kind="boat", sails=1)})


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


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"timeout_minutes": 1.0, "max_restarts": 0}, {}),  # one rank computes, wherever and however long
        ({"learner_ranks": 2}, {}),
        ({"backend": "ray", "learner_ranks": 2, "ray": RayConfig(num_rollout_workers=3, num_reward_workers=1)}, {}),
        ({"learner_ranks": 2, "tensor_parallel": 2}, {"tensor_parallel": 2}),
        ({"cpu_offload": True}, {"cpu_offload": True}),
    ],
)
def test_only_several_ranks_and_another_device_for_the_step_change_numbers(
    settings: dict[str, Any], numbers: dict[str, Any]
) -> None:
    """A sum over ranks is rounded in another order; where one rank computes, and how long it may take, changes none."""
    found = DistributedConfig(**({"backend": "processes"} | settings))
    ranks = {"learner_ranks": found.learner_ranks, "shard": "auto", "gather_in_compute_dtype": False}
    assert found.numbers == (ranks | numbers if found.is_shared else {})
    assert found.is_shared == bool({"learner_ranks", "cpu_offload"} & {*settings})
    assert found.is_sharded(adapted=False) == found.is_shared and not found.is_sharded(adapted=True)


@given(seed=st.integers(0, 2**40), step=st.integers(0, 10**6))
def test_a_derived_seed_is_a_63_bit_number_that_torch_accepts(seed: int, step: int) -> None:
    derived = derive_seed(seed, "rollouts", step)
    assert 0 <= derived < 2**63
    torch.Generator().manual_seed(derived)


def test_seeds_do_not_change_between_processes_and_versions() -> None:
    # SHA-256 of "0/rollouts/1" begins with 1cfdc524b09413c6, which halved is this number: stored runs rely on it.
    assert derive_seed(0, "rollouts", 1) == 1044521281770883555


def test_purposes_do_not_share_draws() -> None:
    purposes = [(), ("a",), ("b",), ("a", 1), ("a", 2), ("a", "1", 2)]
    seeds = {derive_seed(seed, *purpose) for seed in (0, 1) for purpose in purposes}
    assert len(seeds) == 12


def test_a_generator_draws_the_same_numbers_again_whatever_was_drawn_elsewhere() -> None:
    first = torch.rand(3, generator=generator(0, "noise"))
    torch.rand(100)
    assert torch.equal(torch.rand(3, generator=generator(0, "noise")), first)


@given(count=st.integers(0, 50), seed=st.integers(0, 1000))
def test_shuffling_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled(count, seed, "order")) == list(range(count))


def test_another_epoch_is_another_order() -> None:
    assert shuffled(20, 0, "order", 0) != shuffled(20, 0, "order", 1)


@given(mask=st.lists(st.booleans(), max_size=20))
def test_turns_are_the_runs_of_own_tokens(mask: list[bool]) -> None:
    spans = turn_spans(mask)
    inside = {place for start, end in spans for place in range(start, end)}
    assert [place in inside for place in range(len(mask))] == mask
    assert all(start < end for start, end in spans)
    assert all(before[1] < after[0] for before, after in pairwise(spans))  # never two in a row


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, True), (0.99, True), (0.989, False), (0.0, False), (None, False)]
)
def test_an_answer_is_correct_from_ninety_nine_hundredths(value: float | None, expected: bool) -> None:
    assert is_correct(Score(value=value, terms={})) is expected
