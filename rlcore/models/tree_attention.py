"""Attention over packed trees that computes only visible pairs, with one kernel per device.

    CPU    flash attention by pieces: prompts and completions, each causal in itself, then the completions of a tree
           over its prompt; the two are merged by their log-sum-exp, and the backward pass is exact
    CUDA   FlexAttention with the tree as its mask
    else   the library's SDPA with the dense mask, which is the reference of the tests; on a CPU also for layers
           with a window shorter than a sequence

Enabled by ``model.set_attn_implementation(TREE_ATTENTION)``. Layers get the layout as ``tree``; without it they call
the library's function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlcore.errors import ModelError
from rlcore.hardware.precision import at_least_float32
from rlcore.text.packing import Widths, tree_mask, tree_positions

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped


TREE_ATTENTION = "rlcore_tree"
BLOCK = 128
WIDTHS = Widths(multiple=BLOCK, minimum=2 * BLOCK)  # below, FlexAttention compiles another kind of kernel
_KINDS_OF_INPUT = 128
# Arguments of layers: those that are computed here, and those without effect on attention.
_COMPUTED = frozenset(("scaling", "sliding_window", "is_causal", "dropout"))
_IGNORED = frozenset(("position_ids", "cache_position", "use_cache", "cache", "past_key_values", "return_dict"))
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Tree:
    """Row of a batch: a prompt ``[0, prompt_end)`` and its completions, as (start, end) in the row."""

    row: int
    prompt_end: int
    branches: tuple[tuple[int, int], ...]

    @property
    def causal_pieces(self) -> tuple[tuple[int, int], ...]:
        """Spans that attend to themselves; a single completion is one span with its prompt."""
        if len(self.branches) == 1:
            return ((0, self.branches[0][1]),)
        return ((0, self.prompt_end), *self.branches)

    @property
    def end(self) -> int:
        """End of the last token that is not padding."""
        return self.branches[-1][1] if self.branches else self.prompt_end

    @property
    def depth(self) -> int:
        """Tokens of the prompt with its longest completion."""
        return self.prompt_end + max((end - start for start, end in self.branches), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """Layout of a batch's rows, with segments [B, T].

    Attributes:
        trees: On a CPU only: a GPU would synchronize.
        depth: Tokens of the longest prompt with a completion, or an upper bound.
    """

    segment: Int[Tensor, "batch time"]
    trees: tuple[Tree, ...]
    depth: int
    masks: dict[int | None, Any] = field(default_factory=dict)

    def mask(self, make: Callable[..., Any], window: int | None) -> Any:
        """Return the mask of a window, created by ``make(segment, window=window)`` on first use."""
        if window not in self.masks:
            self.masks[window] = make(self.segment, window=window)
        return self.masks[window]


def layout_of(segment: Int[Tensor, "batch time"]) -> TreeLayout:
    """Return the layout of segments, int64 [B, T] (0 prompt, k the k-th completion, -1 padding)."""
    if segment.device.type != "cpu":
        return TreeLayout(segment, (), segment.shape[1])
    trees = []
    for row, codes in enumerate(segment):
        values, counts = codes.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0).tolist()
        spans = list(zip(values.tolist(), [0, *ends[:-1]], ends, strict=True))
        branches = tuple((start, end) for code, start, end in spans if code > 0)
        trees.append(Tree(row, spans[0][2], branches))
    return TreeLayout(segment, tuple(trees), max(tree.depth for tree in trees))


def tree_attention_forward(
    module: torch.nn.Module,
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch kv_heads keys width"],
    value: Float[Tensor, "batch kv_heads keys value_width"],
    attention_mask: Shaped[Tensor, "..."] | None,
    *,
    tree: TreeLayout | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch queries heads value_width"], None]:
    """Compute attention as transformers' ``AttentionInterface``. With a tree, the mask is its segments [B, 1, 1, T].

    Raises:
        ModelError: The layer needs an option that is not supported here, such as a soft-cap or sinks.
    """
    refuse_unknown(module, options)
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        tree = tree or layout_of(attention_mask[:, 0, 0])
        scale, window = options.get("scaling"), options.get("sliding_window")
        window = window if window is not None and window < tree.depth else None
        if query.device.type == "cpu" and window is None and query.shape[-1] == value.shape[-1]:
            return _by_pieces(query, key, value, tree, scale=scale), None
        # Under autocast, rotary embeddings return float32 queries and keys; kernels need one precision.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if query.device.type == "cuda":
            return _by_flex(query, key, value, tree, scale=scale, window=window), None
        attention_mask = tree.mask(tree_mask, window)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output, None


def refuse_unknown(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Check that an attention layer uses no unsupported option.

    Raises:
        ModelError: It does.
    """
    used = {name for name, value in options.items() if value is not None and value is not False}
    unknown = used - _COMPUTED - _IGNORED - {name for name in used if name.startswith("output_")}
    if unknown or options.get("dropout"):
        raise ModelError(
            f"{type(module).__name__} uses {', '.join(sorted(unknown)) or 'dropout'} in its attention",
            fix="this option is not supported: use a model of docs/models.md",
        )


