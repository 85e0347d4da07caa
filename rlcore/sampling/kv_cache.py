"""Key-value cache updated in place, with one copy of each prompt for all its completions, and attention over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlcore.models.tree_attention import refuse_unknown

GROUPED_ATTENTION = "rlcore_grouped"
_GROWTH = 64  # positions added to a full buffer


class SharedPromptLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer: of G prompts [G, heads, W, width], and buffers of R rows [R, heads, room, width].

    transformers' dynamic layer would copy all of them for every token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the positions of the prefill, or one position per row. Return what the rows have added so far."""
        key_states = key_states.to(value_states.dtype)  # under autocast the rotary embedding returns float32 keys
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.prompt_keys, self.prompt_values = key_states, value_states
            self.keys = self.values = key_states[:0]
            self.is_initialized = True
            return key_states, value_states
        start, self.length = self.length, self.length + key_states.shape[-2]
        if start == 0:
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        if self.length > self.keys.shape[-2]:
            self.keys, self.values = _grown(self.keys, start), _grown(self.values, start)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Return the positions of a row, including its prompt."""
        return (self.prompt_keys.shape[-2] if self.is_initialized else 0) + self.length

    def select(self, gaps: Gaps, prompts: torch.Tensor) -> None:
        """Keep the rows that :class:`Gaps` names and these prompts, in this order."""
        if self.length:
            self.keys, self.values = gaps.close(self.keys), gaps.close(self.values)
        if len(prompts) < len(self.prompt_keys):
            self.prompt_keys, self.prompt_values = self.prompt_keys[prompts], self.prompt_values[prompts]


def _grown(states: torch.Tensor, length: int) -> torch.Tensor:
    batch, num_heads, _, width = states.shape
    buffer = states.new_empty(batch, num_heads, length + _GROWTH, width)
    buffer[:, :, :length] = states[:, :, :length]
    return buffer


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Ended rows among the first ``count`` rows, and the unfinished rows after those, which take their places."""

    count: int
    ended: torch.Tensor
    last: torch.Tensor

    def close(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the unfinished rows of [R, ...] in their new order. They are moved in place."""
        rows[self.ended] = rows[self.last]
        return rows[: self.count]


def find_gaps(live: torch.Tensor, count: int) -> Gaps:
    """Return where the unfinished rows go, ``count`` of them; ``live`` [R] is False on the ended ones."""
    return Gaps(count, (~live[:count]).nonzero()[:, 0], live[count:].nonzero()[:, 0] + count)


@dataclass(frozen=True, slots=True, eq=False)
class PromptGroups:
    """Assignment of rows to prompts for one step of R rows over G prompts.

    Attributes:
        origin: int64 [R], the prompt of each row.
        slots: int64 [G * M], the rows of each prompt, padded with any row.
        indices: int64 [R], positions in ``slots``.
        mask: bool [G, W], False on the left padding of shorter prompts.
    """

    cache: Cache
    origin: torch.Tensor
    slots: torch.Tensor
    indices: torch.Tensor
    mask: torch.Tensor


def group_rows(cache: Cache, origin: torch.Tensor, mask: torch.Tensor) -> PromptGroups:
    """Lay out the rows of each prompt, with ``origin`` [R] and ``mask`` [G, W] of :class:`PromptGroups`."""
    order = origin.argsort(stable=True)
    counts = origin.bincount(minlength=len(mask))
    starts = counts.cumsum(0) - counts
    width = int(counts.max())
    indices = torch.empty_like(origin)
    indices[order] = origin[order] * width + torch.arange(len(origin), device=origin.device) - starts[origin[order]]
    slots = origin.new_zeros(len(mask) * width)
    slots[indices] = torch.arange(len(origin), device=origin.device)
    return PromptGroups(cache, origin, slots, indices, mask)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sharing: PromptGroups | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of one new token per row over its prompt, read once per prompt, and over its own keys.

    Query heads of a key-value head, and rows of a prompt, become query positions. The two parts are merged by their
    log-sum-exp. Other cases use the library's function. Parameters: transformers' ``AttentionInterface``.

    Raises:
        ModelError: The layer needs an option that is not implemented here, such as a soft-cap or sinks.
    """
    refuse_unknown(module, options)
    if sharing is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    layer = sharing.cache.layers[module.layer_idx]
    prompt_keys, prompt_values = layer.prompt_keys, layer.prompt_values
    if options.get("sliding_window") is not None:
        # The mask differs between rows, so each row gets a copy for this step.
        key = torch.cat([prompt_keys[sharing.origin], key], dim=-2)
        value = torch.cat([prompt_values[sharing.origin], value], dim=-2)
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    rows, num_heads, _, width = query.shape
    prompts, kv_heads = prompt_keys.shape[:2]
    heads = num_heads // kv_heads  # query heads per key head
    grouped = query.to(value.dtype).reshape(rows, kv_heads, heads, width)
    scale = options["scaling"]
    own, own_normaliser = _attend(grouped, key, value, scale, None)
    slotted = grouped[sharing.slots].reshape(prompts, -1, kv_heads, heads, width).transpose(1, 2).flatten(2, 3)
    above, normaliser = _attend(slotted, prompt_keys, prompt_values, scale, sharing.mask[:, None, None])
    above = above.reshape(prompts, kv_heads, -1, heads, width).transpose(1, 2).flatten(0, 1)[sharing.indices]
    normaliser = normaliser.reshape(prompts, kv_heads, -1, heads).transpose(1, 2).flatten(0, 1)[sharing.indices]
    share = torch.sigmoid(normaliser - own_normaliser)[..., None]
    merged = own.to(share.dtype).lerp(above.to(share.dtype), share).to(own.dtype)
    return merged.reshape(rows, 1, num_heads, width), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [B, heads, T, width] and its log-sum-exp, at least float32 [B, heads, T]."""
    bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    if query.device.type == "cpu":
        if bias is not None:
            bias = bias.expand(-1, -1, query.shape[2], -1)
        output, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias, scale=scale
        )
        return output, normaliser
    scores = (query.float() @ key.float().mT) * scale  # half precision rounds a score of 100 to multiples of 0.5
    if bias is not None:
        scores = scores + bias
    normaliser = scores.logsumexp(-1)
    return (scores - normaliser[..., None]).exp().to(value.dtype) @ value, normaliser


def _grouped_mask(*, q_length: int, local_size: int | None = None, **options: Any) -> torch.Tensor | None:
    """Return the mask of transformers' ``AttentionMaskInterface``: none if a token sees all before it."""
    if q_length == 1 and local_size is None:
        return None
    mask: torch.Tensor | None = sdpa_mask(q_length=q_length, local_size=local_size, **options)
    return mask


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, _grouped_mask)
