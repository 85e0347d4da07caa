"""FlexAttention mask of packed trees, built from blocks of 128 tokens instead of token pairs.

PyTorch's ``create_block_mask`` evaluates every pair: 9 bytes each, 2 GiB for 16,384 tokens. Segments are runs of
tokens, so the lowest and highest segment and position of two blocks decide whether one sees the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from rlcore.text.packing import tree_positions

if TYPE_CHECKING:
    from jaxtyping import Int

BLOCK = 128
_ABOVE = 1 << 30  # above every segment's number


def block_mask(segment: Int[Tensor, "batch time"], *, window: int | None = None) -> BlockMask:
    """Return ``tree_mask`` as a block mask, for segments int64 [B, T]; never synchronizes with the device."""
    position = tree_positions(segment)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = segment[batch, query], segment[batch, key]
        visible = (query >= key) & ((own == other) | (other == 0)) & (own >= 0)
        if window is not None:
            visible = visible & (position[batch, query] - position[batch, key] < window)
        return visible | (query == key)

    some, whole = _visible_blocks(_Blocks.of(segment, position), window)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(segment.shape[1],) * 2
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Lowest and highest segment and position of each block [B, N], and whether it contains padding."""

    first: Tensor
    last: Tensor
    nearest: Tensor
    furthest: Tensor
    is_padded: Tensor

    @classmethod
    def of(cls, segment: Tensor, position: Tensor) -> _Blocks:
        """Return the blocks of rows [B, T], padding the last one."""
        missing = -segment.shape[1] % BLOCK
        shape = (len(segment), -1, BLOCK)
        codes = functional.pad(segment, (0, missing), value=-1).reshape(shape)
        at = functional.pad(position, (0, missing)).reshape(shape)
        is_token = codes >= 0
        lowest, nearest = (x.where(is_token, _ABOVE).amin(-1) for x in (codes, at))
        return cls(lowest, codes.amax(-1), nearest, at.where(is_token, -1).amax(-1), ~is_token.all(-1))


def _visible_blocks(blocks: _Blocks, window: int | None) -> tuple[Tensor, Tensor]:
    """Return which query blocks see some, and which all, of each key block: bool [B, N, N] each."""
    first, last = blocks.first[:, :, None], blocks.last[:, :, None]
    key_first, key_last = blocks.first[:, None], blocks.last[:, None]
    count = blocks.first.shape[1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=blocks.first.device).tril(-1)
    overlaps = (first <= key_last) & (key_first <= last) | (key_first == 0)
    some = earlier & overlaps & (last >= 0) & (key_last >= 0)
    is_full = ~blocks.is_padded[:, :, None] & ~blocks.is_padded[:, None]
    is_one = (first == last) & (key_first == key_last) & (first == key_first)
    whole = earlier & is_full & (is_one | (key_last == 0))
    if window is not None:
        some &= blocks.nearest[:, :, None] - blocks.furthest[:, None] < window
        whole &= blocks.furthest[:, :, None] - blocks.nearest[:, None] < window
    itself = torch.eye(count, dtype=torch.bool, device=first.device)
    return some | itself, whole


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks per query block, int32 [B, 1, N], and their indices: int32 [B, 1, N, N]."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None], order[:, None]
