"""Adapter to the language model evaluation harness (lm-eval), and records of its results.

    model = LmEvalModel(policy, tokenizer, config, seed=0)
    records = evaluate(model, config, cache=folder)  # a row for each task, document and metric

Nothing is loaded from the internet: a task is a YAML file with JSONL files in its folder. YAML tags that run Python,
such as ``!function``, are errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from rlcore.config.answers import BenchmarkConfig
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.models.policy import completion_states, score_tokens, state_scores
from rlcore.sampling.base import SamplingParams
from rlcore.sampling.native import NativeSampler
from rlcore.text.chat_template import render_turns
from rlcore.text.packing import PackedBatch, TokenSequence
from rlcore.text.tokenization import ChatTokenizer
from rlcore.types import FailedRollout, Prompt

Record = dict[str, Any]
METRICS = ("acc", "acc_norm", "acc_mutual_info", "acc_bytes", "exact_match")
"""Supported metrics: one value per document, between 0 and 1, higher is better."""


class LmEvalModel(TemplateLM):  # type: ignore[misc]
    """A policy and its tokenizer behind lm-eval's interface: log-likelihoods and greedy completions."""

    tokenizer_name = ""  # for lm-eval's request cache, which is off

    def __init__(
        self, policy: PreTrainedModel, tokenizer: ChatTokenizer, config: BenchmarkConfig, *, seed: int
    ) -> None:
        super().__init__()
        self._policy, self._chat, self._config, self._seed = policy, tokenizer, config, seed
        self._engine = NativeSampler(policy, tokenizer, max_concurrent=config.max_concurrent)
        self._positions: int = policy.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """Token before a text without context."""
        return self._chat.eos_ids[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, including the control tokens of a rendered conversation."""
        found: list[int] = self._chat.hf_tokenizer.encode(string, add_special_tokens=False)
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_turns(self._chat.hf_tokenizer, chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in nats, after an EOS token."""
        texts = [([self.eot_token_id], self.tok_encode(request.args[0])) for request in requests]
        return [total for total, _ in self._scored(texts)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy completion of each request, up to its first stop text."""
        found = dict[int, str]()
        numbered = sorted(enumerate(requests), key=lambda pair: self._limit(pair[1]))
        for limit, group in groupby(numbered, key=lambda pair: self._limit(pair[1])):
            numbers, chosen = zip(*group, strict=True)
            prompts = [self._prompt(request.args[0]) for request in chosen]
            params = SamplingParams(temperature=1.0, max_new_tokens=limit, num_samples=1, greedy=True)
            for number, request, (answer,) in zip(
                numbers, chosen, self._engine.sample(prompts, params, seed=self._seed), strict=True
            ):
                if isinstance(answer, FailedRollout):
                    raise ModelError(f"a benchmark prompt got no completion: {answer.reason}")
                found[number] = _until(answer.text, request.args[1].get("until") or ())
        return [found[number] for number in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([(context, continuation) for _, context, continuation in requests])

    def _scored(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and True if greedy decoding gives it."""
        sequences = [TokenSequence(prompt_ids=tuple(one), completion_ids=tuple(other)) for one, other in texts]
        longest = max((len(one) + len(other) for one, other in texts), default=0)
        if longest > self._positions:
            raise ModelError(f"a benchmark text has {longest} tokens, the model has {self._positions} positions")

        def score(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
            states = completion_states(self._policy, batch)
            likeliest = self._policy.get_output_embeddings()(states).argmax(-1)
            return state_scores(self._policy, states, batch), likeliest == batch.targets

        tokens = self._config.tokens_per_microbatch
        logprobs, likeliest = score_tokens(self._policy, sequences, score, tokens_per_microbatch=tokens, count=2)
        return [(float(one.double().sum()), bool(other.all())) for one, other in zip(logprobs, likeliest, strict=True)]

    def _limit(self, request: Instance) -> int:
        settings = request.args[1]
        if settings.get("do_sample") or float(settings.get("temperature") or 0.0):
            raise ConfigError(f"task {request.task_name}: only greedy decoding is supported", fix="remove do_sample")
        return int(settings.get("max_gen_toks") or self._config.max_new_tokens)

    def _prompt(self, text: str) -> Prompt:
        return Prompt(prompt_id="", messages=(), token_ids=tuple(self.tok_encode(text)), reference="", task="")


def evaluate(model: TemplateLM, config: BenchmarkConfig, *, cache: Path) -> list[Record]:
    """Run the tasks and return a record per document: ``task``, ``doc_id``, ``doc_sha256``, ``metric``, ``value``.

    ``cache``: folder for the tables of the data.

    Raises:
        ConfigError: A file is no task, or a task samples its completions.
        DataError: A file is unreadable.
        ModelError: A text does not fit into the model's positions.
    """
    tasks = [task_of(config, name, cache=cache) for name in config.tasks]
    found = simple_evaluate(
        model,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        limit=config.limit or None,
        bootstrap_iters=0,
        apply_chat_template=config.chat,
        log_samples=True,
        verbosity="ERROR",
    )
    return [record for name in config.tasks for record in _records(name, found["samples"][name])]


def task_of(config: BenchmarkConfig, name: str, *, cache: Path) -> dict[str, Any]:
    """Return a task for lm-eval, with the paths of its data.

    Raises:
        ConfigError: The file is no task, or has a tag.
        DataError: It is unreadable.
    """
    path = Path(config.folder) / f"{name}.yaml"
    try:
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise DataError(f"benchmark task is unreadable: {error}", where=str(path)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not a task: {error}", where=str(path), fix="remove tags such as !function") from error
    files = (task.get("dataset_kwargs") or {}).get("data_files") if isinstance(task, dict) else None
    if not isinstance(files, Mapping) or not all(isinstance(each, str) for each in files.values()):
        raise ConfigError(
            "a task needs dataset_kwargs.data_files, a file for each split", where=str(path), fix="test: my_task.jsonl"
        )
    for metric in task.get("metric_list") or ():
        _check_metric(metric, where=str(path))
    for each in files.values():
        if not (path.parent / each).is_file():
            raise DataError(f"{each}: no such file in the folder of the task", where=str(path))
    data = {split: str((path.parent / each).resolve()) for split, each in files.items()}
    return {
        **task,
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": data, "cache_dir": str(cache)},
    }


def _check_metric(metric: object, *, where: str) -> None:
    # Sums and perplexities cannot guard, and lm-eval would download missing metrics.
    name = metric.get("metric") if isinstance(metric, Mapping) else metric
    if name not in METRICS:
        raise ConfigError(f"metric {name!r} is not supported", where=where, fix=f"use one of {', '.join(METRICS)}")


def _records(task: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
    for sample in samples:
        for metric in sample["metrics"]:
            value = sample[metric]
            if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise ConfigError(f"task {task}: metric {metric} of a document is {value!r}, expected a value in 0..1")
            yield {
                "task": task,
                "doc_id": int(sample["doc_id"]),
                "doc_sha256": str(sample["doc_hash"]),
                "metric": f"{metric},{sample['filter']}",
                "value": float(value),
            }


def _until(text: str, stops: Sequence[str]) -> str:
    ends = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop and stop in text]
    return text[: min(ends, default=len(text))]
