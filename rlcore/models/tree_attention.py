"""Attention over packed trees that computes only what is visible: the one place where its kernel is chosen.

    CPU    flash attention by pieces: prompts and completions, each causal in itself, then the completions of a tree
           over its prompt; the two are merged by their log-sum-exp, and the backward pass is exact
    CUDA   FlexAttention with the tree as its mask
    else   the library's SDPA under the dense mask, which is the reference of the tests; on a CPU also for layers that
           look back over a window shorter than a sequence

A model gets it by ``model.set_attn_implementation(TREE_ATTENTION)``. The layout reaches the layers as the argument
``tree``; without packing the library's function is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlcore.errors import ModelError
from rlcore.models.block_mask import BLOCK, block_mask
from rlcore.text.packing import Widths, tree_mask

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

TREE_ATTENTION = "rlcore_tree"
WIDTHS = Widths(multiple=BLOCK, minimum=2 * BLOCK)  # below, FlexAttention compiles kernels of another kind
_KINDS_OF_INPUT = 128
# What layers hand to an attention that changes nothing in it, or is computed.
_COMPUTED = frozenset(("scaling", "sliding_window", "is_causal", "dropout"))
_OF_OTHERS = frozenset(("position_ids", "cache_position", "use_cache", "cache", "past_key_values", "return_dict"))
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Tree:
    """One row: a prompt ``[0, prompt_end)`` and its completions, as (start, end) in the row."""

    row: int
    prompt_end: int
    branches: tuple[tuple[int, int], ...]

    @property
    def causal_pieces(self) -> tuple[tuple[int, int], ...]:
        """What attends to itself: a lone completion is one sequence with its prompt."""
        if len(self.branches) == 1:
            return ((0, self.branches[0][1]),)
        return ((0, self.prompt_end), *self.branches)

    @property
    def end(self) -> int:
        """One past the last token that is not padding."""
        return self.branches[-1][1] if self.branches else self.prompt_end

    @property
    def depth(self) -> int:
        """Tokens of the prompt with its longest completion."""
        return self.prompt_end + max((end - start for start, end in self.branches), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """Where the pieces of a batch's rows lie.

    ``segment``: int64 [B, T]. ``trees``: on a CPU alone, since a GPU would have to be waited for. ``depth``: tokens of
    the longest prompt with a completion, or what bounds it. ``masks``: those made so far, by their window.
    """

    segment: Int[Tensor, "batch time"]
    trees: tuple[Tree, ...]
    depth: int
    masks: dict[int | None, Any] = field(default_factory=dict)

    def mask(self, make: Callable[..., Any], window: int | None) -> Any:
        """The mask of a window, made by ``make(segment, window=window)`` for the first layer that asks."""
        if window not in self.masks:
            self.masks[window] = make(self.segment, window=window)
        return self.masks[window]


def layout_of(segment: Int[Tensor, "batch time"]) -> TreeLayout:
    """The layout of rows of segments, int64 [B, T] (0 prompt, k the k-th completion, -1 padding)."""
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
    """transformers' ``AttentionInterface``: query [B, heads, T, width], key and value [B, kv_heads, T, width].

    With a tree the mask is the batch's segments, int64 [B, 1, 1, T]; returns [B, T, heads, width]. A layer that looks
    back over a window which is shorter than a sequence computes under the dense mask on a CPU.

    Raises:
        ModelError: the layer asks for something that is not computed here, such as a soft-cap or sinks.
    """
    refuse_unknown(module, options)
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        # Under autocast the rotation leaves queries and keys in float32, and kernels want one precision.
        query, key = query.to(value.dtype), key.to(value.dtype)
        tree = tree or layout_of(attention_mask[:, 0, 0])
        scale, window = options.get("scaling"), options.get("sliding_window")
        window = window if window is not None and window < tree.depth else None
        if query.device.type == "cuda":
            return _by_flex(query, key, value, tree, scale=scale, window=window), None
        if query.device.type == "cpu" and window is None and query.shape[-1] == value.shape[-1]:
            return _by_pieces(query, key, value, tree, scale=scale), None
        attention_mask = tree.mask(tree_mask, window)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output, None


def refuse_unknown(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Make sure that an attention layer asks for nothing that would be left out.

    Raises:
        ModelError: it does.
    """
    asked = {name for name, value in options.items() if value is not None and value is not False}
    unknown = asked - _COMPUTED - _OF_OTHERS - {name for name in asked if name.startswith("output_")}
    if unknown or options.get("dropout"):
        raise ModelError(
            f"{type(module).__name__} wants {', '.join(sorted(unknown)) or 'dropout'} in its attention",
            fix="use a model of docs/models.md: this option is not computed here",
        )


class _Pieces(torch.autograd.Function):
    """Flash attention by pieces. A token's two parts, its own piece and its prompt, are merged by their log-sum-exp,
    and either's gradient is what flash attention computes from the merged output and log-sum-exp.
    """

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
        normaliser = query.new_zeros(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for tree in layout.trees:
            one = slice(tree.row, tree.row + 1)
            for start, end in tree.causal_pieces:
                at = (one, slice(None), slice(start, end))
                output[at], normaliser[at] = _flash(query[at], key[at], value[at], 0.0, True, scale=scale)
            if len(tree.branches) > 1:
                prompt, rest = (one, slice(None), slice(tree.prompt_end)), _rest(tree)
                above, above_normaliser = _flash(query[rest], key[prompt], value[prompt], scale=scale)
                share = torch.sigmoid(above_normaliser - normaliser[rest])[..., None]
                # In at least float32: in half precision the merged output would be rounded three times, not once.
                output[rest] = output[rest].to(share.dtype).lerp(above.to(share.dtype), share)
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
            for total, place, part in zip(sums, (at, seen, seen), parts, strict=True):
                total[place] += part

        for tree in ctx.layout.trees:
            one = slice(tree.row, tree.row + 1)
            for start, end in tree.causal_pieces:
                piece = (one, slice(None), slice(start, end))
                add(piece, piece, True)
            if len(tree.branches) > 1:
                add(_rest(tree), (one, slice(None), slice(tree.prompt_end)), False)
        return *sums, None, None


def _rest(tree: Tree) -> tuple[slice, ...]:
    """All completions of a tree: they stand side by side behind the prompt."""
    return slice(tree.row, tree.row + 1), slice(None), slice(tree.prompt_end, tree.end)


def _by_pieces(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, *, scale: float | None) -> Tensor:
    output: Tensor = _Pieces.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)


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
    """FlexAttention, compiled once for each kind of input: one row or many, with and without gradient, each precision,
    head and window. With ``fullgraph`` one kind too many raises; otherwise it would run unfused, in O(T²) memory.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS_OF_INPUT)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