class _Pieces(torch.autograd.Function):
    """Flash attention by pieces; the gradient of each is that with the merged output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: TreeLayout,
        scale: float | None,
    ) -> Tensor:
        output = torch.zeros_like(query)
        normaliser = query.new_zeros(query.shape[:3])
        for tree in layout.trees:
            one = slice(tree.row, tree.row + 1)
            for start, end in tree.causal_pieces:
                at = (one, slice(None), slice(start, end))
                output[at], normaliser[at] = _flash(query[at], key[at], value[at], 0.0, True, scale=scale)
            if len(tree.branches) > 1:
                prompt, rest = (one, slice(None), slice(tree.prompt_end)), _rest(tree)
                above, above_normaliser = _flash(query[rest], key[prompt], value[prompt], scale=scale)
                fraction = torch.sigmoid(above_normaliser - normaliser[rest])[..., None]
                output[rest] = output[rest].lerp(above, fraction)
                normaliser[rest] = torch.logaddexp(above_normaliser, normaliser[rest])
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        (gradient,) = gradients
        sums = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

        def add(at: tuple[slice, ...], seen: tuple[slice, ...], is_causal: bool) -> None:
            parts = _flash_backward(
                gradient[at], query[at], key[seen], value[seen], output[at], normaliser[at], 0.0, is_causal,
                scale=ctx.scale,
            )  # fmt: skip
            for total, region, part in zip(sums, (at, seen, seen), parts, strict=True):
                total[region] += part

        for tree in ctx.layout.trees:
            one = slice(tree.row, tree.row + 1)
            for start, end in tree.causal_pieces:
                piece = (one, slice(None), slice(start, end))
                add(piece, piece, True)
            if len(tree.branches) > 1:
                add(_rest(tree), (one, slice(None), slice(tree.prompt_end)), False)
        return *sums, None, None


def _rest(tree: Tree) -> tuple[slice, ...]:
    return slice(tree.row, tree.row + 1), slice(None), slice(tree.prompt_end, tree.end)


def _by_pieces(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, *, scale: float | None) -> Tensor:
    """Compute in float32 at least: in half precision the backward pass takes twice as long on a CPU."""
    inputs = map(at_least_float32, (query, key, value))
    output: Tensor = _Pieces.apply(*inputs, layout, scale)  # type: ignore[no-untyped-call]
    return output.to(value.dtype).transpose(1, 2)


def _by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    output: Tensor = _compiled_flex()(
        query,
        key,
        value,
        block_mask=layout.mask(block_mask, window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    # With fullgraph, an excess of kinds of input raises; otherwise it would run unfused, in O(T²) memory.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS_OF_INPUT)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)


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
    """Lowest and highest segment and position of each block [B, N], and its padding."""

    first: Tensor
    last: Tensor
    nearest: Tensor
    furthest: Tensor
    is_padded: Tensor

    @classmethod
    def of(cls, segment: Tensor, position: Tensor) -> _Blocks:
        missing = -segment.shape[1] % BLOCK
        shape = (len(segment), -1, BLOCK)
        codes = functional.pad(segment, (0, missing), value=-1).reshape(shape)
        at = functional.pad(position, (0, missing)).reshape(shape)
        is_token = codes >= 0
        lowest, nearest = (x.where(is_token, _ABOVE).amin(-1) for x in (codes, at))
        return cls(lowest, codes.amax(-1), nearest, at.where(is_token, -1).amax(-1), ~is_token.all(-1))


def _visible_blocks(blocks: _Blocks, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the query blocks that see some, and all, of each key block: bool [B, N, N] each."""
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
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None], order[:, None]
