"""Facts of a run for its report: model, machine, rewards of each stage, and lengths of its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config import to_dict
from rlcore.metrics import find_metric
from rlcore.rewards.answers import final_part, last_marked_answer
from rlcore.tasks.drawing.result import Folders, of_kind
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.presets.graph import data_of, named_start, rewards_of, rl_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.rows import read_episodes
from rlcore.tasks.store.storage import read_json, read_table

_SOURCES = {
    "scratch": "made from scratch",
    "hub": "from the hub",
    "folder": "from a folder",
    "gguf": "from a GGUF file",
    "package": "from an installed package",
    "registry": "from the model registry",
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Origin of a run: its command, the preset that it extends, and its pages elsewhere.

    ``base``: the preset that it extends, or the one that its command changes, named ``base_name``. ``mlflow`` and
    ``prefect``: addresses of its run, empty without servers; ``run_id``: the MLflow run.
    """

    command: str = ""
    base_name: str = ""
    base: RunConfig | None = None
    run_id: str = ""
    mlflow: str = ""
    prefect: str = ""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Counts of completions: their number, and the fractions that are truncated or end with a marked answer."""

    count: int
    truncated: float
    marked: float = 0.0


def model_facts(config: RunConfig, folders: Folders) -> dict[str, str]:
    """Return name, source, size and license of the base."""
    model = config.model
    named = {"revision": model.revision, "file": model.file, "chat template": model.chat_template}
    facts = {"model": model.path or "a new Llama", "source": _SOURCES[model.source]}
    facts |= {name: value for name, value in named.items() if value}
    if "import_sft" in folders:
        described = read_json(folders["import_sft"] / MODEL / "config.json")
        size, precision = _parameters(folders["import_sft"] / MODEL)
        shape = f"{described.get('num_hidden_layers', '?')} layers of width {described.get('hidden_size', '?')}"
        facts["architecture"] = f"{', '.join(described.get('architectures') or ['?'])}, {shape}"
        facts["parameters"] = f"{size / 1e6:,.2f} million, {precision}"
    return facts | {"license": model.license or "unknown"}


def _parameters(folder: Path) -> tuple[int, str]:
    count, kinds = 0, set()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = [each for name, each in head.items() if name != "__metadata__"]
        count += sum(math.prod(each["shape"]) for each in tensors)
        kinds |= {each["dtype"] for each in tensors}
    return count, " and ".join(sorted(kinds)) or "?"


def machine_facts(config: RunConfig) -> dict[str, str]:
    """Describe device, precision and engine."""
    found = {name: str(value) for name, value in known_machine(config.hardware).facts.items() if value}
    found.pop("numerics_digest", None)
    return found | {"rollouts by": config.engine.kind}


def stage_facts(config: RunConfig) -> list[dict[str, Any]]:
    """Return for each stage its kind, start, data, algorithm and rewards."""
    return [
        {
            "name": name,
            "kind": rl.algorithm if (rl := rl_of(stage)) else stage.kind.replace("_", " "),
            "start": named_start(stage),
            "data": ", ".join(data_of(stage)),
            "rewards": [_reward(term) for term in to_dict(rewards_of(stage))],
        }
        for name, stage in config.stages.items()
    ]


def _reward(term: Mapping[str, Any]) -> str:
    named = f"{term['weight']:g} × {term['kind']}"
    details = [f"{name} = {value}" for name, value in term["options"].items()]
    details += [f"of {term['stage']}"] if term["stage"] and term["stage"] != term["kind"] else []
    details += [f"{term['below_gate']:g} in total if it is below {term['gate']:g}"] if term["gate"] is not None else []
    details += [f"on {', '.join(term['data'])} alone"] if term["data"] else []
    return f"{named} ({', '.join(details)})" if details else named


def reward_model_facts(folders: Folders) -> list[dict[str, Any]]:
    """Return each reward model's held-out metrics and calibration."""
    return [
        {
            "name": name,
            "metrics": read_json(folder / "metrics.json"),
            "bins": [row for row in read_json(folder / "reliability.json") if row["num_pairs"]],
        }
        for name, folder in of_kind("reward_model", folders).items()
    ]


def answers_shape(texts: Sequence[str], finish_reasons: Sequence[str]) -> Answers:
    """Return the fractions of completions that were truncated, and that end with a marked answer."""
    count = len(texts)
    if not count:
        return Answers(count=0, truncated=0.0)
    truncated = sum(reason == "length" for reason in finish_reasons)
    marked = sum(
        reason != "length" and last_marked_answer(final_part(text) or "") is not None
        for text, reason in zip(texts, finish_reasons, strict=True)
    )
    return Answers(count=count, truncated=truncated / count, marked=marked / count)


def held_out_shape(folder: Path) -> Answers:
    """Describe an evaluation's greedy answers."""
    table = read_table(folder / "answers.parquet")
    greedy = table[table["mode"] == "greedy"]
    return answers_shape(greedy["completion"].tolist(), greedy["finish_reason"].tolist())


def rollout_shapes(folders: Folders) -> dict[str, tuple[Answers, Answers]]:
    """Describe the rollouts of each RL run's first and last iteration."""
    found = {}
    for name, folder in of_kind("rl", folders).items():
        tables = sorted((folder / "rollouts").glob("*.parquet"))
        if tables:
            first, last = (read_episodes(path) for path in (tables[0], tables[-1]))
            found[name] = (_shape(first), _shape(last))
    return found


def _shape(table: Any) -> Answers:
    return answers_shape(table["text"].fillna("").tolist(), table["finish_reason"].fillna("").tolist())


def asks_for_marks(config: RunConfig) -> bool:
    """Return True if an answer must be marked to count: for mathematics that is verified, but not for programs."""
    return any(verifier.kind == "math" for verifier in config.evaluation.verifiers)


def explain(name: str) -> str:
    """Return the glossary entry of a metric as sentences for a tooltip; empty if there is none."""
    metric = find_metric(name)
    if metric is None:
        return ""
    details = {
        "Formula": metric.formula,
        "Unit": metric.unit,
        "Healthy": metric.expected_range,
        "Otherwise": metric.fix,
    }
    return " ".join([metric.meaning, *(f"{label}: {text}." for label, text in details.items() if text)])
