"""``rlcore plan`` names the errors of every layer in one round, and reads what users have: rows, a model folder."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlcore.data_contracts.adapters.convert import first_rows
from rlcore.data_contracts.gate.reading import read_source
from rlcore.flows.cli.app import main
from rlcore.rewards.answers import accepted_answers
from rlcore.tasks.preflight import sizes
from rlcore.tasks.store.settings import Home
from tests.first_day.conftest import rows, write

PRESET = """extends = "chat"
name = "mine"
[model]
source = "folder"
path = "model"
license = "MIT"
[data.prompts]
adapter = "prompts"
path = "rows.jsonl"
num_train = 40
num_eval = 6
max_tokens = 128
[stages.grpo]
sampling.max_new_tokens = 32
[evaluation]
max_new_tokens = 32
"""
HEAVY = ("torch", "transformers", "pandas", "pandera", "mlflow", "prefect", "datasets")


class Said(NamedTuple):
    """Output of a refused plan: the lines of errors by the file above them, and all text."""

    lines: dict[str, list[str]]
    text: str

    @property
    def all(self) -> list[str]:
        return [line for lines in self.lines.values() for line in lines]


@pytest.fixture
def project(tmp_path: Path, home: Home, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    Path("mine.toml").write_text(PRESET)
    write("rows.jsonl", rows())
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> Said:
    code = main(["plan", "mine.toml", *(word for override in overrides for word in ("--set", override))])
    output = capsys.readouterr()
    assert (code == 2) == bool(output.err), output.err
    found: dict[str, list[str]] = {}
    file = ""
    for line in output.err.splitlines():
        if line.startswith("    "):
            found.setdefault(file, []).append(line.strip())
        elif line.startswith("  ") and line.endswith(":"):
            file = line.strip().rstrip(":")
    return Said(found, output.out + output.err)


def test_a_valid_preset_is_planned_with_memory_disk_and_time_as_far_as_it_is_known(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = planned(capsys)
    assert not output.lines
    kinds = [line.partition(":")[0] for line in output.text.splitlines() if ": " in line]
    assert [each for each in kinds if each != "precision"] == ["memory", "disk", "time"]  # a processor may have a hint
    assert "time: unknown; " in output.text


@pytest.mark.parametrize(
    ("preset", "error"),
    [
        (
            PRESET.replace("[stages.grpo]", "[stages.grpo]\nlearning_rate = -1e-5"),
            "stages.grpo.learning_rate = -1e-05: must be greater than 0.0",
        ),
        (
            PRESET.replace('"folder"', '"foldr"').replace("max_tokens = 128", "max_tokens = 500"),
            "model.source = 'foldr': must be one of 'scratch', 'hub', 'folder', 'gguf', 'package', 'registry'; "
            "did you mean 'folder'?",
        ),
    ],
    ids=["learning_rate", "source"],
)
def test_the_value_that_replaces_a_wrong_one_gets_no_error_of_its_own(
    project: Path, capsys: pytest.CaptureFixture[str], preset: str, error: str
) -> None:
    Path("mine.toml").write_text(preset)
    output = planned(capsys)
    assert output.all == [error] and "where: mine.toml" in output.text


ROWS = [
    ("wrong columns", [{"problem": "1 + 1", "solution": "2"}], (), "", ["missing", "messages", "problem"]),
    ("no text", rows(reference=4), (), "", ["reference", "60 of 60 lines"]),
    ("no accepted answer", rows(reference=["proof", "n/a"]), (), "", ["is no answer", "60 of 60 lines"]),
    ("empty", [], (), "", ["no rows"]),
    ("adapter of other rows", rows(), ("adapter='preferences'",), ".adapter", ["reads no prompts", "gsm8k"]),
    ("too few tokens", rows(), ("max_tokens=8",), ".max_tokens", ["no room for an answer in 8 tokens", "22"]),
    ("repeated ids", [*rows(), *rows(prompt_id="q7")[:1]], (), "", ["prompt_id: an earlier row", "is line 61"]),
    (
        "answers of other graders",
        [
            {"messages": row["messages"], "ground_truth": text, "dataset": "mixed"}
            for row, text in zip(rows(), ['{"f": "x"}', "assert f(1) == 2", "None", "5"] * 15, strict=True)
        ],
        ("adapter='rlvr'",),
        "",
        ["JSON or Python, which the reward `math` does not", "its tests", "is no answer", "15 of 60"],
    ),
    ("no answer", rows(reference="proof"), (), "", ["no answer can be graded with it"]),
    ("one of sixty", [*rows()[1:], *rows(reference=4)[:1]], (), "", ["max_quarantined = 0.01 allows"]),
    ("no column to drop", rows(note="x"), ("drop_columns=['nte']",), ".drop_columns", ["did you mean 'note'?"]),
    ("no document", rows(note="x"), ("group_column='page'",), ".group_column", ["a row has no value of 'page'"]),
]


def dataset(file: str, *settings: str) -> str:
    own = {setting.partition("=")[0] for setting in settings}
    usual = {"adapter": "'prompts'", "num_train": 40, "num_eval": 6, "max_tokens": 128}
    keys = [f"{key}={value}" for key, value in usual.items() if key not in own]
    return f"{{contract='prompts',path='{file}',{','.join([*keys, *settings])}}}"


def test_rows_that_a_run_would_refuse_are_named_with_their_file_key_and_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a dataset of one preset, so that one plan names all of them."""
    overrides = []
    for number, (_, values, settings, *_) in enumerate(ROWS):
        write(f"{number}.jsonl", values)
        overrides.append(f"data.set{number}={dataset(f'{number}.jsonl', *settings)}")
    drawn = ",".join(f"set{number}=1.0" for number in range(len(ROWS)))
    output = planned(capsys, *overrides, f"stages.grpo.prompts={{{drawn}}}")
    for number, (name, _, _, key, words) in enumerate(ROWS):
        lines = [line for line in output.all if line.startswith(f"data.set{number}{key}")]
        assert lines and [word for word in words if word not in " ".join(lines)] == [], (name, output.text)
    assert len([file for file in output.lines if file.endswith(".jsonl")]) >= len(ROWS) - 1


