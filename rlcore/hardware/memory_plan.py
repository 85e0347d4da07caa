"""What a stage will hold in memory, worked out from the configuration and the model's shape before anything is loaded.

Weights, gradients and moments are exact. Activations are an estimate for the layers of Llama and its like, within a
quarter of what :func:`rlcore.hardware.memory.measure_peak` finds there. Bytes for one token in one layer:

    float32     32 h + 8 k + 16 i        h, k, i: widths of the stream, of keys, of the feed-forward layer
    half        30 h + 4 k +  8 i        the stream and the norms stay float32
    recompute   4 h                      and one layer in full

In half precision each linear layer keeps its weight as it was cast for the product, 2 bytes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlcore.config import DpoConfig, LoraConfig, OptimConfig, RewardModelConfig, RlConfig, SftConfig
from rlcore.hardware.memory import FLOAT32, Footprint, MemoryPlan, Recipe, expected
from rlcore.models.adapter_targets import linear_names
from rlcore.models.logprobs import CHUNK_SIZE

_MOMENT_BYTES = {"adamw": FLOAT32, "adamw_8bit": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What the figures are made of.

    ``linear``: (last name, inputs, outputs) of the backbone's linear layers; ``adaptable``: the names among them that
    an adapter can change.
    """

    num_parameters: int
    num_layers: int
    hidden: int
    keys: int
    feed_forward: int
    vocabulary: int
    linear: tuple[tuple[str, int, int], ...]
    adaptable: frozenset[str]

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelSize:
        """The size of a checkpoint, from its configuration alone: no weight is made."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        config = config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        layers = [(path, m) for path, m in model.base_model.named_modules() if isinstance(m, nn.Linear)]
        return cls(
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            keys=width * (getattr(config, "num_key_value_heads", None) or heads),
            feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocabulary=config.vocab_size,
            linear=tuple((path.rpartition(".")[2], m.in_features, m.out_features) for path, m in layers),
            adaptable=frozenset(linear_names(model)),
        )

    def adapter_parameters(self, adapter: LoraConfig) -> int:
        """Parameters of an adapter, 0 where there is none."""
        names = adapter.targets or self.adaptable
        chosen = [(inputs, outputs) for name, inputs, outputs in self.linear if name in names]
        return adapter.rank * sum(inputs + outputs for inputs, outputs in chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Under which a model learns: precision of the products, recomputed layers, tokens of a micro-batch."""

    compute_bytes: int
    recompute: bool
    tokens: int
    is_adapter: bool = False

    def backbone(self, size: ModelSize) -> int:
        """Bytes that the layers keep of one micro-batch for its backward pass."""
        h, k, i = size.hidden, size.keys, size.feed_forward
        half = self.compute_bytes < FLOAT32
        layer = (30 * h + 4 * k + 8 * i if half else 32 * h + 8 * k + 16 * i) * self.tokens
        casts = 2 * sum(inputs * outputs for _, inputs, outputs in size.linear) if half and not self.is_adapter else 0
        if self.recompute:
            return size.num_layers * 4 * h * self.tokens + layer + casts // max(1, size.num_layers)
        return size.num_layers * layer + casts

    def activations(self, size: ModelSize) -> int:
        """Those, the head's buffer of logits, and where all weights learn the head's gradient as it is made."""
        half = self.compute_bytes < FLOAT32
        logits = min(CHUNK_SIZE, self.tokens) * size.vocabulary * (FLOAT32 + (self.compute_bytes if half else 0))
        return self.backbone(size) + logits + (0 if self.is_adapter else FLOAT32 * size.vocabulary * size.hidden)


def sft_footprint(size: ModelSize, config: SftConfig, *, compute_bytes: int, recompute: bool) -> Footprint:
    """The footprint of supervised fine-tuning: all weights learn."""
    conditions = Conditions(compute_bytes=compute_bytes, recompute=recompute, tokens=config.tokens_per_microbatch)
    return _learning(size.num_parameters, config.optim, conditions.activations(size))


