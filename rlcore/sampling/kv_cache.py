"""Keys and values of a batch in place, and attention that reads them without a copy per query head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_ATTENTION = "rlcore_grouped"
_GROWTH = 64  # positions that a full buffer grows by


class BufferedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer in buffers [B, heads, capacity, width] that new positions are written into.

    The library's dynamic layer copies all of them for every token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append positions; returns views [B, heads, length, width] of all keys and values so far."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
            return self.keys, self.values
        if self.length > self.keys.shape[-2]:
            self._move(slice(None), start)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Number of positions that are filled."""
        return self.length

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be named several times."""
        self._move(rows, self.length)

    def _move(self, rows: torch.Tensor | slice, length: int) -> None:
        self.keys = _moved(self.keys[rows, :, :length], self.length + _GROWTH)
        self.values = _moved(self.values[rows, :, :length], self.length + _GROWTH)


def _moved(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, num_heads, length, width = states.shape
    buffer = states.new_empty(batch, num_heads, capacity, width)
    buffer[:, :, :length] = states
    return buffer


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention in which query heads that share a key-value head become its query positions.

    Exact for one new token per sequence, where all heads may see the same positions, and free of the library's copies
    of keys and values for every query head. Everything else goes to the library's own function. The parameters are
    those of transformers' ``AttentionInterface``: query [B, heads, T, width], key and value [B, kv_heads, S, width].
    """
    batch, num_heads, num_queries, width = query.shape
    num_kv_heads = key.shape[1]
    if num_queries > 1 or num_heads == num_kv_heads or options.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    grouped = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, width)
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=options["scaling"])
    return attended.reshape(batch, 1, num_heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
