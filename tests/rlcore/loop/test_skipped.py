"""A step that meets infinity is skipped, its batch is kept, and the run ends where too many are skipped in a row."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from rlcore.config import AuditConfig, HealthConfig
from rlcore.errors import NonFiniteError
from rlcore.loop import iterate, open_run, train
from rlcore.loop.update import SAMPLES, SKIPPED, save_skipped_batch
from rlcore.training.local_learner import LocalLearner
from tests import strategies
from tests.rlcore.loop.conftest import MakeComponents, Tape, weights

UNAUDITED = HealthConfig(audit=AuditConfig(action="off"))  # which would find the gradient first, where it looks


def overflowing(learner: LocalLearner, versions: set[int]) -> None:
    """Give a learner gradients of infinity in the updates that begin with one of these versions."""
    parameter = next(learner.learner.policy.parameters())
    parameter.register_hook(
        lambda gradient: gradient * float("inf") if learner.policy_version in versions else gradient
    )


def test_a_batch_is_kept_once_with_what_was_met(tmp_path: Path) -> None:
    samples = strategies.random_samples(0)
    kept = save_skipped_batch(tmp_path, 7, samples, ["the gradient norm is inf"])
    assert save_skipped_batch(tmp_path, 7, [], []) == kept == tmp_path / SKIPPED / "iteration-00007"
    found = json.loads((kept / SAMPLES).read_text())
    assert found["errors"] == ["the gradient norm is inf"]
    assert [row["completion_ids"] for row in found["samples"]] == [list(sample.completion_ids) for sample in samples]
    assert found["samples"][0]["advantages"] == samples[0].advantages.tolist()


def test_a_run_skips_a_step_keeps_its_batch_counts_it_and_goes_on(
    make_components: MakeComponents, tmp_path: Path
) -> None:
    components, tape = make_components(health=UNAUDITED), Tape()
    overflowing(components.learner, {1})
    with open_run(components, tape) as run:
        iterate(run)
        before = weights(components)
        iterate(run)
        assert torch.equal(weights(components), before)
        iterate(run)
        assert not torch.equal(weights(components), before)
    assert [row.get("update/skipped_steps") for row in tape.rows] == [None, 1.0, None]
    assert len(json.loads((tmp_path / "run" / SKIPPED / "iteration-00002" / SAMPLES).read_text())["samples"]) == 6
    assert any("the gradient norm is" in note and SKIPPED in note for note in tape.notes)


def test_a_run_ends_after_too_many_in_a_row_and_the_row_survives_a_resume(
    make_components: MakeComponents, tmp_path: Path
) -> None:
    first = make_components(health=UNAUDITED)
    overflowing(first.learner, {1, 2, 3})
    with pytest.raises(NonFiniteError, match="the gradient norm is"):
        train(first, Tape())
    again, tape = make_components(health=UNAUDITED), Tape()
    overflowing(again.learner, {1, 2, 3})
    with pytest.raises(NonFiniteError):
        train(again, tape)
    assert (tmp_path / "run" / SKIPPED / "iteration-00004" / SAMPLES).is_file()  # of the step that ended it too
    assert tape.rows == []  # two were skipped before the kill; the third is still one too many


def test_a_batch_with_values_that_are_not_numbers_is_kept_as_json(tmp_path: Path) -> None:
    (sample, *_) = strategies.random_samples(0)
    broken = dataclasses.replace(sample, ref_logprobs=torch.full_like(sample.ref_logprobs, float("nan")))
    text = (save_skipped_batch(tmp_path, 1, [broken], ["x"]) / SAMPLES).read_text()
    assert "NaN" not in text
    assert set(json.loads(text)["samples"][0]["ref_logprobs"]) == {None}