@pytest.mark.parametrize(
    ("scores", "error"), [((1, 1), "score_chosen: left out: a tie is no pair"), ((2, 1), "")], ids=["ties", "pairs"]
)
def test_pairs_of_which_none_is_left_are_an_error(
    project: Path, capsys: pytest.CaptureFixture[str], scores: tuple[int, int], error: str
) -> None:
    sides = {"chosen": "yes", "rejected": "no", "score_chosen": scores[0], "score_rejected": scores[1]}
    write("pairs.jsonl", [{"prompt": f"Is {number} odd?", **sides} for number in range(1, 60, 2)])
    table = "contract='preference_pairs',adapter='trl_preference',path='pairs.jsonl',num_train=9,num_eval=2"
    output = planned(capsys, f"data.pairs={{{table},max_tokens=64}}")
    assert output.lines.get("pairs.jsonl", [""])[0].startswith(f"data.pairs: {error}" if error else "")
    assert bool(output.lines) == bool(error), output.text


SWAPPED: list[tuple[Callable[[int], str], Callable[[int], str], bool]] = [  # prompt, reference
    (lambda n: str(n + 4), lambda n: f"{n} + 4", True),
    (lambda n: f"${n}.50", lambda n: f"Tom has {n} dollars and gets 50 cents.", True),
    (lambda n: f"town {n}", lambda n: f"Which town has the number {n}?", True),
    (lambda n: str(n), lambda n: str(n + 1), False),
    (lambda n: f"{n} + 4", lambda n: str(n + 4), False),
    (lambda n: f"Name town {n}.", lambda n: f"It is the town {n}.", False),
    (lambda n: f"{n}" if n else "Why?", lambda n: f"{n} + 4", False),
]


