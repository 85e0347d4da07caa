"""Documentation of a registered version for people outside of the team, from records.

The fields are those of the Model Documentation Form of the EU's Code of Practice for general-purpose AI models,
followed by a data sheet for each dataset. What no record has is "not stated" and left to a person. The document claims
no compliance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import StorageError
from rlcore.tasks.store.cache import Record
from rlcore.tasks.store.markdown import code, plain
from rlcore.tasks.store.settings import Home
from rlcore.tasks.store.storage import read_json
from rlcore.tasks.tracking.lineage import Ancestor, find_lineage, nodes, read_records
from rlcore.tasks.tracking.model_card import base_of, data_sets_of

NOT_STATED = "not stated"
_FACTS = """Rendered from records of the pipeline. A field that no record has is "not stated": a person fills it.
Nothing here is a statement about compliance with a law."""
_FLOP = "6 FLOP per parameter and trained token, 2 per parameter and sampled token; prompts of rollouts do not count"
_KINDS = {"sft": 1, "dpo": 2, "reward_model": 2}  # stages that train on rows, and the answers of a row
Fields = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Computation of a training stage; ``trained`` and ``sampled`` tokens are None where records do not tell."""

    stage: str
    hours: float
    trained: float | None
    sampled: float = 0.0

    def flop(self, parameters: float) -> float | None:
        """Return the floating point operations of the stage."""
        return None if self.trained is None else parameters * (6 * self.trained + 2 * self.sampled)


def document_model(home: Home, model: str, *, watts: float | None = None) -> str:
    """Return the documentation of a registered version as Markdown. ``watts``: mean power of the machine.

    Raises:
        ModelError: no such version, or another state directory made it.
    """
    tags, root = find_lineage(home, model)
    records = read_records(home)
    chain = _chain(records, root)
    record = next(each for each in records if each.key == tags["stage_key"])
    base, data = base_of(home, records, root), data_sets_of(home, records, root)
    efforts = [effort for each in chain if (effort := _effort(home, each, data))]
    parameters = float(base.get("num_parameters") or 0)
    sections: dict[str, Fields] = {
        "General information": _general(tags, record, base),
        "Model properties": {
            "Architecture": base.get("architecture"),
            "Design specification": None,
            "Input modalities and their limits": _positions(base),
            "Output modalities and their limits": _positions(base),
            "Total size in parameters": f"{parameters:.3g}" if parameters else None,
        },
        "Distribution and licences": {
            "Distribution channels": None,
            "License of the base": base.get("licence"),
            "License of this model": None,
            "Additional assets": None,
        },
        "Use": dict.fromkeys(
            ("Acceptable use policy", "Intended and restricted uses", "Systems that it can be part of",
             "Technical means of integration", "Required hardware", "Required software")
        ),
        "Training process": _training(record, chain),
        "Data for training, testing and validation": _data(data) | {"Rows erased since": tags.get("erasure", "none")},
        "Computational resources of training": _resources(efforts, parameters),
        "Energy": _energy(efforts, watts),
    }  # fmt: skip
    pages = [f"# Documentation of {code(tags['name'])} version {tags['version']}", _FACTS]
    pages += [f"## {title}\n\n{_table(fields)}" for title, fields in sections.items()]
    pages += [f"## Data sheet: {code(each['stage'])}\n\n{_table(_sheet(each))}" for each in data]
    return "\n\n".join(pages) + "\n"


def _general(tags: Mapping[str, str], record: Record, base: Mapping[str, Any]) -> Fields:
    origin = f"{base.get('path', '')}@{base['revision']}" if base.get("revision") else base.get("path")
    return {
        "Legal name of the provider": None,
        "Model and version": f"{tags['name']} version {tags['version']}",
        "Authenticity: digest of the artifact": f"SHA-256 {record.ref.sha256}",
        "Made": record.created,
        "Release date": None,
        "Release date in the Union": None,
        "Model that it depends on": f"{base.get('source')}: {origin}" if origin else base.get("source"),
    }


def _training(record: Record, chain: Sequence[Record]) -> Fields:
    kinds = [f"{_name(each)} ({kind})" for each in chain if (kind := _kind(each))]
    settings = record.ingredients["config"].get("stage", {})
    shown = ("algorithm", "learning_rate", "num_iterations", "num_steps", "num_epochs", "batch_size", "group_size")
    return {
        "Stages, first to last": ", ".join(kinds),
        "Settings of the last stage": ", ".join(f"{name} {settings[name]}" for name in shown if name in settings),
        "Seed and code": f"{record.ingredients['seed']}, {record.code}",
        "Rationale of decisions": None,
    }


def _data(data: Sequence[Mapping[str, Any]]) -> Fields:
    return {
        "Modality": "text" if data else None,
        "Provenance": ", ".join(dict.fromkeys(str(each.get("source")) for each in data)),
        "How it was obtained and selected": None,
        "Number of rows": ", ".join(
            f"{each['stage']}: {each['num_train']} + {each['num_eval']} held out" for each in data
        ),
        "Scope and main characteristics": None,
        "Curation": "rules, rejected rows and near duplicates: the data sheets below" if data else None,
        "Measures against unsuitable sources": None,
        "Measures against identifiable biases": None,
    }


