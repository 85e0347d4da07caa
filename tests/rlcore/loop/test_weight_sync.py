from __future__ import annotations

import pytest
import torch

from rlcore.loop.weight_sync import lower_precision

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("engine", "learner", "expected"),
    [(FLOAT, BRAIN, BRAIN), (BRAIN, FLOAT, BRAIN), (FLOAT, FLOAT, FLOAT), (HALF, BRAIN, BRAIN), (FLOAT, HALF, HALF)],
)
def test_the_canary_allows_what_the_coarser_precision_of_the_two_needs(
    engine: torch.dtype, learner: torch.dtype, expected: torch.dtype
) -> None:
    assert lower_precision(engine, learner) == expected
