"""Columns of MLflow's list of runs: a named view, which its interface keeps in a tag of the experiment.

Without one the list shows no metric. The tag's form is that of the *Views* menu of MLflow 3.17.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from urllib.parse import quote

from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.runs import RunTracker

_KEY = "results"
_TAG = f"mlflow.sharedViewState.{_KEY}"
_NAME = "Results"
_MAX_COLUMNS = 50  # MLflow's limit for a tag is 5000 characters


def save_results_view(run: RunTracker, metrics: Sequence[str]) -> None:
    """Show these metrics as columns in the view *Results* of a run's experiment, unless a user changed it."""
    columns = [f"metrics.`{name}`" for name in metrics[:_MAX_COLUMNS]]
    state = json.dumps({"selectedColumns": columns})
    known = json.loads(run.client.get_experiment(run.experiment_id).tags.get(_TAG, "{}"))
    if known.get("state") == state or known.get("createdAt") != known.get("updatedAt"):
        return
    now = int(time.time() * 1000)
    view = {"name": _NAME, "createdAt": now, "updatedAt": now, "state": state}
    run.client.set_experiment_tag(run.experiment_id, _TAG, json.dumps(view))


def results_links(run: RunTracker) -> str:
    """Return Markdown links to the view of a run's experiment, and to a comparison with the others that have one."""
    found = run.client.search_experiments(filter_string=f"tags.`{_TAG}` LIKE '%'")
    others = [each.experiment_id for each in found if each.experiment_id != run.experiment_id]
    links = f"[results of this preset]({_page([run.experiment_id])})"
    return f"{links}, [of all presets]({_page([run.experiment_id, *others])})" if others else links


def results_page(home: Home) -> str:
    """Return the page of all presets' results below the address of MLflow; empty if no run of this home has ended."""
    with closing(sqlite3.connect(home.root / "mlflow.db")) as database:
        query = (
            "SELECT experiment_id FROM experiment_tags JOIN experiments USING (experiment_id) "
            "WHERE key = ? AND lifecycle_stage = 'active' ORDER BY experiment_id DESC"
        )
        found = [str(number) for (number,) in database.execute(query, (_TAG,))]
    return _page(found) if found else ""


def _page(experiments: Sequence[str]) -> str:
    if len(experiments) == 1:
        return f"#/experiments/{experiments[0]}/runs?viewStateShareKey={_KEY}"
    ids = quote(json.dumps(experiments, separators=(",", ":")))
    return f"#/compare-experiments/s?experiments={ids}&viewStateShareKey={_KEY}"
