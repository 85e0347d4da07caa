"""Contents of a report: facts, figures and samples from artifacts and records, without new computation."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pandas as pd

from rlcore.config import to_dict
from rlcore.evaluation.paired_tests import PairedDifference, paired_difference
from rlcore.metrics import find_metric
from rlcore.models.files import is_unchanged
from rlcore.rewards.answers import final_part, last_marked_answer
from rlcore.tasks.drawing.charts import Point, Series, line_chart
from rlcore.tasks.drawing.levels import format_level
from rlcore.tasks.drawing.result import Folders, of_kind
from rlcore.tasks.keys.machine import known_machine
from rlcore.tasks.kinds.compare.step import evaluations_in, greedy_answers
from rlcore.tasks.presets.graph import data_of, named_start, rewards_of, rl_of
from rlcore.tasks.presets.run import RunConfig
from rlcore.tasks.steps.base import MODEL
from rlcore.tasks.steps.rows import read_episodes, read_prompts
from rlcore.tasks.store.storage import read_json, read_table

_SOURCES = {
    "scratch": "made from scratch",
    "hub": "from the hub",
    "folder": "from a folder",
    "gguf": "from a GGUF file",
    "package": "from an installed package",
    "registry": "from the model registry",
}
History = Sequence[Mapping[str, float]]
Pairs = Sequence[tuple[str, str]]
CURVES = (
    (
        "reward/mean",
        "reward",
        "mean of the rollouts; band: {level} interval as if rollouts of a prompt were independent",
    ),
    ("eval/accuracy", "held-out accuracy", "greedy, in the run's own evaluations; band: {level} Wilson interval"),
    ("kl/ref", "KL to the reference", "nats per token"),
    ("completion/length", "completion length", "tokens"),
    ("entropy", "entropy", "nats per token"),
    ("completion/truncated", "truncated", "fraction of completions that reached the token limit"),
    ("clip/fraction", "clipped", "fraction of tokens"),
    ("groups/zero_signal", "groups without signal", "fraction of groups"),
    ("value/explained_variance", "explained variance", "of the critic; at most 1"),
)
_PART, _DATA = "reward/term/", ("reward/data/", "eval/data/")
_PREPARE = "prepare_"
_SHOWN = 3  # samples of each kind


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


def histories_of(folders: Folders) -> dict[str, History]:
    """Return the histories of the RL runs by label, in the order of the runs."""
    return {name: read_json(folder / "history.json") for name, folder in of_kind("rl", folders).items()}


def curves(histories: Mapping[str, History], *, confidence: float) -> list[dict[str, str]]:
    """Return a chart per metric, with a curve for each run that has it."""
    found = []
    for name, title, note in CURVES:
        series = [
            Series(label=label, colour=number, points=points)
            for number, (label, history) in enumerate(histories.items())
            if (points := _points(history, name, confidence))
        ]
        if series:
            description = note.format(level=format_level(confidence))
            found.append({"title": title, "note": description, "metric": name, "svg": line_chart(series, title=title)})
    return found


def data_curves(histories: Mapping[str, History], *, confidence: float) -> list[dict[str, str]]:
    """Return the rewards and held-out accuracies by dataset for each run with several datasets."""
    found = []
    for label, history in histories.items():
        for prefix, title in zip(_DATA, ("reward", "held-out accuracy"), strict=True):
            names = sorted({name for row in history for name in row if name.startswith(prefix)})
            series = [
                Series(label=name.removeprefix(prefix), colour=number % 6, points=_points(history, name, confidence))
                for number, name in enumerate(names)
            ]
            if series:
                shown = ", ".join(each.label for each in series)
                note = f"by dataset: {shown}"
                found.append({"title": f"{label}: {title}", "note": note, "svg": line_chart(series, title=title)})
    return found


def reward_parts(histories: Mapping[str, History], *, confidence: float) -> list[dict[str, Any]]:
    """Return a chart and a table of each run's reward terms, before weighting, from first to last iteration."""
    found = []
    for label, history in histories.items():
        names = sorted({name for row in history for name in row if name.startswith(_PART)})
        terms = [name.removeprefix(_PART) for name in names]
        series = [
            Series(label=term, colour=number % 6, points=_points(history, name, confidence))
            for number, (term, name) in enumerate(zip(terms, names, strict=True))
        ]
        values = [[row[name] for row in history if name in row] for name in names]
        rows = [
            {"term": term, "colour": number % 6, "first": each[0], "last": each[-1]}
            for number, (term, each) in enumerate(zip(terms, values, strict=True))
        ]
        found.append({"label": label, "rows": rows, "svg": line_chart(series, title=f"{label}: parts of the reward")})
    return [each for each in found if each["rows"]]


def accuracies(folders: Folders) -> list[dict[str, Any]]:
    """Return each checkpoint's held-out metrics."""
    rows = []
    for name, folder in evaluations_in(folders).items():
        summary = read_json(folder / "summary.json")
        samples = [key for key in summary if re.fullmatch(r"eval/pass_at_\d+", key)]
        best = max(samples, key=lambda key: int(key.rpartition("_")[2]), default="")
        shape = held_out_shape(folder)
        rows.append({"label": name, **summary, "pass": summary.get(best), "k": best.rpartition("_")[2], "shape": shape})
    return rows