def _resources(efforts: Sequence[Effort], parameters: float) -> Fields:
    found: dict[str, object] = {}
    for each in efforts:
        flop = each.flop(parameters) if parameters else None
        shown = f"{flop:.3g} FLOP" if flop is not None else f"FLOP {NOT_STATED}"
        found[f"Stage {each.stage}"] = f"{shown}, {each.hours:.3g} hours"
    flops = [each.flop(parameters) for each in efforts]
    known = [flop for flop in flops if flop is not None]
    return {
        **found,
        "Training time": f"{sum(each.hours for each in efforts):.3g} hours" if efforts else None,
        "Computation": f"{sum(known):.3g} FLOP (estimate)" if known and len(known) == len(flops) else None,
        "Measurement": _FLOP if known else None,
        "Computation of the base model's training": None,
    }


def _energy(efforts: Sequence[Effort], watts: float | None) -> Fields:
    hours = sum(each.hours for each in efforts)
    known = watts is not None and efforts
    return {
        "Energy of training": f"{hours * watts / 1000:.3g} kWh (estimate)" if known and watts else None,
        "Measurement": f"hours of the stages times {watts:g} W, as given" if known else None,
        "Energy of the base model's training": None,
        "Computation of inference": None,
    }


def _sheet(report: Mapping[str, Any]) -> Fields:
    reasons = [f"{reason}: {count}" for reason, count in report.get("reasons", {}).items()]
    rules = [f"{each['name']} {'met' if each['ok'] else 'not met'}" for each in report.get("rules", ())]
    return {
        "Purpose": None,
        "Collected by, and how": None,
        "License and consent": None,
        "Personal data in it": None,
        "Source": report.get("source"),
        "Contract": report.get("contract"),
        "Digest of the rows": report.get("digest"),
        "Rows": f"{report.get('rows_read')} read, {report.get('accepted')} accepted, {report.get('num_train')} for "
        f"training, {report.get('num_eval')} held out",
        "Rejected rows": ", ".join(reasons) or "none",
        "Rules": ", ".join(rules),
    }


def _effort(home: Home, record: Record, data: Sequence[Mapping[str, Any]]) -> Effort | None:
    """Return the computation of a stage that trains; None for others."""
    kind, settings = _kind(record), record.ingredients["config"].get("stage", {})
    hours = record.seconds / 3600
    if kind == "rl":
        sampled = _sampled(home, record)
        trained = None if sampled is None else sampled * settings["update"]["num_epochs"]
        return Effort(stage=_name(record), hours=hours, trained=trained, sampled=sampled or 0.0)
    if kind not in _KINDS:
        return None
    own = [each for each in data if each["stage"] in record.ingredients["inputs"]]
    rows = sum(each["num_train"] for each in own)
    epochs = settings.get("num_epochs")
    count = settings["num_steps"] * settings["batch_size"] if "num_steps" in settings else epochs and rows * epochs
    lengths = [_row_tokens(each, _KINDS[kind]) for each in own]
    total = sum(each["num_train"] * length for each, length in zip(own, lengths, strict=True) if length)
    trained = count * total / rows if rows and count and all(lengths) else None
    return Effort(stage=_name(record), hours=hours, trained=trained)


def _sampled(home: Home, record: Record) -> float | None:
    """Return the tokens that an RL stage has sampled, from its history."""
    try:
        history = read_json(home.root / record.ref.uri / "history.json")
        return float(sum(row["rollouts/tokens"] for row in history))
    except (StorageError, KeyError, TypeError):
        return None


def _row_tokens(report: Mapping[str, Any], answers: int) -> float:
    """Return the mean tokens of a row: its prompt as often as its answers; 0 if the report does not tell."""
    means = {name: each["mean"] for name, each in report.get("sketches", {}).items() if name.endswith("_tokens")}
    prompt = means.pop("prompt_tokens", 0.0)
    return float(answers * prompt + sum(means.values())) if prompt and len(means) == answers else 0.0


def _chain(records: Iterable[Record], root: Ancestor) -> list[Record]:
    """Return the records of a version's ancestors, each once, the oldest first."""
    wanted = {node.sha256 for node in nodes(root)}
    found = {each.ref.sha256: each for each in records if each.ref.sha256 in wanted}
    return sorted(found.values(), key=lambda each: each.created)


def _positions(base: Mapping[str, Any]) -> str:
    return f"text, {base['max_positions']} tokens with the output" if base.get("max_positions") else "text"


def _kind(record: Record) -> str:
    return str(record.ingredients["config"].get("stage", {}).get("kind", ""))


def _name(record: Record) -> str:
    return str(record.ingredients["stage"]["name"])


def _table(fields: Fields) -> str:
    rows = [
        f"| {plain(name)} | {plain(value) if value not in (None, '') else NOT_STATED} |"
        for name, value in fields.items()
    ]
    return "\n".join(["| field | value |", "|---|---|", *rows])
