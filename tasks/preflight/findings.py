"""Findings of the checks before a run, grouped by the file that has to be corrected; and those of each data file.

The latter are remembered as long as file, settings, tokenizer and code are the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from rlcore.config import to_dict
from rlcore.data_contracts.gate.files import format_of, opened, row_files
from rlcore.errors import ConfigError
from rlcore.strict_config import build
from rlcore.tasks.preflight.model_checks import ModelFiles, code_state
from rlcore.tasks.preflight.reference_checks import without_references
from rlcore.tasks.presets.data import HUB, DatasetConfig, too_few_held_out
from rlcore.tasks.presets.graph import Graders, graders_of
from rlcore.tasks.presets.run import RunConfig, collect_error
from rlcore.tasks.steps.data_source import adapter_code, has_files, hub_parts, hub_snapshot, rows_sha256
from rlcore.tasks.store.remembered import remembered


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An error: the file that has it (empty: the preset), and a line that begins with the preset's key."""

    file: str = ""
    text: str


def key_of(text: str) -> str:
    """Return the key with which the line of an error begins."""
    return text.partition(":")[0].partition(" = ")[0]


def refusal(findings: Sequence[Finding], notes: Iterable[str], *, preset: str) -> ConfigError:
    """Return one error with all findings, by file, followed by notes. ``preset``: its file, or a built-in's name."""
    own_file = preset if preset.endswith(".toml") else f"preset {preset}"
    files = dict.fromkeys(finding.file for finding in findings)
    lines = []
    for file in files:
        own = [f"    {finding.text}" for finding in findings if finding.file == file]
        lines += [f"  {file or own_file}:", *own] if any(files) else own
    lines += [f"    {note}" for note in notes]
    plural = "s" if len(findings) > 1 else ""
    return ConfigError(
        f"preset has {len(findings)} error{plural}:\n" + "\n".join(lines),
        where=own_file,
        fix="correct these; nothing was run",
    )


def row_findings(
    config: RunConfig, names: Collection[str], files: ModelFiles | None
) -> tuple[list[Finding], list[str]]:
    """Return the errors of the first rows of datasets, and sentences about rows that a run will quarantine.

    ``files``: those of the tokenizer; without them no length is checked. Rows that are generated, sampled or still to
    be fetched are left to the run.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    bare = without_references(config, names)
    for name in names:
        data = config.data[name]
        graders = graders_of(config, name)
        if name in bare:  # which an error of the rewards says
            graders = replace(graders, are_rewards=False)
        system = data.system_prompt or config.model.system_prompt
        for key, path in (("path", data.path), ("eval_path", data.eval_path)):
            digest = _digest(path)
            if digest is None:
                continue
            # How many rows a run takes changes nothing about the first ones.
            own = replace(data, path=path, eval_path="", system_prompt=system, num_train=1, num_eval=1)
            tokenizer = files.source if files else ""
            asked = {
                "key": f"data.{name}",
                "which": key,
                "data": to_dict(own),
                "graders": to_dict(graders),
                "files": tokenizer,
            }
            state = (digest, files.digest if files else "", adapter_code(data.reader), code_state())
            texts, said, count = _findings(json.dumps(asked), "\n".join(state))
            findings += [Finding(file=path, text=text) for text in texts]
            notes += said
            held_out = _num_held_out(data, key, count)
            if held_out is not None and (error := too_few_held_out(data, held_out)):
                findings.append(Finding(file=path, text=f"data.{name}.num_eval: {error}"))
            elif held_out is not None and held_out < data.num_eval:
                named = f"data.{name}.num_eval = {data.num_eval:,}"
                notes.append(f"warning: {named}: {path} has {count:,} rows, about {held_out:,} of them for this")
    return findings, notes


def _num_held_out(data: DatasetConfig, key: str, count: int) -> int | None:
    if not count:
        return None
    if data.eval_path:
        return count if key == "eval_path" else None
    return max(1, round(count / 10))


def _num_rows(path: str) -> int:
    """Return the number of rows of JSONL or Parquet files; 0 with others, whose rows would have to be parsed."""
    if path.startswith(HUB):
        return 0
    from pyarrow.parquet import read_metadata

    count, files = 0, row_files(path)
    for each in files:
        if format_of(each) == ".jsonl":
            with opened(each) as file:
                count += sum(bool(line.strip()) for line in file)
        elif format_of(each) == ".parquet":
            count += int(read_metadata(each).num_rows)
        else:
            return 0
    return count


def _digest(path: str) -> str | None:
    if path.startswith(HUB):
        if collect_error("", lambda: hub_parts(path)):
            return None
        found = hub_snapshot(path)
        files = sorted(found.rglob("*")) if found else []
        return "\n".join(f"{file} {file.resolve().name}" for file in files)  # named by their content
    if not path or not has_files(path) or collect_error("", lambda: rows_sha256(path)):
        return None
    try:
        return rows_sha256(path)
    except OSError as error:  # which reading the rows reports
        return str(error)


@remembered
def _findings(asked: str, state: str) -> tuple[list[str], list[str], int]:
    """Return errors, notes, and the number of rows if it is known, they are not divided, and there are no errors.

    ``state``: digests of rows, tokenizer and code, which decide besides the settings.
    """
    from rlcore.tasks.kinds.data.step import token_meter  # brings pandas and transformers
    from rlcore.tasks.preflight.row_checks import tried

    found = json.loads(asked)
    tokens = token_meter(ModelFiles(source=found["files"]).tokenizer()) if found["files"] else None
    data = build(DatasetConfig, found["data"])
    graders = build(Graders, found["graders"])
    errors, notes, is_divided = tried(found["key"], found["which"], data, tokens, graders=graders)
    return errors, notes, 0 if errors or is_divided else _num_rows(data.path)
