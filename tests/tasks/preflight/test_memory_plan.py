"""The memory plan of a preset: what it says, when it refuses, and what it proposes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from rlcore.errors import ConfigError
from rlcore.flows.plan import plan_run
from rlcore.flows.presets import open_preset
from rlcore.models.preview import model_size
from rlcore.models.scratch import make_model, make_tokenizer
from rlcore.tasks.preflight.model_checks import model_facts
from rlcore.tasks.preflight.sizes import checked, memory_lines, needs_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.memory_need import Device
from rlcore.tasks.store.settings import Home
from tests.chat_models import make_checkpoint

GIB = 2**30
SEVEN_B = LlamaConfig(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
SIZE = model_size(SEVEN_B)
CARD = Device(type="cuda", compute_bytes=2, total=80 * GIB)  # computes in bfloat16
CPU = Device(type="cpu", compute_bytes=4, total=8 * GIB)


def preset(*overrides: str) -> RunConfig:
    return open_preset("tiny", ["data.preferences.path=pairs.jsonl", *overrides])


def refused(*overrides: str, stages: tuple[str, ...] = ("sft", "reward_model", "grpo", "ppo")) -> str:
    """The message with which a model of 7 B parameters is refused; empty where it is not."""
    try:
        checked(needs_of(preset(*overrides), SIZE, CARD, stages), CARD.total, is_cuda=True)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_weights_of_a_7b_model_do_not_fit_on_one_card_and_the_message_says_what_does() -> None:
    message = refused(stages=("grpo",))
    # 7.6 B x 16 bytes that learn, the reference and the engine's copy in bfloat16; 71 GiB of a micro-batch
    assert "grpo needs 213 GiB" in message and "of 80 GiB on the GPU" in message
    assert "weights 57 GiB, gradients 28 GiB, moments 57 GiB" in message
    assert "stages.grpo.update.lora.rank = 16" in message and "adamw_8bit" in message
    assert "sft needs" not in message  # not asked for
    assert "sft needs" in refused()


def test_on_eight_ranks_they_do() -> None:
    ranks = ("distributed.backend=processes", "distributed.learner_ranks=8")
    assert refused(*ranks, stages=("grpo",)) == ""
    (need,) = needs_of(preset(*ranks), SIZE, CARD, ("grpo",))
    assert need.held < 20 * GIB  # 142 GiB of weights, gradients and moments in eight parts
    assert refused(*ranks) == ""  # SFT, reward model and a critic's backbone are in shards too
    assert "sft needs" in refused(*ranks, "distributed.shard=replicate")


def test_on_one_card_they_do_where_shards_rest_in_the_machines_memory() -> None:
    assert "distributed.cpu_offload = true" in refused(stages=("grpo",))
    beside = ("distributed.backend=processes", "distributed.cpu_offload=true")
    assert refused(*beside) == ""
    (need,) = needs_of(preset(*beside), SIZE, CARD, ("sft",))
    assert need.held == 0 and need.footprint.activations > 0


def test_an_adapter_of_it_fits() -> None:
    assert refused("stages.grpo.update.lora.rank=16", stages=("grpo",)) == ""


def test_the_share_of_an_engine_on_the_same_card_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given = ["stages.grpo.update.lora.rank=16", "engine.kind=vllm", "stages.grpo.kl.coefficient=0.0"]
    large = "engine.gpus.gpu_memory_utilization=0.85"
    message = refused(*given, large, stages=("grpo",))
    assert "engine 68 GiB" in message and "engine.gpus.gpu_memory_utilization" in message
    assert refused(*given, stages=("grpo",)) == ""  # 0.4 of the card, beside a learner
    (turns,) = needs_of(preset(*given), SIZE, CARD, ("grpo",))
    (ahead,) = needs_of(preset(*given, "stages.grpo.sampling.staleness=1"), SIZE, CARD, ("grpo",))
    fixed, update = turns.footprint.weights + turns.footprint.optimizer, turns.footprint.gradients
    assert (turns.engine, ahead.engine) == (32 * GIB, 32 * GIB)
    assert turns.peak == fixed + max(update + turns.footprint.activations, 32 * GIB)  # it sleeps
    assert ahead.peak == fixed + update + ahead.footprint.activations + 32 * GIB
    assert refused(*given, 'engine.urls=["http://other:1"]', stages=("grpo",)) == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert refused(*given, large, stages=("grpo",)) == ""  # the other card is the engine's
    for impossible, message in (
        ("engine.replicas=2", "2 replicas of 1 GPUs need 2, 1 are visible beside"),
        ("engine.weight_transfer=nccl", "nccl needs vLLM in the trainer's environment too"),
    ):
        with pytest.raises(ConfigError, match=message):
            needs_of(preset(*given, impossible), SIZE, CARD, ("grpo",))


@pytest.mark.parametrize("gains", [True, False])
def test_packed_copies_count_where_the_engine_makes_them(gains: bool) -> None:
    (need,) = needs_of(preset(), SIZE, replace(CPU, gains_packed=gains), ("grpo",))
    packed = SIZE.packed_bytes(4) if gains else 0
    assert need.footprint.packed == packed
    fixed, update = need.footprint.weights + need.footprint.optimizer, need.footprint.gradients
    assert need.peak == fixed + max(update + need.footprint.activations, need.footprint.kv_cache + packed)
    assert ("packed weights 26 GiB" in str(need)) == gains


def test_activations_that_may_not_fit_are_a_warning() -> None:
    config = preset("stages.sft.tokens_per_microbatch=900000")
    (line,) = checked(
        needs_of(config, model_size(LlamaConfig(num_hidden_layers=2)), CARD, ["sft"]), CARD.total, is_cuda=True
    )
    assert "this may not fit; set hardware.gradient_checkpointing = true or a smaller tokens_per_microbatch" in line


def test_where_the_cache_of_the_engine_is_too_large_the_number_of_sequences_is_named() -> None:
    config = preset("stages.grpo.sampling.max_new_tokens=20000", "stages.grpo.prompts_per_iteration=64")
    needs = needs_of(config, model_size(LlamaConfig(num_hidden_layers=2)), CPU, ["grpo"])
    (line,) = checked(needs, 80 * GIB, is_cuda=False)
    assert line.endswith("this may not fit; set a smaller stages.grpo.sampling.max_concurrent")


def test_on_a_cpu_nothing_is_refused() -> None:
    (line,) = checked(needs_of(preset(), SIZE, CPU, ["sft"]), CPU.total, is_cuda=False)
    assert "of 8.0 GiB free: this may not fit; set stages.sft.optim.kind = 'adamw_8bit'" in line
    (line,) = checked(needs_of(preset(), SIZE, CPU, ["sft"]), None, is_cuda=False)
    assert "free" not in line


def test_a_model_from_scratch_is_known_before_it_is_made_and_one_from_a_hub_is_not(home: Home) -> None:
    config = preset()
    shape, size = config.model.shape, model_facts(config, home, {}).size
    made = make_model(shape, make_tokenizer(max_positions=shape.max_positions), seed=0)
    assert size is not None and size == model_size(made.config)
    assert size.num_parameters == sum(p.numel() for p in made.parameters())
    commit = "0" * 40
    unknown = preset("model.source=hub", "model.path=org/name", f"model.revision={commit}")
    assert model_facts(unknown, home, {}).size is None
    assert memory_lines(unknown, None, ["sft"]) == ["memory: known when the model is there, after import_sft"]


def test_a_folder_is_read_where_it_lies(home: Home, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "model")
    size = model_size(AutoConfig.from_pretrained(made))
    assert model_facts(preset("model.source=folder", f"model.path={made}"), home, {}).size == size


def test_plan_says_it_for_the_stages_that_are_asked_for(home: Home) -> None:
    found = plan_run("tiny", [], ["grpo"]).lines
    *lines, disk, time = [line for line in found if not line.startswith("precision: ")]  # a hint of some processors
    assert [line.split()[1] for line in lines] == ["sft", "grpo"]
    assert all(line.startswith("memory: ") for line in lines)
    assert disk.startswith("disk: the run writes about ")
    assert time.startswith("time: unknown; ")


def test_a_plan_that_cannot_fit_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.tasks.preflight.sizes.device_of", lambda _: CARD)
    huge = ["model.shape.hidden_size=12288", "model.shape.intermediate_size=49152", "model.shape.num_layers=30"]
    with pytest.raises(ConfigError, match="of 80 GiB on the GPU"):
        plan_run("tiny", huge, ["sft"])
