"""Fields of a model card's header that model hubs read: results, datasets, base model and license."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from rlcore.tasks.store.cache import Record

_HUB = re.compile(r"hub:(?P<name>[^@]+)@(?P<revision>[0-9a-f]{40})")
_METRIC = re.compile(r"eval/(accuracy|pass_at_(?P<k>\d+)|data/(?P<data>.+))")


def header_fields(
    record: Record, base: Mapping[str, Any], *, data: Sequence[Mapping[str, Any]], index: Sequence[Any]
) -> dict[str, Any]:
    """Return the header of the card of ``record``'s model.

    ``data``: reports of its training data. ``index``: from :func:`model_index`.
    """
    license_id = str(base.get("licence", ""))
    is_scorer = record.ref.kind == "reward_model"
    found: dict[str, Any] = {
        "license": license_id.lower() or "unknown",
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if is_scorer else "text-generation",
        "tags": ["rlcore", record.ingredients["stage"]["name"]],
    }
    if base.get("source") == "hub":
        found |= {"base_model": base["path"], "base_model_relation": "finetune"}
    names = [match["name"] for each in data if (match := _HUB.match(str(each.get("source", ""))))]
    if names:
        found["datasets"] = list(dict.fromkeys(names))
    return found | ({"model-index": list(index)} if index else {})


def model_index(name: str, evaluation: Record | None, data: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of an evaluation in the form of model hubs: metric, dataset, number of problems, interval.

    ``data``: reports of the datasets that it read.
    """
    if evaluation is None:
        return []
    results = list(_results(evaluation, data))
    return eval_results_to_model_index(name, results) if results else []


def _results(evaluation: Record, data: Sequence[Mapping[str, Any]]) -> Iterator[EvalResult]:
    metrics = evaluation.metrics
    settings = evaluation.ingredients["config"].get("evaluation", {})
    problems = int(metrics.get("eval/problems", 0))
    for key, value in sorted(metrics.items()):
        if not (match := _METRIC.fullmatch(key)) or key.endswith(("_low", "_high")):
            continue
        own = [each for each in data if each["stage"] == f"prepare_{match['data']}"] if match["data"] else data
        interval = [metrics[f"{key}_{end}"] for end in ("low", "high") if f"{key}_{end}" in metrics]
        known = {"interval": interval, "confidence": settings.get("confidence") if interval else None}
        if not match["data"]:  # pass@k is of fewer problems than accuracy
            known["n"] = min(problems, settings["num_sampled_problems"]) if match["k"] else problems
        yield EvalResult(
            task_type="text-generation",
            **_dataset(own, match["data"] or "held-out problems"),
            metric_type="accuracy" if match["data"] else key.removeprefix("eval/"),
            metric_value=value,
            metric_args={name: each for name, each in known.items() if each},
        )


def _dataset(data: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return name, type and revision of the evaluated rows: the hub's if all are from one dataset of it."""
    sources = dict.fromkeys(str(each.get("source", "")) for each in data)
    if len(sources) == 1 and (match := _HUB.match(next(iter(sources)))):
        named = {"dataset_name": match["name"], "dataset_type": match["name"], "dataset_revision": match["revision"]}
    else:
        named = {"dataset_name": ", ".join(filter(None, sources)) or name, "dataset_type": name}
    return named | {"dataset_split": "held out"}
