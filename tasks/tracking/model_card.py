"""Model card of a registered version: Markdown from records and reports, with the header of model hubs.

A card is written at registration, and again when an evaluation or a decision adds to it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rlcore.errors import StorageError
from rlcore.tasks.store.artifacts import REPORT
from rlcore.tasks.store.cache import Record, describe_machine
from rlcore.tasks.store.markdown import code, code_cell, plain
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import flatten, read_json
from rlcore.tasks.tracking.lineage import Ancestor, ancestry, nodes, read_records, record_of, tree_lines
from rlcore.tasks.tracking.mlflow_model import CARD, Card
from rlcore.tasks.tracking.registry import ModelVersion, read_tags
from rlcore.tasks.tracking.runs import Tracker

_DIGITS = 12
_HUB = re.compile(r"hub:(?P<name>[^@]+)@(?P<revision>[0-9a-f]{40})")
_METRIC = re.compile(r"eval/(accuracy|pass_at_(?P<k>\d+)|data/(?P<data>.+))")
_NOT_YET = "No decision yet: no promotion has compared it with a champion."
_INTENDED = """It answers questions of the kind of its training data, in the chat format of its tokenizer. It is a
checkpoint of a training pipeline: nothing was measured beyond the results above."""
_SCORES = """It scores answers to questions of the kind of its training data, as a reward or to rank them. A score is no
probability that an answer is right."""
_LIMITS = """- The results hold for these held-out problems. Other tasks, languages and formats were not measured.
- No test for harmful, biased or untrue answers was made unless the table of results names one.
- A model may have learned to exploit its rewards without being better.
- Weaknesses of the base model remain."""


def write_card(
    home: Home,
    records: Sequence[Record],
    record: Record,
    *,
    name: str,
    version: int | None,
    tags: Mapping[str, str],
    repo: str = "",
) -> Card:
    """Write the card of the model of ``record``, registered under ``name`` with ``tags``.

    ``version``: None before the registration. ``repo``: the hub's repository that the card is for.
    """
    root = ancestry(home, tuple(records), record)
    base: Mapping[str, Any] = next(
        filter(None, (_read(home, node, "model/model_card.json") for node in nodes(root))), {}
    )
    data = _data_sets_of(home, root)
    license_id = str(base.get("licence", ""))
    evaluated = _evaluation(records, record)
    read = _data_sets_of(home, ancestry(home, tuple(records), evaluated)) if evaluated else []
    used = evaluated.ingredients["inputs"] if evaluated else ()
    results = list(_eval_results(evaluated, [each for each in read if each["stage"] in used])) if evaluated else []
    header = _header(name, record, base, data=data, results=results)
    sections = {
        "": _what(code(name) + (f" version {version}" if version else ""), record, base),
        "How to load it": _loading(f"models:/{name}/{version or 'VERSION'}", record, repo),
        "Results": _results(evaluated or record, is_evaluated=evaluated is not None),
        "Decision": _decision(tags),
        "Training data": _data_table(data),
        "License": _license(license_id),
        "Intended use": _SCORES if _is_reward_model(record) else _INTENDED,
        "Limits": _LIMITS,
        "Lineage": "```text\n" + "\n".join(tree_lines(root)) + "\n```",
        "Training": _training(record),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" if title else text for title, text in sections.items())
    text = f"---\n{header.to_yaml()}\n---\n# {code(name)}\n\n{body}\n"
    return Card(text=text, license_id=license_id)


def body_of(card: str) -> str:
    """Return a card without its YAML header."""
    return card.split("\n---\n", 1)[-1].strip()


def _header(
    name: str,
    record: Record,
    base: Mapping[str, Any],
    *,
    data: Sequence[Mapping[str, Any]],
    results: list[EvalResult],
) -> ModelCardData:
    is_of_hub = base.get("source") == "hub"
    names = [match["name"] for each in data if (match := _HUB.match(str(each.get("source", ""))))]
    return ModelCardData(
        license=str(base.get("licence", "")).lower() or "unknown",
        library_name="transformers",
        pipeline_tag="text-classification" if _is_reward_model(record) else "text-generation",
        tags=["rlcore", record.ingredients["stage"]["name"]],
        base_model=base["path"] if is_of_hub else None,
        base_model_relation="finetune" if is_of_hub else None,
        datasets=list(dict.fromkeys(names)) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def _eval_results(evaluation: Record, data: Sequence[Mapping[str, Any]]) -> Iterator[EvalResult]:
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
    sources = dict.fromkeys(str(each.get("source", "")) for each in data)
    if len(sources) == 1 and (match := _HUB.match(next(iter(sources)))):
        named = {"dataset_name": match["name"], "dataset_type": match["name"], "dataset_revision": match["revision"]}
    else:
        named = {"dataset_name": ", ".join(filter(None, sources)) or name, "dataset_type": name}
    return named | {"dataset_split": "held out"}


def _what(name: str, record: Record, base: Mapping[str, Any]) -> str:
    stage = record.ingredients["stage"]["name"]
    lines = [f"{name} is the checkpoint of the stage {code(stage)}, made {record.created[:10]} by rlcore."]
    if base:
        origin = f"{base['path']}@{base['revision'][:_DIGITS]}" if base.get("revision") else base.get("path", "")
        origin = "/".join(filter(None, (origin, base.get("file", ""))))
        size = f"{base.get('num_parameters', 0) / 1e6:.2f} M parameters"
        lines.append(f"Its base is a {base.get('architecture', 'model')} of {size}, source {code(base.get('source'))}")
        lines[-1] += f": {code(origin)}." if origin else "."
    return " ".join(lines)


def _training(record: Record) -> str:
    ingredients = record.ingredients
    settings = flatten(ingredients["config"].get("stage", {})).items()
    facts = {
        "seed": ingredients["seed"],
        "code": record.code,
        "machine": describe_machine(ingredients.get("machine", {})),
        "seconds": f"{record.seconds:.0f}",
    }
    rows = [(name, value) for name, value in (*facts.items(), *settings) if value not in (None, "", [])]
    return _table(["setting", "value"], [map(code_cell, row) for row in rows])


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def _evaluation(records: Sequence[Record], record: Record) -> Record | None:
    stage = record.ingredients["stage"]["name"]
    made = [
        each
        for each in records
        if each.ref.kind == "evaluation" and each.ingredients["inputs"].get(stage) == record.ref.sha256
    ]
    return max(made, key=lambda each: each.created, default=None)


def _results(record: Record, *, is_evaluated: bool) -> str:
    where = "The whole evaluation on held-out problems:" if is_evaluated else "At the end of training:"
    rows = [(code_cell(name), f"{value:.6g}") for name, value in sorted(record.metrics.items())]
    return f"{where}\n\n{_table(['figure', 'value'], rows)}" if rows else "None were measured."


def _decision(tags: Mapping[str, str]) -> str:
    lines = [plain(tags.get("verdict") or _NOT_YET)]
    if tags.get("awaits"):
        lines.append("It awaits an approval.")
    if over := tags.get("promoted_over"):
        lines.append("It became champion" + (f" instead of version {plain(over)}." if over != "none" else "."))
    if reason := tags.get("rolled_back"):
        lines.append(f"It was rolled back: {plain(reason)}")
    return " ".join(lines)


def _license(name: str) -> str:
    return f"The base model's: {plain(name)}." if name else "None was declared for the base model: find out before use."


def _loading(uri: str, record: Record, repo: str) -> str:
    if repo:
        return f"""```python
from transformers import pipeline

chat = pipeline("text-generation", {json.dumps(repo)})
```