def test_questions_that_are_answers_are_a_warning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = []
    for number, (prompt, reference, _) in enumerate(SWAPPED):
        write(f"{number}.jsonl", [{"problem": prompt(n), "answer": reference(n)} for n in range(60)])
        table = dataset(f"{number}.jsonl", "adapter='problems'")
        overrides.append(f"data.set{number}={table}")
    lines = planned(capsys, *overrides).text.splitlines()
    found = [any(f"data.set{n}" in line and "are the two swapped?" in line for line in lines) for n in range(7)]
    assert found == [is_swapped for *_, is_swapped in SWAPPED]


def test_a_sample_says_that_it_is_one_and_a_few_bad_rows_are_a_warning(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [{**row, "prompt_id": f"{number}-{row['prompt_id']}"} for number in range(10) for row in rows()]
    write("rows.jsonl", [*rows(reference=4)[:2], *many])
    output = planned(capsys)
    assert not output.lines
    assert "warning: data.prompts: reference: must be a text" in output.text
    assert "2 of the first 300 lines, a sample" in output.text


def test_a_large_max_quarantined_lets_most_rows_be_bad(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("rows.jsonl", [*rows(reference=4)[:40], *rows()[40:]])
    assert not planned(capsys, "data.prompts.max_quarantined=0.8").lines


def test_rows_may_list_several_accepted_answers(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("rows.jsonl", rows(reference=["Paris", "the city of Paris"]))
    assert not planned(capsys).lines
    several = [{"messages": row["messages"], "ground_truth": ["4", "four"], "dataset": "nq"} for row in rows()]
    write("rows.jsonl", several)
    assert not planned(capsys, "data.prompts.adapter=rlvr").lines
    found = first_rows(read_source(Path("rows.jsonl")), "prompts", adapter="rlvr", limit=1)
    assert accepted_answers(found.rows[0]["reference"]) == ["4", "four"]


def test_more_rows_than_a_side_has_are_a_warning_and_few_held_out_rows_an_error(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [[{"role": "user", "content": f"How much is {number} times 3, and why?"}] for number in range(20)]
    write(
        "test.jsonl", [{**rows()[0], "prompt_id": f"t{number}", "messages": each} for number, each in enumerate(others)]
    )
    write("few.jsonl", rows()[:10])
    write("one.jsonl", [{**rows()[0], "prompt_id": "t", "messages": others[0]}])
    for settings, error, words in (
        (("num_eval=7",), False, "num_eval = 7: rows.jsonl has 60 rows, about 6 of them for this"),
        (("num_eval=70", "eval_path=test.jsonl"), False, "70: test.jsonl has 20 rows, about 20 of them for this"),
        (("num_eval=20", "eval_path=test.jsonl"), False, ""),
        (("num_eval=7", "path=few.jsonl"), True, "num_eval: 1 rows are held out, and 7 were asked for; a tenth of the"),
        (("num_eval=7", "eval_path=one.jsonl"), True, "1 rows are held out, and 7 were asked for; add rows"),
    ):
        output = planned(capsys, *(f"data.prompts.{setting}" for setting in settings))
        assert bool(output.lines) == error
        assert ("of them for this" in output.text) == (bool(words) and not error) and words in output.text


def test_a_path_may_begin_in_the_users_folder_or_match_one_file(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project))
    for path in ("~/rows.jsonl", "ro?s.jsonl"):
        assert not planned(capsys, f"data.prompts.path={path}").lines
        Path("mine.toml").write_text(PRESET.replace("rows.jsonl", path))
        assert not planned(capsys).lines


def test_files_of_a_pattern_or_a_folder_are_one_dataset_and_what_cannot_be_one_says_what_to_do(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "parts").mkdir()
    for number, each in enumerate((rows()[:30], rows()[30:])):
        write(f"parts/{number}.jsonl", each)
    for path in ("parts/*.jsonl", "parts"):
        assert not planned(capsys, f"data.prompts.path={path}").lines
        output = planned(capsys, f"data.prompts.path={path}", "data.prompts.num_eval=7")
        assert f"{path} has 60 rows, about 6 of them for this" in output.text
    write("parts/test.jsonl", rows()[:3])
    for path, words in (("*.json", "matches no file"), ("parts", "eval_path")):
        (error,) = planned(capsys, f"data.prompts.path={path}").all
        assert error.startswith("data.prompts.path") and words in error, error


def test_targets_of_lora_that_the_model_lacks_are_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (error,) = planned(capsys, "stages.grpo.update.lora.targets=['q_prj','v_proj']").all
    assert error.startswith("stages.grpo.update.lora.targets: the model has no linear layer q_prj that LoRA can change")
    assert "choose among down_proj, gate_proj," in error


def test_a_model_without_chat_template_or_end_of_sequence_is_refused_before_its_import(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model/chat_template.jinja").unlink()
    output = planned(capsys)
    assert output.lines["model"][0].startswith("model.path: the tokenizer has no chat template")
    Path("own.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        found = json.loads(Path("model", name).read_text())
        Path("model", name).write_text(json.dumps({key: found[key] for key in found if "eos" not in key}))
    output = planned(capsys, "model.chat_template=own.jinja")
    assert output.lines["model"][0].startswith("model.path: the chat template is unsuitable for training")
    assert "no EOS id" in output.text


def config_with(**changes: Any) -> None:
    found = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(found | changes))


MODELS = [  # what is done to the folder of the model, and what plan says then
    (lambda: Path("model/model.safetensors").unlink(), "the folder has no model.safetensors"),
    (
        lambda: Path("model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n"),
        "the file names weights that were not fetched; run git lfs pull",
    ),
    (lambda: config_with(model_type="clip"), "config.json describes no causal language model (clip)"),
    (lambda: config_with(model_type="t5"), "config.json describes no causal language model (t5)"),
    (lambda: config_with(num_hidden_layers=2), "the weights are incomplete: the files lack layers.1."),
]


@pytest.mark.parametrize(("damage", "words"), MODELS, ids=["none", "pointer", "pictures", "encoder", "a layer less"])
def test_a_folder_without_weights_or_of_another_kind_of_model_is_refused_before_its_import(
    project: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[], object], words: str
) -> None:
    damage()
    (error,) = planned(capsys).all
    assert error.startswith("model.path") and words in error


@pytest.mark.parametrize("name", ["rows.jsonl", "copy.jsonl"])
def test_held_out_rows_that_are_the_training_rows_are_an_error_of_the_plan(
    project: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write("copy.jsonl", rows())
    output = planned(capsys, f"data.prompts.eval_path={name}")
    assert output.all == [f"data.prompts.eval_path = {name!r}: has the rows of path; leave it out, to hold out some"]


MODULES = {
    "no_python": ("def f(rollouts) return", "cannot import the function 'no_python:f': expected ':'"),
    "a_script": ("raise SystemExit(3)", "cannot import the function 'a_script:f': it ends Python with 3"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_reward_module_that_is_no_python_or_ends_the_process_is_an_error_of_its_key(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, error = MODULES[name]
    monkeypatch.syspath_prepend(str(project))
    Path(f"{name}.py").write_text(f"{text}\n")
    output = planned(capsys, f"stages.grpo.rewards=[{{kind='{name}:f'}}]")
    assert output.all[0].startswith(f"stages.grpo.rewards.0.kind: {error}")


TRL = "def graded(prompts, completions, solution, level=1, **kwargs):\n    return [0.0] * len(completions)\n"


def test_a_reward_function_that_names_a_column_which_the_rows_lack_is_refused_with_the_columns_that_are_there(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    Path("trl_rewards.py").write_text(TRL)
    monkeypatch.delitem(sys.modules, "trl_rewards", raising=False)
    write("rows.jsonl", rows(answer="7", level=2))
    reward = "stages.grpo.rewards=[{kind='trl_rewards:graded'}]"
    verifier = "evaluation.verifiers=[{kind='trl_rewards:graded',options={level=3}}]"
    output = planned(capsys, reward, verifier)
    needs = "the rows have no column 'solution', which trl_rewards:graded needs; their columns are answer, level; "
    fix = "add the column to the data, or map it: columns = { …, solution = '…' }"
    assert output.all == [f"{key}: {needs}{fix}" for key in ("stages.grpo.rewards.0", "evaluation.verifiers.0")]
    write("rows.jsonl", rows(solution="7"))
    assert not planned(capsys, reward, verifier).lines
    write("rows.jsonl", rows())
    assert not planned(capsys, reward.replace("'}", "',options={solution=1}}")).lines


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset's commit in the hub's cache of this machine, which the hub's library reads."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "datasets--org--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("place", ["", "/default", "/default:train"])
def test_rows_of_the_hub_are_tried_where_its_cache_has_them(
    project: Path, hub: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    blobs = hub.parents[1] / "blobs"
    blobs.mkdir()
    address = f"data.prompts.path=hub:org/name@{COMMIT}{place}"
    for name, values, errors in (("good", rows(), []), ("bad", rows(reference=4), ["data.prompts: reference: must"])):
        write(str(blobs / name), values)
        (hub / "train.jsonl").unlink(missing_ok=True)
        (hub / "train.jsonl").symlink_to(blobs / name)
        output = planned(capsys, address)
        assert [line[:29] for line in output.all] == errors, output.text
        assert "not checked" not in output.text
    assert list(output.lines) == [address.partition("=")[2]]


def test_rows_that_only_the_run_fetches_are_not_checked_and_a_malformed_address_is_an_error(
    project: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "data.prompts.path: not checked: the run fetches these rows, the hub's cache on this machine has none"
    elsewhere = f"hub:org/other@{COMMIT}"
    for address in (elsewhere, f"hub:org/name@{COMMIT}:test"):  # which has no files at all
        output = planned(capsys, f"data.prompts.path={address}")
        assert (output.lines, note in output.text) == ({}, True), output.text
    for address in ("hub:org/name", "hub:org/name@main", f"hub:name@{COMMIT}", f"hub:org/name@{COMMIT}/a/b"):
        (error,) = planned(capsys, f"data.prompts.path={address}").all
        assert error.startswith("data.prompts.path: the hub path is malformed (hub:") and "write hub:org/name@" in error


class Disk(NamedTuple):
    free: int
    total: int = 1 << 40


TWELVE = {  # the key of each planted error, with the file under which it is listed
    "stages.grpo.learning_rat": "mine.toml",  # schema: no such key
    "seed": "mine.toml",  # schema: beyond its bounds
    "stages.more.init_from": "mine.toml",  # graph
    "stages.grpo.rewards.1.kind": "mine.toml",  # reward
    "stages.grpo.rewards.2.kind": "mine.toml",  # the user's function
    "stages.grpo.update.lora.rank": "mine.toml",  # extra
    "hardware.device": "mine.toml",  # machine
    "engine.python": "mine.toml",  # engine
    "data.prompts.eval_path": "mine.toml",  # path
    "data.others": "others.jsonl",  # rows
    "model.path": "model",  # tokenizer
    "disk": "mine.toml",  # sizes
}


@pytest.mark.parametrize("command", ["plan", "run"])
def test_twelve_errors_of_every_layer_are_named_in_one_round(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    Path("model/chat_template.jinja").unlink()
    write("others.jsonl", [{"problem": "1 + 1", "solution": "2"}])
    text = PRESET.replace('name = "mine"', 'name = "mine"\nseed = -1')
    rewards = '[{ kind = "math" }, { kind = "maths" }, { kind = "no_such_module:f" }]'
    text = text.replace("[stages.grpo]", f"[stages.grpo]\nlearning_rat = 1e-6\nrewards = {rewards}")
    text = text.replace("num_train = 40", 'eval_path = "none.jsonl"\nnum_train = 40')
    Path("mine.toml").write_text(f"""{text}
[hardware]
device = "cuda:7"
[engine]
kind = "vllm"
python = "no-python"
[data.others]
contract = "prompts"
adapter = "prompts"
path = "others.jsonl"
num_train = 9
num_eval = 9
max_tokens = 64
[stages.more]
kind = "rl"
init_from = "grop"
prompts = {{ prompts = 1.0 }}
algorithm = "grpo"
num_iterations = 1
prompts_per_iteration = 1
group_size = 2
learning_rate = 1e-6
rewards = [{{ kind = "math" }}]
sampling = {{ max_new_tokens = 8 }}
""")
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda folder: Disk(free=1_000))
    monkeypatch.setattr("rlcore.tasks.preflight.model_checks.find_spec", without_peft)
    assert main([command, "mine.toml"]) == 2
    output = capsys.readouterr().err
    assert "preset has 12 errors:" in output
    file, found = "", {}
    for line in output.splitlines():
        if line.startswith("    ") and not line.startswith("    warning"):
            found[line.split(":")[0].split(" = ")[0].strip()] = file
        elif line.startswith("  ") and line.endswith(":"):
            file = line.strip().rstrip(":")
    assert found == TWELVE


CHAT = 'extends = "chat"\nname = "mine"\n'
BROKEN = {
    "nothing but its base": CHAT,
    "a model without license": CHAT
    + '[model]\nsource = "folder"\npath = "model"\n[data.prompts]\npath = "rows.jsonl"\n',
    "no data": PRESET.partition("[data.prompts]")[0],
    "no such files": PRESET.replace('"rows', '"none').replace('path = "model"', 'path = "none"'),
    "wrong types": PRESET.replace("40", "'many'").replace("num_eval = 10", "num_eval = -1"),
    "a stage without anything": PRESET + '[stages.more]\nkind = "rl"\n',
    "unknown kinds": PRESET + '[stages.more]\nkind = "grpo"\n[data.more]\ncontract = "rows"\n',
    "a stage of no dataset": PRESET.replace("[stages.grpo]", "[stages.grpo]\nprompts = { others = 1.0 }"),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_each_error_is_printed_once(project: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    Path("mine.toml").write_text(text)
    assert main(["plan", "mine.toml"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    keys = [line.strip().partition(":")[0].partition(" = ")[0] for line in lines]
    assert lines and sorted(keys) == sorted(set(keys)), lines


def without_peft(name: str) -> ModuleSpec | None:
    return None if name == "peft" else importlib.util.find_spec(name)


LIGHT = (  # commands that are refused or answered without a library, and words of the error
    (["plan", "typo.toml"], "no such preset or file"),
    (["plan", "broken.toml"], "not valid TOML"),
    (["plan", "tiny", "--set", "sedd=1"], "did you mean seed?"),
    (["run", "tiny", "--set", "sedd=1"], "did you mean seed?"),
    (["config", "tiny", "stages.grpo.kl"], ""),
)


def test_a_wrong_preset_is_refused_before_anything_heavy_is_imported(tmp_path: Path, home: Home) -> None:
    (tmp_path / "broken.toml").write_text("name = \n")
    code = f"""
import sys
from rlcore.flows.cli.app import main
codes = [main(arguments) for arguments, _ in {LIGHT!r}]
print(codes, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [words for _, words in LIGHT if words not in done.stderr] == []
    assert done.stderr.splitlines()[-1] == f"{[2 if words else 0 for _, words in LIGHT]} []"


def test_a_wrong_key_is_printed_before_rows_and_model_are_checked(project: Path) -> None:
    """Without the heavy libraries the check of rows and model fails; the key has been named by then."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY!r}))
from rlcore.flows.cli.app import main
main(["plan", "mine.toml", "--set", "sedd=1"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("sedd: unknown key; did you mean seed?")
    assert "checking rows, model and functions too" in done.stderr
    assert "ModuleNotFoundError" in done.stderr