def differences(folders: Folders, pairs: Pairs, *, confidence: float) -> list[dict[str, Any]]:
    """Return accuracy differences on the same problems for ``pairs`` of a new and an old checkpoint, labeled."""
    answers = {name: greedy_answers(each)["correct"].tolist() for name, each in evaluations_in(folders).items()}
    return [
        {
            "new": new,
            "old": old,
            "difference": paired.difference,
            "p": paired.p_value,
            "word": word_of(paired, confidence),
        }
        for new, old in pairs
        if answers.get(new) and answers.get(old)
        for paired in [paired_difference(answers[new], answers[old], confidence=confidence)]
    ]


def word_of(paired: PairedDifference, confidence: float) -> str:
    """Return ``better``, ``worse``, or ``no difference`` if the exact test does not reject it at 1 - ``confidence``.

    The test decides and not the interval, which is too narrow for a handful of changed answers.
    """
    if paired.p_value > 1.0 - confidence:
        return "no difference"
    return "better" if paired.difference.mean > 0.0 else "worse"


def changed_samples(folders: Folders, pairs: Pairs) -> list[dict[str, Any]]:
    """Return an RL run's answers next to those of its start: fixed, broken, and with the most changed words."""
    evaluations, starts, prompts = evaluations_in(folders), dict(reversed(pairs)), _prompts(folders)
    found = []
    for name in of_kind("rl", folders):
        old = starts[name]
        if name not in evaluations or old not in evaluations or not prompts:
            continue
        before = greedy_answers(evaluations[old])
        both = before.merge(greedy_answers(evaluations[name]), on="prompt_id", suffixes=("_before", "_after"))
        both["prompt"] = both["prompt_id"].map(prompts)
        right_before, right_after = both["correct_before"], both["correct_after"]
        overlap = [_overlap(a, b) for a, b in zip(both["completion_before"], both["completion_after"], strict=True)]
        kinds = (
            ("mended", both[~right_before & right_after]),
            ("broken", both[right_before & ~right_after]),
            ("most changed", both.iloc[pd.Series(overlap).sort_values(kind="stable").index[:_SHOWN]]),
        )
        found += [
            {"label": name, "old": old, "kind": kind, "count": len(rows), "rows": _records(rows.head(_SHOWN))}
            for kind, rows in kinds
        ]
    return found


def _prompts(folders: Folders) -> dict[str, str]:
    found: dict[str, str] = {}
    for stage, folder in folders.items():
        if stage.startswith(_PREPARE) and (folder / "eval.parquet").is_file():
            if read_json(folder / "report.json")["contract"].partition("/")[0] not in ("prompts", "code_tasks"):
                continue
            for row in read_prompts(folder / "eval.parquet"):
                words = row.messages[-1].content
                found |= {row.prompt_id: words, f"{stage.removeprefix(_PREPARE)}/{row.prompt_id}": words}
    return found


def extreme_rollouts(folders: Folders) -> list[dict[str, Any]]:
    """Return the completions with best and worst reward of each run's last iteration, with reward terms and forks."""
    found = []
    for name, folder in of_kind("rl", folders).items():
        last = int(read_json(folder / "history.json")[-1]["iteration"])
        frame = read_episodes(folder / "rollouts" / f"iteration-{last:05d}.parquet")
        ranked = frame[frame["value"].notna()].sort_values("value", ascending=False, kind="stable")
        for kind, rows in (("highest reward", ranked.head(_SHOWN)), ("lowest reward", ranked.tail(_SHOWN).iloc[::-1])):
            shown = rows[["prompt", "reference", "text", "value", "parts", "forks"]].copy()
            shown["parts"] = [json.loads(text) for text in shown["parts"]]
            found.append({"label": name, "kind": kind, "iteration": last, "rows": _records(shown)})
    return found


def gates(folders: Folders) -> list[dict[str, Any]]:
    """Return the reports of the datasets' gates."""
    names = [name for name in folders if name.startswith("prepare_")]
    return [{"stage": name, **read_json(folders[name] / "report.json")} for name in names]


def health(folders: Folders) -> list[dict[str, Any]]:
    """Return the findings of the health rules in each RL run, and trained models with the weights of their start."""
    found, none = of_kind("rl", folders), dict[str, Any](findings=[], stopped=None)
    return [
        {"label": name, "unchanged": same, **(read_json(folder / "health.json") if name in found else none)}
        for name, folder in folders.items()
        if (same := is_unchanged(folder)) or name in found
    ]


def tokens_of(stage: str, folder: Path) -> float | None:
    """Return the completion tokens that a stage sampled; None if it samples or counts none."""
    if of_kind("rl", {stage: folder}):
        return float(sum(row.get("rollouts/tokens", 0.0) for row in read_json(folder / "history.json")))
    if stage.startswith("evaluate_"):
        return float(read_table(folder / "answers.parquet")["num_tokens"].sum())
    return None


def _points(history: History, name: str, confidence: float) -> list[Point]:
    # With a critic, groups of equal rewards have a signal too.
    unused = name == "groups/zero_signal" and any("value/explained_variance" in row for row in history)
    rows = [row for row in history if name in row and not unused]
    return [Point(x=row["iteration"], y=row[name], **_interval(row, name, confidence)) for row in rows]


def _interval(row: Mapping[str, float], name: str, confidence: float) -> dict[str, float]:
    if name == "reward/mean" and row.get("rollouts/count"):
        half = NormalDist().inv_cdf((1.0 + confidence) / 2.0) * row["reward/std"] / math.sqrt(row["rollouts/count"])
        return {"low": row[name] - half, "high": row[name] + half}
    if f"{name}_low" in row:
        return {"low": row[f"{name}_low"], "high": row[f"{name}_high"]}
    return {}


def _overlap(before: str, after: str) -> float:
    return difflib.SequenceMatcher(None, before.split(), after.split(), autojunk=False).quick_ratio()


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
