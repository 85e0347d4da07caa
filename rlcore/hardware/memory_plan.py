"""Memory plan of a stage, computed from configuration and model shape before anything is loaded.

Weights, gradients and moments are exact: trained weights are held four times in float32 (with gradients and Adam's two
moments), frozen ones once, in the precision that they are loaded in; scalar heads are neglected. Activations are an
estimate for Llama-like layers, within a quarter of what :func:`rlcore.models.memory_meter.measure_peak` measures. Bytes
per token and layer:

    float32                  32 h + 8 k + 16 i     h, k, i: hidden size, width of keys, of the feed-forward layer
    half                     30 h + 4 k +  8 i     residual stream and norms stay float32
    gradient checkpointing   4 h                   and one layer in full

In half precision each linear layer also keeps its cast weight, 2 bytes per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlcore.config import DpoConfig, LoraConfig, OptimConfig, RewardModelConfig, RlConfig, SftConfig
from rlcore.hardware.memory import CHUNK_SIZE, FLOAT32, Footprint, is_large

_MOMENT_BYTES = {"adamw": FLOAT32, "adamw_8bit": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape of a model, as :func:`rlcore.models.preview.model_size` finds it.

    Attributes:
        linear: (last name, inputs, outputs) of the backbone's linear layers.
        adaptable: Names in ``linear`` that an adapter can change.
    """

    num_parameters: int
    num_layers: int
    hidden: int
    keys: int
    feed_forward: int
    vocabulary: int
    linear: tuple[tuple[str, int, int], ...]
    adaptable: frozenset[str]

    def packed_bytes(self, bytes_per_weight: int) -> int:
        """Return the bytes of packed copies of the linear layers and the head."""
        layers = (*(inputs * outputs for _, inputs, outputs in self.linear), self.vocabulary * self.hidden)
        return bytes_per_weight * sum(filter(is_large, layers))

    def adapter_parameters(self, adapter: LoraConfig) -> int:
        """Return the number of parameters of an adapter, 0 if its rank is 0."""
        names = adapter.targets or self.adaptable
        chosen = [(inputs, outputs) for name, inputs, outputs in self.linear if name in names]
        return adapter.rank * sum(inputs + outputs for inputs, outputs in chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Training conditions of a model: bytes of a product, gradient checkpointing, tokens of a micro-batch."""

    compute_bytes: int
    gradient_checkpointing: bool
    tokens: int
    is_adapter: bool = False
    as_vllm: bool = False  # layers with an adapter round their outputs; else these are float32

    def backbone(self, size: ModelSize) -> int:
        """Return the bytes that the layers keep for the backward pass of one micro-batch."""
        h, k, i = size.hidden, size.keys, size.feed_forward
        half = self.compute_bytes < FLOAT32
        narrow = half and (not self.is_adapter or self.as_vllm)
        layer = (30 * h + 4 * k + 8 * i if narrow else 32 * h + 8 * k + 16 * i) * self.tokens
        casts = 2 * sum(inputs * outputs for _, inputs, outputs in size.linear) if half and not self.is_adapter else 0
        if self.gradient_checkpointing:
            return size.num_layers * 4 * h * self.tokens + layer + casts // max(1, size.num_layers)
        return size.num_layers * layer + casts

    def activations(self, size: ModelSize) -> int:
        """Return the bytes of :meth:`backbone`, of the logits and, without an adapter, of the head's gradient."""
        half = self.compute_bytes < FLOAT32
        logits = min(CHUNK_SIZE, self.tokens) * size.vocabulary * (FLOAT32 + (self.compute_bytes if half else 0))
        return self.backbone(size) + logits + (0 if self.is_adapter else FLOAT32 * size.vocabulary * size.hidden)


def sft_footprint(size: ModelSize, config: SftConfig, *, compute_bytes: int, gradient_checkpointing: bool) -> Footprint:
    """Return the footprint of supervised fine-tuning of all weights."""
    conditions = Conditions(
        compute_bytes=compute_bytes, gradient_checkpointing=gradient_checkpointing, tokens=config.tokens_per_microbatch
    )
    return _learning(size.num_parameters, config.optim, conditions.activations(size))


def dpo_footprint(size: ModelSize, config: DpoConfig, *, compute_bytes: int, gradient_checkpointing: bool) -> Footprint:
    """Return the footprint of DPO, of all weights or of an adapter. The reference is no second model."""
    adapter = config.lora
    conditions = Conditions(
        compute_bytes=compute_bytes,
        gradient_checkpointing=gradient_checkpointing,
        tokens=config.tokens_per_microbatch,
        is_adapter=adapter.rank > 0,
    )
    frozen = compute_bytes * size.num_parameters if adapter.rank else 0
    parameters = size.adapter_parameters(adapter) if adapter.rank else size.num_parameters
    learning = _learning(parameters, config.optim, conditions.activations(size))
    return replace(learning, weights=learning.weights + frozen)


def reward_model_footprint(
    size: ModelSize, config: RewardModelConfig, *, compute_bytes: int, gradient_checkpointing: bool
) -> Footprint:
    """Return the footprint of reward-model training; members are trained in turn and share frozen weights."""
    backbone = config.backbone
    kept = backbone.layers or size.num_layers
    of_layers = sum(inputs * outputs for _, inputs, outputs in size.linear) * kept // size.num_layers
    small = replace(size, num_layers=kept)
    conditions = Conditions(
        compute_bytes=compute_bytes,
        gradient_checkpointing=gradient_checkpointing,
        tokens=config.tokens_per_microbatch,
        is_adapter=backbone.lora.rank > 0,
    )
    if backbone.lora.rank:
        learning = _learning(size.adapter_parameters(backbone.lora), config.optim, conditions.backbone(size))
        return replace(learning, weights=learning.weights + compute_bytes * size.num_parameters)
    parameters = of_layers + size.vocabulary * size.hidden
    fraction = 1.0 if backbone.trainable_layers == -1 else min(kept, backbone.trainable_layers) / kept
    own = int(fraction * (of_layers if fraction < 1.0 else parameters))
    one = _learning(own, config.optim, int(fraction * conditions.backbone(small)))
    return replace(one, weights=FLOAT32 * (parameters + (config.ensemble - 1) * own))


def rl_footprint(
    size: ModelSize,
    config: RlConfig,
    *,
    uses_critic: bool,
    reward_model: RewardModelConfig | None,
    compute_bytes: int,
    gradient_checkpointing: bool,
    num_tokens: int,
    own_reference: bool = False,
) -> Footprint:
    """Return the footprint of an online-RL run.

    The native engine's weights and cache are included (also if ``config`` has no engine), those of vLLM are not.

    Args:
        num_tokens: Tokens of a whole sequence.
    """
    adapter, engine = size.adapter_parameters(config.update.lora), config.sampling.engine
    native = engine is None or engine.kind == "native"
    critics = {"separate": size.num_parameters, "shared": 0, "lora": adapter}
    learning = (adapter or size.num_parameters) + (critics[config.critic.architecture] if uses_critic else 0)
    has_reference = config.kl.coefficient > 0.0
    on_base = bool(adapter and reward_model and reward_model.backbone.lora.rank)
    # The frozen base of a LoRA is also the reference policy, unless that is a model of its own.
    others = (adapter or has_reference, adapter and has_reference and own_reference, reward_model and not on_base)
    copies = sum(map(bool, others))
    served = FLOAT32 if adapter else compute_bytes  # a merged LoRA is served in float32
    frozen = (compute_bytes * copies + (served if native else 0)) * size.num_parameters
    conditions = Conditions(
        compute_bytes=compute_bytes,
        gradient_checkpointing=gradient_checkpointing,
        tokens=config.update.tokens_per_microbatch,
        is_adapter=adapter > 0,
        as_vllm=not native,
    )
    together = min(config.sampling.max_concurrent, config.prompts_per_iteration * config.group_size)
    found = _learning(learning, config.update.optim, conditions.activations(size))
    return replace(
        found,
        weights=found.weights + frozen + (FLOAT32 * adapter if on_base else 0),
        kv_cache=2 * size.num_layers * size.keys * served * together * num_tokens if native else 0,
    )


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes: 131 GiB, 1.2 GiB, 184 MiB."""
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
