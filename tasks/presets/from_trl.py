"""A preset from the configuration of a TRL trainer: the same steps, batches, learning rate and schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from rlcore.strict_config import config_error
from rlcore.tasks.presets.key_reference import plain
from rlcore.tasks.presets.peers import KINDS
from rlcore.tasks.presets.tracking import Tool
from rlcore.tasks.presets.trl_objective import objective_of, rewards_of
from rlcore.tasks.presets.trl_settings import TrlSettings, read_settings
from rlcore.tasks.presets.trl_sources import Source, layout_of, max_positions, model_of, source_of

_DATA = {  # by kind of stage: name of the dataset, contract, adapter
    "rl": ("prompts", "prompts", "prompts"),
    "dpo": ("pairs", "preference_pairs", "preferences"),
    "reward_model": ("pairs", "preference_pairs", "preferences"),
    "sft": ("demonstrations", "demonstrations", "demonstrations"),
}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
}
_ALL_ROWS = 1_000_000
_NUM_HELD_OUT = 100
_SUMS: dict[str, Any] = {
    "contract": "prompts",
    "adapter": "rlcore.examples.arithmetic:ADAPTER",
    "num_train": 100,
    "num_eval": _NUM_HELD_OUT,
    "max_tokens": 88,
}


@dataclass(kw_only=True)
class Draft:
    """Preset in the making: a value by key, the TRL key of each, and all errors found."""

    trl: TrlSettings
    stage: str
    kind: str
    dataset: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any) -> None:
        """Set the key that the table names for TRL's ``name``."""
        key = self.trl.rows[name].key(self.stage, self.kind, self.dataset)
        self.values[key] = value
        self.origins[key] = ", ".join(filter(None, (self.origins.get(key, ""), name)))

    def require(self, name: str, known: Mapping[str, str]) -> str:
        """Return our value for a value of TRL's; note an error if there is none."""
        value = str(self.trl.get(name))
        if value not in known:
            self.errors.append(f"{name} = {value!r}: a preset has no counterpart, only {', '.join(known)}")
        return known.get(value, "")


def from_trl(file: Path, trainer: str = "") -> str:
    """Return the preset, as TOML, that trains as TRL's ``trainer`` does with the configuration ``file``.

    Raises:
        ConfigError: with all keys whose loss would change the training.
    """
    trl = read_settings(file, trainer)
    kind = KINDS[trl.trainer]
    dataset, contract, adapter = _DATA[kind]
    draft = Draft(trl=trl, stage="reward_model" if kind == "reward_model" else trl.trainer, kind=kind, dataset=dataset)
    draft.errors += trl.errors
    source = source_of(trl, file.parent, draft.errors)
    draft.values |= {"name": re.sub(r"[^\w.-]", "-", file.stem), "seed": 42} | model_of(trl, file.parent, draft.errors)
    draft.values |= {
        f"data.{dataset}.contract": contract,
        f"data.{dataset}.adapter": layout_of(file.parent / source.path, adapter) if source.num_rows else adapter,
        f"data.{dataset}.path": source.path,
        **({f"data.{dataset}.eval_path": source.eval_path} if source.eval_path else {}),
        f"data.{dataset}.num_train": source.num_rows or _ALL_ROWS,
        f"data.{dataset}.num_eval": _NUM_HELD_OUT,
        f"data.{dataset}.max_tokens": 1024,
        f"stages.{draft.stage}.kind": kind,
        f"stages.{draft.stage}.init_from": "base",
        **({f"stages.{draft.stage}.prompts": {dataset: 1.0}} if kind == "rl" else {}),
        **({} if kind == "rl" else {f"stages.{draft.stage}.data": [dataset]}),
    }
    for row in trl.rows.values():
        if row.is_copied and (value := trl.get(row.name)) is not None:
            draft.put(row.name, value)
    _precision(draft)
    wanted = trl.get("report_to") or []
    if also := [each for each in get_args(Tool) if each in ([wanted] if isinstance(wanted, str) else wanted)]:
        draft.put("report_to", also)
    steps = {"rl": _rl_steps, "sft": _sft_steps, "dpo": _pair_steps, "reward_model": _pair_steps}[kind](draft, source)
    _optimizer(draft, steps)
    _adapters(draft)
    if kind == "rl":
        draft.values |= {f"stages.{draft.stage}.{key}": value for key, value in objective_of(trl, draft.errors).items()}
        draft.values[f"stages.{draft.stage}.rewards"] = rewards_of(trl, draft.errors)
    if kind == "reward_model":
        draft.values[f"stages.{draft.stage}.head_learning_rate"] = trl.get("learning_rate")
    _lengths(draft, max_positions(trl, file.parent))
    if draft.errors:
        raise config_error(draft.errors, str(file)) from None
    return _text(draft, file, source)