vLLM: `vllm serve {repo}`."""
    if _is_reward_model(record):
        return "Its heads are rlcore's own: `rlcore.models.reward_ensemble.load_reward_model` reads them from `model/`."
    return f"""```python
import mlflow

chat = mlflow.transformers.load_model({json.dumps(uri)})  # a pipeline that takes messages
```

An exported folder is loaded by its path, with `AutoModelForCausalLM` and `AutoTokenizer` of transformers or by vLLM."""


def _is_reward_model(record: Record) -> bool:
    return record.ref.kind == "reward_model"


def _data_table(data: Sequence[Mapping[str, Any]]) -> str:
    if not data:
        return "None: it is as it was imported."
    rows = [
        [
            *(code_cell(each.get(name, "")) for name in ("stage", "contract", "source")),
            *(str(each.get(name, "")) for name in ("num_train", "num_eval")),
            code_cell(str(each.get("digest", ""))[:_DIGITS]),
        ]
        for each in data
    ]
    return _table(["dataset", "contract", "source", "for training", "held out", "digest of the rows"], rows)


def _data_sets_of(home: Home, root: Ancestor) -> list[Mapping[str, Any]]:
    found = {node.sha256: (node, _read(home, node, REPORT)) for node in nodes(root)}
    return [{"stage": node.stage, **report} for node, report in found.values() if "contract" in report]


def _read(home: Home, node: Ancestor, name: str) -> Mapping[str, Any]:
    """Return a JSON object among the files of a result; empty without one."""
    for path in sorted(home.artifacts.glob(f"*/{node.sha256}/{name}")) if node.sha256 else ():
        with suppress(StorageError):  # damaged: the stage is computed again when it is needed
            document = read_json(path)
            if isinstance(document, Mapping):
                return document
    return {}


_MAX_LETTERS = 5000  # characters of a description in MLflow's tables
_MORE = f"\n\n(The whole card is the file {CARD} of the model.)"


def refresh_cards(home: Home, tracker: Tracker, versions: Iterable[ModelVersion]) -> None:
    """Write the cards of versions: after the registration, an evaluation, a decision, or a rollback.

    Versions without a record in this state directory are unchanged.
    """
    records = read_records(home)
    for version in versions:
        tags = read_tags(tracker, version)
        record = record_of(tags, records)
        if record is not None and version.model_id:
            card = write_card(home, records, record, name=version.name, version=version.version, tags=tags)
            _replace(tracker, version, card.text)


def _replace(tracker: Tracker, version: ModelVersion, card: str) -> None:
    known = tracker.client.get_model_version(version.name, str(version.version)).description
    if known == _description(card):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CARD
        path.write_text(card, encoding="utf-8")
        tracker.client.log_model_artifact(version.model_id, str(path))
    # Last, so that a killed call is repeated.
    tracker.client.update_model_version(version.name, str(version.version), _description(card))


def _description(card: str) -> str:
    body = body_of(card)
    return body if len(body) <= _MAX_LETTERS else body[: _MAX_LETTERS - len(_MORE)].rpartition("\n")[0] + _MORE