def dpo_footprint(size: ModelSize, config: DpoConfig, *, compute_bytes: int, recompute: bool) -> Footprint:
    """The footprint of DPO: all weights learn, or an adapter on frozen ones; the reference is no second model."""
    adapter = config.lora
    conditions = Conditions(
        compute_bytes=compute_bytes,
        recompute=recompute,
        tokens=config.tokens_per_microbatch,
        is_adapter=adapter.rank > 0,
    )
    activations = conditions.activations(size)
    if not adapter.rank:
        return _learning(size.num_parameters, config.optim, activations)
    learning = _learning(size.adapter_parameters(adapter), config.optim, activations)
    return replace(learning, weights=learning.weights + compute_bytes * size.num_parameters)


def reward_model_footprint(
    size: ModelSize, config: RewardModelConfig, *, compute_bytes: int, recompute: bool
) -> Footprint:
    """The footprint of training a reward model: its members one after another, what does not learn held once."""
    backbone = config.backbone
    kept = backbone.layers or size.num_layers
    of_layers = sum(inputs * outputs for _, inputs, outputs in size.linear) * kept // size.num_layers
    small = replace(size, num_layers=kept)
    conditions = Conditions(
        compute_bytes=compute_bytes,
        recompute=recompute,
        tokens=config.tokens_per_microbatch,
        is_adapter=backbone.lora.rank > 0,
    )
    if backbone.lora.rank:
        learning = _learning(size.adapter_parameters(backbone.lora), config.optim, conditions.backbone(size))
        return replace(learning, weights=learning.weights + compute_bytes * size.num_parameters)
    parameters = of_layers + size.vocabulary * size.hidden
    share = 1.0 if backbone.trainable_layers == -1 else min(kept, backbone.trainable_layers) / kept
    own = int(share * (of_layers if share < 1.0 else parameters))
    one = _learning(own, config.optim, int(share * conditions.backbone(small)))
    return replace(one, weights=FLOAT32 * (parameters + (config.ensemble - 1) * own))


def rl_footprint(
    size: ModelSize,
    config: RlConfig,
    *,
    uses_critic: bool,
    reward_model: RewardModelConfig | None,
    compute_bytes: int,
    recompute: bool,
    num_tokens: int,
    own_reference: bool = False,
) -> Footprint:
    """The footprint of an online-RL run. ``reward_model``: that of its rewards, ``num_tokens``: of a whole sequence,
    ``own_reference``: whether KL is measured to another checkpoint than the start.

    ``config`` names the engine itself; without one it is the native one, whose copy and cache are in it. Those of vLLM
    are not: it takes what it is told to.
    """
    adapter, engine = config.update.lora, config.sampling.engine
    native = engine is None or engine.kind == "native"
    on_base = bool(adapter.rank and reward_model and reward_model.backbone.lora.rank)
    plan = MemoryPlan(
        recipe=_recipe(uses_critic, reward_model is not None),
        num_parameters=size.num_parameters,
        num_adapter=size.adapter_parameters(adapter),
        placement=config.critic.architecture,
        reference=config.kl.coefficient > 0.0,
        own_reference=own_reference,
        reward_model_is_adapter=on_base,
        frozen_bytes=compute_bytes,
        moment_bytes=_MOMENT_BYTES[config.update.optim.kind],
        engine=native,
    )
    conditions = Conditions(
        compute_bytes=compute_bytes,
        recompute=recompute,
        tokens=config.update.tokens_per_microbatch,
        is_adapter=adapter.rank > 0,
    )
    together = min(config.sampling.max_concurrent, config.prompts_per_iteration * config.group_size)
    cache = 2 * size.num_layers * size.keys * compute_bytes * together * num_tokens if native else 0
    return expected(plan, activations=conditions.activations(size), kv_cache=cache)


def format_bytes(num_bytes: int) -> str:
    """A number of bytes for people: 131 GiB, 1.2 GiB, 184 MiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.{1 if num_bytes < 10 * 2**30 else 0}f} GiB"


def _learning(parameters: int, optim: OptimConfig, activations: int) -> Footprint:
    return Footprint(
        weights=FLOAT32 * parameters,
        gradients=FLOAT32 * parameters,
        optimizer=2 * _MOMENT_BYTES[optim.kind] * parameters,
        activations=activations,
        kv_cache=0,
    )


def _recipe(uses_critic: bool, has_reward_model: bool) -> Recipe:
    names: dict[tuple[bool, bool], Recipe] = {
        (True, True): "ppo",
        (True, False): "rlvr_ppo",
        (False, True): "grpo",
        (False, False): "rlvr_grpo",
    }
    return names[uses_critic, has_reward_model]
