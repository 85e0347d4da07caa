from __future__ import annotations

import pytest
import torch

from rlcore.models import batching
from rlcore.models.batching import pack_for
from rlcore.models.tree_attention import WIDTHS
from rlcore.text.packing import TokenSequence
from tests import strategies

FAMILY = [TokenSequence(prompt_ids=(1, 2), completion_ids=(3,) * length) for length in (4, 5)]


class OnAGpu:
    """As much of a model as packing asks for."""

    device = torch.device("cuda")


def test_rows_have_their_own_width_on_a_cpu() -> None:
    (batch,) = pack_for(strategies.tiny_llama(), FAMILY, tokens_per_microbatch=1000)
    assert batch.token_ids.shape == (1, 11)


@pytest.mark.parametrize(("shares", "shape"), [(True, (1, 256)), (False, (2, 7))])
def test_trees_have_few_widths_on_a_gpu(shares: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each width that is new may compile the kernel again; the library's attention compiles nothing."""
    monkeypatch.setattr(batching, "supports_prompt_sharing", lambda model: shares)
    (batch,) = pack_for(OnAGpu(), FAMILY, tokens_per_microbatch=1000)
    assert batch.token_ids.shape == shape
    assert [WIDTHS.of(length) for length in (1, 256, 257, 1000)] == [256, 256, 384, 1024]


def test_a_pass_takes_trees_up_to_1024_positions_on_a_cpu_and_on_a_gpu_up_to_what_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = [TokenSequence(prompt_ids=(number,), completion_ids=(3,) * 499) for number in range(10)]
    on_cpu = pack_for(strategies.tiny_llama(), sequences, tokens_per_microbatch=8192)
    assert [batch.token_ids.numel() for batch in on_cpu] == [1000] * 5
    group = [TokenSequence(prompt_ids=(1,), completion_ids=(3,) * 499) for _ in range(5)]
    assert [
        batch.token_ids.numel() for batch in pack_for(strategies.tiny_llama(), group, tokens_per_microbatch=8192)
    ] == [1997, 500]
    monkeypatch.setattr(batching, "supports_prompt_sharing", lambda model: True)
    (on_gpu,) = pack_for(OnAGpu(), sequences, tokens_per_microbatch=8192)
    assert on_gpu.token_ids.numel() == 5120
