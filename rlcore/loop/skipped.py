"""The samples of an update that skipped a step, kept to be looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlcore.models.saving import new_folder
from rlcore.types import TrainingSample

SKIPPED = "skipped"
SAMPLES = "samples.json"
_FIELDS = ("loss_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def keep_batch(folder: Path, iteration: int, samples: Sequence[TrainingSample], errors: Sequence[str]) -> Path:
    """Write all samples of an iteration, with what its skipped steps met; returns their folder.

    An iteration that a resumed run does again has them already.

    Raises:
        StorageError: the disk is full or refuses.
    """
    target = folder / SKIPPED / f"iteration-{iteration:05d}"
    if not target.exists():
        with new_folder(target) as temporary:
            found = {"errors": list(errors), "samples": [_described(sample) for sample in samples]}
            (temporary / SAMPLES).write_text(json.dumps(found), encoding="utf-8")
    return target


def _described(sample: TrainingSample) -> dict[str, list[float]]:
    """Its tokens and numbers; a place that no loss reads may hold NaN."""
    numbers = {name: getattr(sample, name).tolist() for name in _FIELDS}
    return {"prompt_ids": list(sample.prompt_ids), "completion_ids": list(sample.completion_ids), **numbers}
