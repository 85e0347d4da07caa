"""Datasets of a preset: sources, the gate, and their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from rlcore.data_contracts.adapters.expressions import Kind
from rlcore.data_contracts.gate.data_gate import GateReport
from rlcore.errors import CanaryError, ConfigError, DataError
from rlcore.tasks.presets.data import DatasetConfig
from rlcore.tasks.steps import rows as step_rows
from rlcore.tasks.steps.data import prepare_dataset
from rlcore.tasks.steps.data_source import resolve_adapter, source_digest
from rlcore.tasks.steps.pair_data import tokenize_pairs
from rlcore.tasks.steps.prompt_hashes import prompt_hashes
from rlcore.tasks.steps.rows import (
    PairRow,
    PromptRow,
    read_demonstrations,
    read_pairs,
    read_prompt_sets,
    read_prompts,
    tokenize_prompts,
)
from rlcore.tasks.store.storage import write_table
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import Message
from tests.tasks.steps.token_views import words_view

SHARED = Path(__file__).parents[4] / "shared" / "data"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

SUMS = "rlcore.examples.arithmetic:ADAPTER"


# Four tokens for the template.
TOKENS = words_view(4, special_tokens=("<|im_start|>", "<|im_end|>"))


def config(**changes: Any) -> DatasetConfig:
    settings = {"contract": "prompts", "adapter": SUMS, "num_train": 40, "num_eval": 8, "max_tokens": 96}
    return DatasetConfig(**{**settings, **changes})


def prepare(kind: Kind, folder: Path, dataset: DatasetConfig, evaluated: Sequence[PromptRow] = ()) -> GateReport:
    prompts = [[{"role": turn.role, "content": turn.content} for turn in row.messages] for row in evaluated]
    contract = {"prompts": "prompts", "preferences": "preference_pairs", "demonstrations": "demonstrations"}[kind]
    dataset = replace(dataset, contract=contract)  # type: ignore[arg-type]
    return prepare_dataset(dataset, seed=0, tokens=TOKENS, folder=folder, evaluated=prompts)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs_file(path: Path, num_prompts: int, **extra: Any) -> Path:
    """Three pairs for each prompt."""
    keys = [(prompt, number) for prompt in range(num_prompts) for number in range(3)]
    pairs = [
        {
            "pair_id": f"{prompt}-{n}",
            "messages": ask(f"question {prompt}"),
            "chosen": f"good {n}",
            "rejected": f"bad {n}",
        }
        for prompt, n in keys
    ]
    return write_rows(path, ({**pair, "source": "test", **extra} for pair in pairs))


def test_generated_prompts_are_written_gated_and_read_back(tmp_path: Path) -> None:
    report = prepare("prompts", tmp_path, config())
    assert (report.contract, report.accepted, report.quarantined) == ("prompts/v1", 48, 0)
    files = ["eval.parquet", "quarantine.jsonl", "report.json", "train.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    columns = ["prompt_id", "messages", "reference", "task", "split", "columns", "form"]
    assert pq.read_table(tmp_path / "eval.parquet").column_names == columns
    train, held_out = read_prompts(tmp_path / "train.parquet"), read_prompts(tmp_path / "eval.parquet")
    assert (len(train), len(held_out)) == (40, 8)
    assert not prompt_hashes(train) & prompt_hashes(held_out)
    problem = train[0].messages[0].content
    expected = (Message(role="user", content=problem),)
    reference = str(sum(int(sign + digit) for sign, digit in zip("+" + problem[1::2], problem[::2], strict=True)))
    assert train[0] == PromptRow(
        prompt_id=f"arithmetic-{problem}", messages=expected, reference=reference, task="arithmetic"
    )


def test_the_same_configuration_and_seed_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare("preferences", tmp_path / name, config())
    for name in ("train.parquet", "eval.parquet", "report.json", "quarantine.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_file_of_pairs_is_divided_by_prompt(tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "pairs.jsonl", 30)
    prepare("preferences", tmp_path / "out", config(adapter="preferences", path=str(path), num_train=60, num_eval=5))
    train, held_out = (read_pairs(tmp_path / "out" / f"{name}.parquet") for name in ("train", "eval"))
    assert (len(train), len(held_out)) == (60, 5)
    assert len({row.messages for row in held_out}) == 3  # a tenth of 30, all of them before a second row of one
    assert not {row.messages for row in train} & {row.messages for row in held_out}
    assert isinstance(train[0], PairRow)
    assert (train[0].margin, train[0].weight, train[0].source) == (0.0, 1.0, "test")


def test_foreign_evaluation_prompts_are_held_out_of_a_file_that_we_divide(tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "pairs.jsonl", 30)
    rows = [
        PromptRow(prompt_id="", messages=(Message(role="user", content=f"Question {n}"),), reference="", task="t")
        for n in range(4)
    ]
    dataset = config(adapter="preferences", path=str(path), num_train=60, num_eval=5)
    prepare("preferences", tmp_path / "out", dataset, rows)
    texts = {row.messages[0].content for row in read_pairs(tmp_path / "out" / "train.parquet")}
    assert not texts & {f"question {n}" for n in range(4)}


def prompts_file(path: Path, numbers: Sequence[int], **extra: Any) -> Path:
    prompts = [{"prompt_id": f"p{n}", "messages": ask(f"question {n}"), "reference": str(n)} for n in numbers]
    return write_rows(path, ({**prompt, "task": "test", **extra} for prompt in prompts))


def two_files(tmp_path: Path, train: Sequence[int], held_out: Sequence[int], **extra: Any) -> DatasetConfig:
    paths = (prompts_file(tmp_path / "train.jsonl", train), prompts_file(tmp_path / "test.jsonl", held_out, **extra))
    return config(adapter="prompts", path=str(paths[0]), eval_path=str(paths[1]), max_quarantined=0.2)


def test_a_file_of_its_own_may_be_what_is_evaluated(tmp_path: Path) -> None:
    report = prepare("prompts", tmp_path / "out", two_files(tmp_path, range(50), range(50, 56)))
    train, held_out = (read_prompts(tmp_path / "out" / f"{name}.parquet") for name in ("train", "eval"))
    assert (len(train), {row.prompt_id for row in held_out}) == (40, {f"p{number}" for number in range(50, 56)})
    assert report.summary == "40 for training, 6 held out, 10 unused, 0 quarantined"
    assert report.lines_read == 56


def test_a_row_of_two_files_is_found_by_its_file_and_line(tmp_path: Path) -> None:
    dataset = two_files(tmp_path, range(50), [50, 51])
    held_out = Path(dataset.eval_path)
    held_out.write_text(held_out.read_text() + "oops\n")
    prepare("prompts", tmp_path / "out", dataset)
    (bad,) = (json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines())
    assert (bad["source"], bad["line"]) == (held_out.name, 3)


def test_a_row_that_says_to_be_for_the_other_side_is_not_used(tmp_path: Path) -> None:
    dataset = two_files(tmp_path, range(50), [50, 51], split="eval")
    assert prepare("prompts", tmp_path / "out", dataset).quarantined == 0
    with pytest.raises(DataError, match=r"test\.jsonl, line 1, split: its source is for 'eval'"):
        prepare("prompts", tmp_path / "again", two_files(tmp_path, range(5), [50, 51], split="train"))


def test_the_digest_of_two_files_follows_both(tmp_path: Path) -> None:
    dataset = two_files(tmp_path, range(50), [50, 51])
    before = source_digest(dataset)
    prompts_file(Path(dataset.eval_path), [50])
    assert {name for name, digest in source_digest(dataset).items() if digest != before[name]} == {"test.jsonl"}
    Path(dataset.eval_path).unlink()
    with pytest.raises(DataError, match="No such file") as caught:
        source_digest(dataset)
    assert caught.value.where.startswith(f"{dataset.eval_path} (relative paths start at the preset's own file")


def test_a_system_prompt_begins_every_conversation_that_has_none(tmp_path: Path) -> None:
    path = prompts_file(tmp_path / "rows.jsonl", range(50))
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "question 99"}]
    row = {"prompt_id": "own", "messages": own, "reference": "", "task": "test"}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    dataset = config(adapter="prompts", path=str(path), system_prompt="Be brief.", num_train=50)
    prepare("prompts", tmp_path / "out", dataset)
    rows = [row for name in ("train", "eval") for row in read_prompts(tmp_path / "out" / f"{name}.parquet")]
    first = {row.prompt_id: row.messages[0] for row in rows}
    assert first.pop("own") == Message(role="system", content="Own.")
    assert set(first.values()) == {Message(role="system", content="Be brief.")}
    # 4 for the template, 2 for the system prompt, 2 for the question
    with pytest.raises(DataError, match="8 tokens"):
        prepare("prompts", tmp_path / "again", replace(dataset, max_tokens=8))


def test_a_refused_dataset_leaves_its_account_and_no_rows(tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "pairs.jsonl", 10)
    path.write_text('{"pair_id": NaN}\n{"broken\n' + path.read_text())
    folder = tmp_path / "out"
    with pytest.raises(DataError) as caught:
        prepare("preferences", folder, config(adapter="preferences", path=str(path), num_train=20, num_eval=3))
    error = caught.value
    assert "2 of 32 rows (6.2%) are quarantined, more than max_quarantined = 0.01 allows" in error.what
    assert "line 1, row: NaN is not JSON" in error.what
    assert error.where == str(path)
    assert str(folder / "quarantine.jsonl") in error.fix
    assert sorted(entry.name for entry in folder.iterdir()) == ["quarantine.jsonl", "report.json"]
    first, second = (json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines())
    assert (first["line"], first["offset"], first["excerpt"]) == (1, 0, '{"pair_id": NaN}')
    assert (second["line"], second["offset"]) == (2, 17)
    assert first["digest"] == hashlib.sha256(b'{"pair_id": NaN}').hexdigest()
    assert json.loads((folder / "report.json").read_text())["passed"] is False


def test_the_fallback_serves_where_the_path_names_nothing(tmp_path: Path) -> None:
    dataset = config(adapter="gsm8k", path=str(tmp_path / "none.jsonl"), fallback=SUMS)
    assert resolve_adapter(dataset) == SUMS
    assert "rlcore/examples/arithmetic.py" in source_digest(dataset)
    assert prepare("prompts", tmp_path / "out", dataset).source == "arithmetic"
    (tmp_path / "none.jsonl").write_text("")
    assert resolve_adapter(dataset) == "gsm8k"
    assert resolve_adapter(config(adapter="alpaca_eval", path="none.jsonl", fallback="policy")) == "policy"
    assert source_digest(config(adapter="policy")) == {}


def test_a_missing_file_without_a_fallback_is_named(tmp_path: Path) -> None:
    dataset = config(adapter="gsm8k", path=str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="no such file") as caught:
        prepare("prompts", tmp_path / "out", dataset)
    assert caught.value.where == dataset.path
    with pytest.raises(DataError, match="No such file") as caught:
        source_digest(dataset)
    assert "fallback" in caught.value.fix


def test_the_digest_of_a_source_is_that_of_its_bytes_or_its_commit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"hello")
    # sha256("hello")
    expected = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert source_digest(config(adapter="gsm8k", path=str(path))) == {"rows.jsonl": expected}
    train, test = f"hub:openai/gsm8k@{COMMIT}/main", f"hub:a/b@{COMMIT}/main:test"
    assert source_digest(config(adapter="gsm8k", path=train)) == {train: COMMIT}
    assert source_digest(config(adapter="gsm8k", path=train, eval_path=test)) == {train: COMMIT, test: COMMIT}


@pytest.mark.parametrize(
    "path", ["hub:gsm8k", "hub:openai/gsm8k", "hub:openai/gsm8k@main", f"hub:openai/gsm8k@{COMMIT}0"]
)
def test_a_dataset_of_the_hub_needs_a_commit(path: str) -> None:
    with pytest.raises(ConfigError, match="malformed") as caught:
        source_digest(config(adapter="gsm8k", path=path))
    assert caught.value.where == path
    assert "40 hexadecimal digits" in caught.value.fix


def test_the_hub_offline_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    dataset = config(adapter="gsm8k", path=f"hub:openai/gsm8k@{COMMIT}/main")
    with pytest.raises(DataError, match="cannot be loaded from the hub") as caught:
        prepare("prompts", tmp_path / "out", dataset)
    assert "download it" in caught.value.fix


@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (config(adapter="gsm9k"), "unknown adapter 'gsm9k'"),
        (config(options={"direct_sahre": 0.5}), f"{SUMS!r} has no option 'direct_sahre'"),
        (config(adapter="gsm8k", fallback=SUMS, options={"depth": 1}), f"'gsm8k' or {SUMS!r} has no option"),
        (config(options={"direct_share": 2.0}), "between 0 and 1"),
    ],
)
def test_what_a_preset_gets_wrong_is_refused_by_name(tmp_path: Path, dataset: DatasetConfig, what: str) -> None:
    with pytest.raises((ConfigError, DataError), match=what):
        prepare("demonstrations", tmp_path, dataset)


def test_options_of_the_fallback_are_allowed_and_reach_it_alone(tmp_path: Path) -> None:
    dataset = config(adapter="gsm8k", path="none.jsonl", fallback=SUMS, options={"direct_share": 1.0})
    prepare("demonstrations", tmp_path, dataset)
    assert all(row.completion.startswith("####") for row in read_demonstrations(tmp_path / "eval.parquet"))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the real files in ../shared/data are not here")
@pytest.mark.parametrize(
    ("kind", "adapter", "name", "counts"),
    [
        ("prompts", "gsm8k", "gsm8k_train.jsonl", (7473, 0, 7473, 0)),
        ("demonstrations", "gsm8k", "gsm8k_train.jsonl", (7473, 0, 7473, 0)),
        ("prompts", "alpaca_eval", "preferences_alpaca_eval.jsonl", (4727, 4121, 606, 0)),
        ("preferences", "alpaca_eval", "preferences_alpaca_eval.jsonl", (4727, 114, 4610, 3)),
    ],
)
def test_real_files_go_through_and_every_line_is_accounted_for(
    tmp_path: Path, kind: Kind, adapter: str, name: str, counts: tuple[int, ...]
) -> None:
    dataset = config(adapter=adapter, path=str(SHARED / name), num_train=400, num_eval=100, max_tokens=512)
    report = prepare(kind, tmp_path, dataset)
    assert (report.lines_read, report.merged, report.accepted, report.quarantined) == counts
    held_out = 62 if report.accepted == 606 else 100  # a tenth, and what is like it
    assert (report.num_train, report.num_eval) == (400, held_out)


QUESTION = (Message(role="user", content="3+4"),)
PAIR = PairRow(
    pair_id="p", set_id="s", messages=QUESTION, chosen="7", rejected="It is 8",
    margin=0.5, probability=0.9, weight=2.0, source="test",
)  # fmt: skip


def test_a_pair_keeps_its_label_and_has_both_sides_under_one_prompt(tokenizer: ChatTokenizer) -> None:
    (pair,) = tokenize_pairs([PAIR], tokenizer, max_tokens=200)
    assert pair.prompt_ids == tokenizer.render_prompt(QUESTION)
    assert pair.chosen_ids == tokenizer.render_demonstration(QUESTION, "7")[1]
    assert pair.rejected_ids == tokenizer.render_demonstration(QUESTION, "It is 8")[1]
    assert (pair.set_id, pair.margin, pair.probability, pair.weight) == ("s", 0.5, 0.9, 2.0)


def test_each_side_is_cut_to_the_budget_with_its_prompt(tokenizer: ChatTokenizer) -> None:
    (whole,) = tokenize_pairs([PAIR], tokenizer, max_tokens=200)
    budget = len(whole.prompt_ids) + 2
    (cut,) = tokenize_pairs([PAIR], tokenizer, max_tokens=budget)
    assert cut.rejected_ids == whole.rejected_ids[:2]
    assert cut.chosen_ids == whole.chosen_ids[:2]


ROW = PromptRow(prompt_id="1", messages=(Message(role="user", content="3+4"),), reference="7", task="sums")


def context_of(folder: Path, **datasets: list[str]) -> Any:
    """Prepared data sets, each with prompts of these ids; nothing else of a context is read."""
    for name, ids in datasets.items():
        (folder / name).mkdir()
        rows = [
            {
                "prompt_id": each,
                "messages": [{"role": "user", "content": f"{name} {each}"}],
                "reference": {"1": "7", "2": "9"}.get(each, ""),
                "task": name,
                "split": "train",
            }
            for each in ids
        ]
        write_table(pd.DataFrame(rows), folder / name / "train.parquet")
    return SimpleNamespace(inputs={f"prepare_{name}": folder / name for name in datasets})


def test_a_prompt_ends_where_the_policy_begins_to_write(tokenizer: ChatTokenizer) -> None:
    (prompt,) = tokenize_prompts([ROW], tokenizer, dataset="gsm8k")
    assert prompt.token_ids == tokenizer.render_prompt(ROW.messages)
    assert (prompt.prompt_id, prompt.reference, prompt.task, prompt.dataset) == ("1", "7", "sums", "gsm8k")


def test_ids_begin_with_the_data_set_only_where_there_are_several(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    context = context_of(tmp_path, maths=["1", "2"], code=["1"])
    several = read_prompt_sets(context, ["maths", "code"], "train", tokenizer)
    assert [prompt.prompt_id for prompt in several] == ["maths/1", "maths/2", "code/1"]
    assert [prompt.dataset for prompt in several] == ["maths", "maths", "code"]
    alone = read_prompt_sets(context, ["maths"], "train", tokenizer)
    assert [prompt.prompt_id for prompt in alone] == ["1", "2"]


def test_a_reference_of_another_row_is_found(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(path: Path) -> list[PromptRow]:
        rows = read_prompts(path)
        return [replace(row, reference=rows[place - 1].reference) for place, row in enumerate(rows)]

    monkeypatch.setattr(step_rows, "read_prompts", moved)
    with pytest.raises(CanaryError, match=r"prompt 'maths/1' has the reference answer '9'.* own reference is '7'"):
        read_prompt_sets(context_of(tmp_path, maths=["1", "2"], code=["3"]), ["maths", "code"], "train", tokenizer)


def test_a_limit_is_of_each_data_set(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    context = context_of(tmp_path, maths=["1", "2", "3"], code=["1"])
    limited = read_prompt_sets(context, ["maths", "code"], "train", tokenizer, limit=2)
    assert [prompt.prompt_id for prompt in limited] == ["maths/1", "maths/2", "code/1"]