def _batch(draft: Draft) -> int:
    """Return the rows or completions of TRL's optimizer step."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    return math.prod(max(1, draft.trl.integer(name)) for name in names)


def _rl_steps(draft: Draft, source: Source) -> int:
    """Set prompts and iterations; return the optimizer steps of the run."""
    trl = draft.trl
    accumulated = max(1, trl.integer("gradient_accumulation_steps"))
    micro = _batch(draft) // accumulated
    per_batch = trl.integer("steps_per_generation") or accumulated
    if whole := trl.integer("generation_batch_size"):
        per_batch = whole // micro
        if trl.integer("steps_per_generation"):
            draft.errors.append("generation_batch_size, steps_per_generation: TRL takes one of them")
    group = trl.integer("num_generations")
    completions = micro * per_batch
    if completions % group or per_batch % accumulated or (whole and whole % micro):
        draft.errors.append(
            f"a batch of {whole or completions} completions is not whole groups of num_generations = {group} in whole "
            f"optimizer steps of {_batch(draft)}"
        )
    prompts, minibatches = max(1, completions // group), max(1, per_batch // accumulated)
    per_iteration = minibatches * max(1, trl.integer("num_iterations"))
    draft.put("per_device_train_batch_size", prompts)
    draft.put("steps_per_generation", minibatches)
    length, steps = "max_steps", trl.integer("max_steps")
    if steps <= 0:
        length = "num_train_epochs"
        steps = math.ceil(trl.get(length) * (_rows(draft, source) // prompts) * per_iteration)
    draft.put(length, max(1, math.ceil(steps / per_iteration)))
    if steps % per_iteration:
        draft.notes.append(f"TRL stops after {steps} optimizer steps, within an iteration of {per_iteration}")
    return steps


def _sft_steps(draft: Draft, source: Source) -> int:
    batch = _batch(draft)
    draft.put("per_device_train_batch_size", batch)
    length, steps = "max_steps", draft.trl.integer("max_steps")
    if steps <= 0:
        length = "num_train_epochs"
        steps = math.ceil(draft.trl.get(length) * _per_epoch(draft, _rows(draft, source)))
    draft.put(length, max(1, steps))
    return steps


def _pair_steps(draft: Draft, source: Source) -> int:
    """Set whole passes over the pairs; ``max_steps`` limits the pairs of one pass."""
    batch, steps, epochs = _batch(draft), draft.trl.integer("max_steps"), draft.trl.get("num_train_epochs")
    draft.put("per_device_train_batch_size", batch)
    if steps > 0:
        if source.num_rows and steps * batch > source.num_rows:
            epochs = steps * batch / source.num_rows
        else:
            epochs = 1.0
            draft.values[f"data.{draft.dataset}.num_train"] = steps * batch
    name = "max_steps" if steps > 0 else "num_train_epochs"
    if epochs != int(epochs):
        draft.errors.append(f"{name} = {draft.trl.get(name)}: {epochs:g} passes; a stage of pairs makes whole passes")
    draft.put(name, max(1, int(epochs)))
    needs_rows = draft.trl.get("warmup_ratio") or 0 < draft.trl.get("warmup_steps") < 1
    return steps if steps > 0 else int(epochs) * _per_epoch(draft, _rows(draft, source)) if needs_rows else 0


def _per_epoch(draft: Draft, rows: int) -> int:
    """Return the optimizer steps of a pass: micro-batches of all processes, the last of both kinds partial."""
    accumulated = max(1, draft.trl.integer("gradient_accumulation_steps"))
    return max(1, math.ceil(math.ceil(rows / (_batch(draft) // accumulated)) / accumulated))


def _rows(draft: Draft, source: Source) -> int:
    if not source.num_rows and not any(error.startswith("max_steps") for error in draft.errors):
        draft.errors.append("max_steps: required, because the rows of the dataset cannot be counted here")
    return source.num_rows or 1


def _optimizer(draft: Draft, steps: int) -> None:
    trl = draft.trl
    draft.put("lr_scheduler_type", draft.require("lr_scheduler_type", _SCHEDULES))
    if kind := draft.require("optim", _OPTIMIZERS):
        draft.put("optim", kind)
    wanted = trl.get("warmup_steps")
    warmup = wanted if wanted >= 1 else math.ceil(steps * (wanted or trl.get("warmup_ratio")))
    draft.put("warmup_steps", int(warmup))


def _precision(draft: Draft) -> None:
    bf16, fp16 = draft.trl.get("bf16"), draft.trl.get("fp16")
    draft.put("bf16", "bfloat16" if bf16 else "float16" if fp16 else "auto" if bf16 is None else "float32")
    if draft.trl.get("use_vllm"):
        draft.put("use_vllm", "vllm")


def _adapters(draft: Draft) -> None:
    trl = draft.trl
    if not trl.get("use_peft") or draft.kind == "sft":
        return
    draft.put("lora_r", trl.integer("lora_r"))
    draft.put("lora_alpha", trl.integer("lora_alpha"))
    targets = trl.get("lora_target_modules")
    if targets not in (None, "all-linear", ["all-linear"]):
        draft.put("lora_target_modules", targets if isinstance(targets, list) else [targets])
    elif targets is None:
        draft.notes.append(f"lora_target_modules: {trl.rows['lora_target_modules'].note}")


def _lengths(draft: Draft, longest: int) -> None:
    """Set the lengths of prompts and evaluation, both within what the model reads."""
    wanted, prompt = draft.trl.integer("max_completion_length") or 512, f"data.{draft.dataset}.max_tokens"
    answer = wanted if draft.kind == "rl" else 0
    draft.values[prompt] = max(1, min(draft.values[prompt], longest - answer))
    if draft.kind != "rl":
        draft.values |= {f"data.prompts.{key}": value for key, value in _SUMS.items()}
        draft.notes.append("evaluation needs questions with known answers: [data.prompts] has made-up sums, name yours")
        wanted = min(wanted, longest - _SUMS["max_tokens"])
    draft.values |= {"evaluation.num_problems": _NUM_HELD_OUT, "evaluation.max_new_tokens": wanted}


def _text(draft: Draft, file: Path, source: Source) -> str:
    """Format the preset, with TRL's key at the end of each line that comes from one."""
    trl = draft.trl
    differing = [f"{name}: {row.note}" for name, row in trl.rows.items() if row.differs and trl.get(name)]
    differing += [
        f"{name} = {plain(trl.get(name))} by default: {row.note}"
        for name, row in trl.rows.items()
        if row.only is not None and trl.has_other_default(name)
    ]
    head = [
        f"# {file.name} of TRL's trainer {trl.trainer}, by rlcore from-trl. At the end of a line: TRL's key.",
        *([f"# Left out, without effect on the weights: {', '.join(trl.left_out)}"] if trl.left_out else []),
        *(["# What differs:"] if differing or draft.notes else []),
        *(f"# - {note}" for note in (*differing, *draft.notes, *source.notes)),
    ]
    tables: dict[str, list[str]] = {}
    for key, value in draft.values.items():
        table, _, name = key.rpartition(".")
        comment = f"  # {draft.origins[key]}" if key in draft.origins else ""
        tables.setdefault(table, []).append(f"{name} = {plain(value)}{comment}")
    order = sorted(tables, key=lambda table: (table != "", table.split(".")[0] == "evaluation"))
    sections = ["\n".join([*([f"[{table}]"] if table else []), *tables[table]]) for table in order]
    return "\n".join(head) + "\n" + "\n\n".join(sections) + "\n"
