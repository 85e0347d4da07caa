"""The view *Results* of MLflow's list of runs; ``tests/integration/test_results_view.py`` checks it in a browser."""

from __future__ import annotations

import json

import pytest

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import RunTracker, Tracker, open_tracker
from rlcore.tasks.tracking.views import results_links, results_page, save_results_view


@pytest.fixture
def tracker(tracked_home: Home) -> Tracker:
    return open_tracker(tracked_home)


def started(tracker: Tracker, preset: str) -> RunTracker:
    return tracker.start_run(preset, "run", tags={})


def view(run: RunTracker) -> dict[str, object]:
    tags = run.client.get_experiment(run.experiment_id).tags
    (tag,) = [text for name, text in tags.items() if name.startswith("mlflow.sharedViewState.")]
    return dict(json.loads(tag))


def test_the_view_names_its_columns_and_follows_their_change(tracker: Tracker) -> None:
    tiny = started(tracker, "tiny")
    save_results_view(tiny, ["accuracy/sft", "reward/mean"])
    first = view(tiny)
    assert first["name"] == "Results"
    assert json.loads(str(first["state"])) == {"selectedColumns": ["metrics.`accuracy/sft`", "metrics.`reward/mean`"]}
    save_results_view(tiny, ["accuracy/sft", "reward/mean"])
    assert view(tiny) == first
    save_results_view(tiny, ["accuracy/grpo"])
    assert json.loads(str(view(tiny)["state"])) == {"selectedColumns": ["metrics.`accuracy/grpo`"]}


def test_a_view_that_a_user_has_changed_stays(tracker: Tracker) -> None:
    tiny = started(tracker, "tiny")
    save_results_view(tiny, ["accuracy/sft"])
    changed = view(tiny) | {"updatedAt": 4102444800000, "state": '{"selectedColumns": ["params.`seed`"]}'}
    tiny.client.set_experiment_tag(tiny.experiment_id, "mlflow.sharedViewState.results", json.dumps(changed))
    save_results_view(tiny, ["accuracy/grpo"])
    assert view(tiny) == changed


def test_a_view_of_very_many_stages_fits_into_a_tag(tracker: Tracker) -> None:
    tiny = started(tracker, "tiny")
    save_results_view(tiny, [f"accuracy/a_stage_with_quite_a_long_name_{number}" for number in range(500)])
    assert view(tiny)["name"] == "Results"


def test_presets_that_have_a_view_are_compared_and_foreign_experiments_are_not(
    tracker: Tracker, tracked_home: Home
) -> None:
    tiny, mine = started(tracker, "tiny"), started(tracker, "mine")
    started(tracker, "of another team")
    assert results_page(tracked_home) == ""
    save_results_view(tiny, ["reward/mean"])
    assert "compare" not in results_links(tiny)
    assert results_page(tracked_home) == f"#/experiments/{tiny.experiment_id}/runs?viewStateShareKey=results"
    save_results_view(mine, ["reward/mean"])
    assert results_page(tracked_home) in results_links(mine)
    links = results_links(mine)
    assert f"(#/experiments/{mine.experiment_id}/runs?viewStateShareKey=results)" in links
    assert f"/s?experiments=%5B%22{mine.experiment_id}%22%2C%22{tiny.experiment_id}%22%5D&" in links
