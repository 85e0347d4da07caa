"""The mask of a GPU's kernel: what the dense one says, from blocks alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_mask

from rlcore.models import tree_attention as module
from rlcore.models.tree_attention import block_mask
from rlcore.text.packing import tree_mask
from tests.largest_tensor import LargestTensor
from tests.rlcore.models.test_tree_attention import segments

WINDOWS = st.one_of(st.none(), st.integers(1, 8))


@settings(deadline=None, max_examples=30)
@given(segment=segments(), window=WINDOWS)
def test_its_rule_is_that_of_the_dense_mask(segment: torch.Tensor, window: int | None) -> None:
    rows, width = segment.shape
    ours = create_mask(block_mask(segment, window=window).mask_mod, rows, 1, width, width, device="cpu")
    assert torch.equal(ours, tree_mask(segment, window=window))


def listed(count: torch.Tensor | None, order: torch.Tensor | None) -> torch.Tensor:
    """Return the blocks that are read: bool [B, N, N]."""
    assert count is not None
    assert order is not None
    first = torch.arange(order.shape[-1]) < count[:, 0, :, None]
    return torch.zeros(order[:, 0].shape, dtype=torch.bool).scatter(-1, order[:, 0].long(), first)


@settings(deadline=None, max_examples=60)
@given(segment=segments(), window=WINDOWS, block=st.integers(1, 4))
def test_blocks_that_are_not_read_hold_nothing_visible_and_whole_ones_nothing_hidden(
    segment: torch.Tensor, window: int | None, block: int
) -> None:
    segment = torch.cat([segment, segment.new_full((len(segment), -segment.shape[1] % block), -1)], dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        made: BlockMask = block_mask(segment, window=window)
    pairs = tree_mask(segment, window=window)[:, 0].unflatten(1, (-1, block)).unflatten(-1, (-1, block))
    some, every = pairs.amax((2, 4)), pairs.amin((2, 4))
    partial = listed(made.kv_num_blocks, made.kv_indices)
    whole = listed(made.full_kv_num_blocks, made.full_kv_indices)
    assert not (partial & whole).any()
    assert torch.equal((some & ~(partial | whole)), torch.zeros_like(some))
    assert torch.equal(whole & ~every, torch.zeros_like(some))
    if window is None:
        assert torch.equal(partial | whole, some)


def test_it_never_holds_all_pairs_of_tokens() -> None:
    segment = torch.cat([torch.zeros(1, 2048), torch.ones(1, 2048)], dim=1).long()
    with LargestTensor() as largest:
        made = block_mask(segment)
    assert largest.num_elements <= 4096  # all pairs would be 16,777,216
    assert made.kv_num_blocks.tolist() == [[[1] * 32]]  # the diagonal; what is below it is visible as a whole
    assert made.full_kv_num_blocks is not None
    assert made.full_kv_num_blocks.tolist() == [[[*range(32)]]]
