"""The evaluation harness over a policy of ours: the same figures as transformers' own forward pass and greedy search.

``make test-slow`` installs the harness and runs them; without it they are skipped, and say so.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlcore.config import ModelConfig
from rlcore.config.answers import BenchmarkConfig
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.models.importing import import_model
from rlcore.models.loading import load_policy
from rlcore.text.tokenization import ChatTokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-slow")

from rlcore.sampling.lm_eval import LmEvalModel, evaluate, task_of

ROWS = [
    {"question": "3+4", "answers": ["7", "8", "1"], "right": 0},
    {"question": "2+4", "answers": ["9", "6", "12"], "right": 1},
    {"question": "9-5", "answers": ["5", "3", "4"], "right": 2},
]
CHOICE = """
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{answers}}"
doc_to_target: "{{right}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWER = """
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answers[right]}}"
generation_kwargs: {max_gen_toks: 6, until: ["!"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "model"
    import_model(ModelConfig(source="scratch"), folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> PreTrainedModel:
    return load_policy(checkpoint, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> ChatTokenizer:
    return ChatTokenizer.load(checkpoint)


@pytest.fixture
def config(tmp_path: Path) -> BenchmarkConfig:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    (folder / "choice.yaml").write_text(CHOICE, encoding="utf-8")
    (folder / "answer.yaml").write_text(ANSWER, encoding="utf-8")
    return BenchmarkConfig(folder=str(folder), tasks=("choice", "answer"))


@pytest.fixture
def model(policy: PreTrainedModel, tokenizer: ChatTokenizer, config: BenchmarkConfig) -> LmEvalModel:
    return LmEvalModel(policy, tokenizer, config, seed=0)


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args, task_name="task")


def scores(policy: PreTrainedModel, ids: list[int], start: int) -> tuple[float, bool]:
    """Transformers' own log-probability of ``ids[start:]``, and whether each of them is the likeliest."""
    with torch.no_grad():
        logits = policy(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
    target = torch.tensor(ids[start:])
    logprobs = logits.log_softmax(-1).gather(-1, target[:, None])
    return float(logprobs.double().sum()), bool((logits.argmax(-1) == target).all())


def greedy(policy: PreTrainedModel, tokenizer: ChatTokenizer, text: str, new: int) -> str:
    ids = torch.tensor([tokenizer.hf_tokenizer.encode(text, add_special_tokens=False)])
    found = policy.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=tokenizer.eos_ids[0]
    )
    return str(tokenizer.hf_tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def test_log_likelihoods_equal_forward_pass(
    model: LmEvalModel, policy: PreTrainedModel, tokenizer: ChatTokenizer
) -> None:
    likeliest = greedy(policy, tokenizer, "3+4", 1)
    pairs = [("3+4", "=7"), ("12-5", "=7 or 8"), ("1", "2"), ("3+4", likeliest)]
    found = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (total, is_greedy) in zip(pairs, found, strict=True):
        start = len(model.tok_encode(context))
        expected = scores(policy, model.tok_encode(context + continuation), start)
        assert total == pytest.approx(expected[0], abs=1e-4)
        assert is_greedy == expected[1]
    assert likeliest and found[-1][1] and not found[0][1]


def test_rolling_log_likelihood_starts_after_eos(model: LmEvalModel, policy: PreTrainedModel) -> None:
    texts = ["3+4=7", "a longer text, of words"]
    found = model.loglikelihood_rolling([request(text) for text in texts], disable_tqdm=True)
    expected = [scores(policy, [model.eot_token_id, *model.tok_encode(text)], 1)[0] for text in texts]
    assert found == pytest.approx(expected, abs=1e-4)


def test_answers_equal_greedy_search(model: LmEvalModel, policy: PreTrainedModel, tokenizer: ChatTokenizer) -> None:
    asked = [("3+4", 9), ("12-5", 3), ("1", 9), ("8-2+5", 5)]
    found = model.generate_until([request(text, {"max_gen_toks": new}) for text, new in asked], disable_tqdm=True)
    assert found == [greedy(policy, tokenizer, text, new) for text, new in asked]
    assert len(set(found)) > 1
    longest = max(found, key=len)
    text, new = asked[found.index(longest)]
    stop = longest[len(longest) // 2]
    (cut,) = model.generate_until([request(text, {"max_gen_toks": new, "until": [stop]})], disable_tqdm=True)
    assert cut == longest[: longest.index(stop)]


def test_sampling_task_is_refused(model: LmEvalModel) -> None:
    for settings in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(ConfigError, match="only greedy decoding is supported"):
            model.generate_until([request("1", settings)], disable_tqdm=True)


def test_too_long_text_is_refused(model: LmEvalModel) -> None:
    with pytest.raises(ModelError, match="positions"):
        model.loglikelihood([request("1", "2" * 2_000)], disable_tqdm=True)


@pytest.mark.parametrize("chat", [False, True])
def test_records_equal_preference_of_model(
    model: LmEvalModel,
    policy: PreTrainedModel,
    tokenizer: ChatTokenizer,
    config: BenchmarkConfig,
    tmp_path: Path,
    chat: bool,
) -> None:
    records = evaluate(model, dataclasses.replace(config, chat=chat), cache=tmp_path / "cache")
    by_hand = []
    for row in ROWS:
        question = str(row["question"])
        text = model.apply_chat_template([{"role": "user", "content": question}]) if chat else question
        totals = []
        for answer in row["answers"]:  # type: ignore[attr-defined]
            whole = model.tok_encode(text + answer)
            totals.append(scores(policy, whole, len(model.tok_encode(text.rstrip())))[0])
        by_hand.append(float(totals.index(max(totals)) == row["right"]))
    choice = [each for each in records if each["task"] == "choice"]
    assert [(each["doc_id"], each["metric"]) for each in choice] == [(number, "acc,none") for number in range(3)]
    assert [each["value"] for each in choice] == by_hand
    assert len({each["doc_sha256"] for each in records}) == 3  # the documents are the same in both tasks
    assert all(math.isfinite(each["value"]) for each in records)
    assert evaluate(model, dataclasses.replace(config, chat=chat), cache=tmp_path / "again") == records


def test_limit_takes_first_documents(model: LmEvalModel, config: BenchmarkConfig, tmp_path: Path) -> None:
    records = evaluate(model, dataclasses.replace(config, limit=2), cache=tmp_path / "cache")
    assert [(each["task"], each["doc_id"]) for each in records] == [
        ("choice", 0),
        ("choice", 1),
        ("answer", 0),
        ("answer", 1),
    ]


def test_invalid_task_files_are_refused(config: BenchmarkConfig, tmp_path: Path) -> None:
    folder = Path(config.folder)
    (folder / "python.yaml").write_text("doc_to_text: !function code.run\n", encoding="utf-8")
    (folder / "remote.yaml").write_text("dataset_path: someone/data\n", encoding="utf-8")
    (folder / "gone.yaml").write_text("dataset_kwargs: {data_files: {test: gone.jsonl}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="remove tags"):
        task_of(config, "python", cache=tmp_path)
    with pytest.raises(ConfigError, match=r"data_files, a file for each split"):
        task_of(config, "remote", cache=tmp_path)
    with pytest.raises(DataError, match="no such file"):
        task_of(config, "gone", cache=tmp_path)
    with pytest.raises(DataError, match="is unreadable"):
        task_of(config, "missing", cache=tmp_path)
